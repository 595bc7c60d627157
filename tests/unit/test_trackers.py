"""A tracker that fails is dropped, and training continues."""

from support.console import Console
from support.report.trackers import Tracker, Trackers


def test_a_failing_tracker_is_dropped_with_one_notice(capsys):
    points = []

    def fail(*_):
        raise OSError(28, "No space left on device")

    broken = Tracker("broken", (OSError,), fail, fail)
    working = Tracker("working", (OSError,), lambda *point: points.append(point), fail)
    trackers = Trackers([broken, working], Console(is_main=True))
    for step in (1, 2):
        trackers.log({"step": step, "loss": 2.0})
    assert points == [(1, {"train/loss": 2.0}), (2, {"train/loss": 2.0})]
    assert capsys.readouterr().out.count("No space left") == 1
