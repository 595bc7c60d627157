"""What a resumed run takes over of the best evaluation of the run that it continues."""

import json

import pytest
from one_rank import one_rank

from distributed_training.checkpoints import best
from distributed_training.checkpoints.find import FoundCheckpoint
from distributed_training.checkpoints.folder import CheckpointFolder
from distributed_training.checkpoints.format import marked

BEST = {"loss": 2.0, "step": 2, "waited": 1}
SOFT = {"validation": None, "dataset": "a", "seq_length": 64, "blocks": 24}
EVALUATED = "evaluated sequences"


def signature(count=8, **soft):
    return {"hard": {}, "soft": {**SOFT, **soft}, "told": {EVALUATED: count}}


def write(folder, step, text=""):
    checkpoint = folder / "checkpoints" / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(json.dumps({"step": step, "text": text}))
    return checkpoint


def best_of(path, current, saved=None, step=4, keeps_best=True):
    manifest = {"counters": {"step": step, "best": BEST}, "identity": saved or signature()}
    with one_rank() as ctx:
        return best.best_of(FoundCheckpoint(path, manifest), current, keeps_best, ctx)


def test_the_best_checkpoint_is_next_to_the_resumed_one(tmp_path, capfd):
    path = write(tmp_path, 4)
    assert best_of(path, signature())[0] is None
    assert "is missing: a later evaluation is the best" in capfd.readouterr().out
    assert best_of(path, signature(), keeps_best=False)[0] == BEST  # for early stopping
    other = write(tmp_path, 2)
    assert best_of(path, signature()) == (BEST, other)
    moved = path.rename(tmp_path / "moved")
    assert best_of(moved, signature(), step=2) == (BEST, moved)
    assert capfd.readouterr().out == ""


OTHER_SEQUENCES = [
    (signature(), signature(9)),
    (signature(), signature(seq_length=128)),
    (signature(), signature(dataset="b")),  # from which they are held out
    (signature(validation="v"), signature(validation="w")),
    (signature(), signature(validation="v")),
    (signature(), signature(isolate_documents=True)),  # earlier versions do not have the entry
]
THE_SAME = [
    (signature(), signature(blocks=12)),
    (signature(validation="v"), signature(validation="v", dataset="b")),
    (signature() | {"told": {}}, signature(9)),  # of an earlier version
    (signature(), signature(isolate_documents=False)),
]


@pytest.mark.parametrize("saved, current", OTHER_SEQUENCES)
def test_losses_of_other_sequences_are_not_compared(tmp_path, capfd, saved, current):
    assert best_of(tmp_path, current, saved, keeps_best=False)[0] is None
    said = "the best loss so far, 2.0000 of step 2, is not compared with theirs"
    assert capfd.readouterr().out.count(said) == 1


@pytest.mark.parametrize("saved, current", THE_SAME)
def test_losses_of_the_same_sequences_are_compared(tmp_path, capfd, saved, current):
    assert best_of(tmp_path, current, saved, keeps_best=False)[0] == BEST
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("links", [True, False])
def test_the_best_checkpoint_of_another_folder_is_copied(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(best.os, "link", lambda *_: (_ for _ in ()).throw(OSError()))
    source, own = write(tmp_path / "old", 2, "best"), tmp_path / "new" / "checkpoints"
    best.take_over(source, 2, CheckpointFolder(own, 1, is_shared=True))
    copied = json.loads((own / "step-00000002" / "manifest.json").read_text())
    assert copied["text"] == "best" and source.is_dir()
    # Checkpoints of another run that was in the folder are renamed.
    again = CheckpointFolder(own, 1, is_shared=True)
    best.take_over(source, 2, again)
    assert sorted(p.name for p in own.iterdir()) == ["aside-step-00000002", "step-00000002"]


def test_keep_last_removes_the_previous_best(tmp_path):
    """It stays until the new one is marked, and then counts as any other."""
    folder = CheckpointFolder(tmp_path / "checkpoints", 1, is_shared=True)
    for step in (2, 4):
        write(tmp_path, step)
    folder.mark("best", 2)
    folder.replace_best(4, keeps_old=True)
    assert marked(folder.path, "best") == "step-00000004"
    assert [p.name for p in folder.path.glob("step-*")] == ["step-00000004"]


def test_without_keep_last_regular_checkpoints_stay(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints", None, is_shared=True)
    for step in (2, 4):
        write(tmp_path, step)
    folder.mark("best", 2)
    folder.replace_best(4, keeps_old=True)
    assert len([*folder.path.glob("step-*")]) == 2
    folder.mark("best", 2)
    folder.replace_best(4, keeps_old=False)
    assert len([*folder.path.glob("step-*")]) == 1
