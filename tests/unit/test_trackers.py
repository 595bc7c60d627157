"""A tracker that fails is dropped, and training continues."""

from types import SimpleNamespace

from support.report.trackers import Tracker, Trackers


def test_a_failing_tracker_is_dropped_with_one_notice(capsys, tmp_path):
    points = []

    def fail(*_):
        raise OSError(28, "No space left on device")

    args = SimpleNamespace(tags=[], report_to=[])
    trackers = Trackers(args, tmp_path, 0)
    trackers.started["broken"] = Tracker(fail, fail)
    trackers.started["working"] = Tracker(lambda *point: points.append(point), fail)
    for step in (1, 2):
        trackers.log({"step": step, "loss": 2.0})
    assert points == [(1, {"train/loss": 2.0}), (2, {"train/loss": 2.0})]
    assert capsys.readouterr().out.count("No space left") == 1
