"""Trackers: which files of an earlier run they replace, and what happens to one that fails."""

from types import SimpleNamespace

import pytest

from support.console import Console
from support.report.trackers import Tracker, Trackers, start_trackers, wandb_run_of

EARLIER = "events.out.tfevents.1.x"


@pytest.mark.parametrize(
    "overwrite, resume", [(True, None), (False, None), (True, ""), (False, "")]
)
def test_only_a_new_run_with_overwrite_deletes_event_files(tmp_path, overwrite, resume):
    """A run with --resume that finds no checkpoint starts at step 0, too."""
    for name in (EARLIER, "mine.txt"):
        (tmp_path / name).write_text("mine")
    flags = {"report_to": ["tensorboard"], "logging_dir": str(tmp_path), "tags": ["short"]}
    args = SimpleNamespace(**flags, overwrite=overwrite, resume=resume)
    deleted = overwrite and resume is None
    failures = SimpleNamespace(flushes=[])
    ctx = SimpleNamespace(is_main=True, console=Console(is_main=True), failures=failures)
    trackers = start_trackers(args, ctx, tmp_path / "run", 0)
    trackers.log({"step": 1, "loss": 1.0})
    trackers.close(1, "a sample")
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert (tmp_path / EARLIER).exists() is not deleted
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == (1 if deleted else 2)
    assert not (tmp_path / "run").exists()


def test_a_failing_tracker_is_dropped_but_a_bug_is_not_hidden(capsys):
    points = []

    def fail(step, values):
        raise error

    error: Exception = OSError(28, "No space left on device")
    broken = Tracker("broken", (OSError,), fail, fail, fail)
    working = Tracker("working", (OSError,), lambda *point: points.append(point), fail, fail)
    trackers = Trackers([broken, working], Console(is_main=True), active=True)
    for step in (1, 2):
        trackers.log({"step": step, "loss": 2.0})
    assert points == [(1, {"train/loss": 2.0}), (2, {"train/loss": 2.0})]
    assert capsys.readouterr().out.count("No space left") == 1
    error = KeyError()
    with pytest.raises(KeyError):
        Trackers([broken], Console(is_main=True), active=True).memory(1, [1])


def test_a_resumed_run_keeps_its_wandb_project(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "of-the-environment")
    identifier, project = wandb_run_of(tmp_path, 0, None)
    assert project == "of-the-environment"
    monkeypatch.setenv("WANDB_PROJECT", "another")
    assert wandb_run_of(tmp_path, 4, None) == (identifier, "of-the-environment")
    assert wandb_run_of(tmp_path, 4, "mine") == (identifier, "mine")
    assert wandb_run_of(tmp_path, 4, None) == (identifier, "mine")
