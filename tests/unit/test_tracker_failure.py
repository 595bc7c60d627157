"""A tracker that fails is dropped with a notice; the training and the other trackers continue."""

from types import SimpleNamespace

import pytest


class Recorder:
    """A tracker that keeps what it is given, or raises."""

    def __init__(self, error: Exception | None = None):
        self.points: list = []
        self.error = error

    def curves(self, step: int, values: dict) -> None:
        if self.error:
            raise self.error
        self.points.append((step, values))

    def flush(self) -> None:
        """Nothing is buffered."""


@pytest.mark.attack
def test_a_failing_tracker_is_dropped(monkeypatch, tmp_path, capsys):
    from support.console import Console
    from support.report import trackers

    broken, working = Recorder(OSError(28, "No space left on device")), Recorder()
    kinds = {"tensorboard": lambda *_: broken, "wandb": lambda *_: working}
    monkeypatch.setattr(trackers, "KINDS", kinds)
    args = SimpleNamespace(report_to=["tensorboard", "wandb"], logging_dir=None)
    failures = SimpleNamespace(flushes=[])
    ctx = SimpleNamespace(is_main=True, console=Console(is_main=True), failures=failures)
    every = trackers.Trackers(args, ctx, tmp_path, 0)
    for step in (1, 2):
        every.log({"step": step, "loss": 2.0})
    assert working.points == [(1, {"train/loss": 2.0}), (2, {"train/loss": 2.0})]
    notices = capsys.readouterr().out
    assert notices.count("No space left") == 1
