"""Exports, locks, temporary folders and old output, without a run."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize("content", ["..", "/etc", "../other", "a/b", "", ".", "x" * 5000, "a\nb"])
def test_latest_universal_names_a_folder_next_to_it(tmp_path, content):
    from support.checkpoints.convert import UniversalCheckpoint
    from support.errors import UserError

    (tmp_path / "universal").mkdir()
    (tmp_path / "universal" / "latest_universal").write_text(content)
    with pytest.raises(UserError, match="latest_universal"):
        UniversalCheckpoint(tmp_path / "universal")


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\x80\x04\x95", b"PK\x03\x04", b"\x80\x02cos\nsystem\nU\x04trueR."]
)
def test_files_of_another_program_are_data(tmp_path, content):
    from support.checkpoints.convert import UniversalCheckpoint
    from support.errors import UserError

    place = tmp_path / "zero" / "weight"
    place.mkdir(parents=True)
    (place / "fp32.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"fp32\.pt"):
        UniversalCheckpoint(tmp_path)


@pytest.mark.parametrize("letter", ["x", "é", "文", "😀"])
def test_an_export_with_a_long_name(tmp_path, letter):
    from support.files.atomic import finish_folder, start_folder

    folder = tmp_path / (letter * (250 // len(letter.encode())))
    temporary = start_folder(folder)
    assert finish_folder(temporary, folder, replace=False) == folder
    temporary.remove()
    assert list(tmp_path.iterdir()) == [folder]


def test_two_exports_at_the_same_instant(tmp_path):
    """Both are kept, whichever is first, and neither writes into the other's unfinished folder."""
    from support.files.atomic import finish_folder, start_folder
    from support.model.export import Target

    targets = [Target(tmp_path / "model", overwrite=False, own=True) for _ in range(2)]
    writing = [start_folder(target.folder) for target in targets]
    for number, temporary in enumerate(writing):
        (temporary.path / "new" / "number").write_text(str(number))
    done = [
        finish_folder(temporary, target.folder, target.may_be_replaced)
        for temporary, target in zip(writing, targets, strict=True)
    ]
    for temporary in writing:
        temporary.remove()
    assert [path.name for path in done] == ["model", "model-2"]
    assert [(path / "number").read_text() for path in done] == ["0", "1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model-2"]


@pytest.mark.parametrize(
    "own, overwrite, names",
    [
        (True, False, ["model", "model-2"]),
        (False, False, ["model-2", "model-3"]),
        (True, True, ["model", "model"]),
        (False, True, ["model", "model"]),
    ],
)
def test_an_export_replaces_only_what_it_may(tmp_path, own, overwrite, names):
    """This run's earlier export, or with --overwrite whatever is there."""
    from support.files.atomic import finish_folder, start_folder
    from support.model.export import Target

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "earlier").write_text("x")
    targets = [
        Target(tmp_path / "model", overwrite, own) for _ in names
    ]  # two runs that began then
    for target, name in zip(targets, names, strict=True):
        temporary = start_folder(target.folder)
        (temporary.path / "new" / "config.json").write_text("{}")
        assert finish_folder(temporary, target.folder, target.may_be_replaced).name == name
        temporary.remove()
    assert (tmp_path / "model" / "earlier").exists() == (names[0] != "model")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_cannot_be_removed_hides_no_error(tmp_path):
    """A disk that became read-only also refuses to remove a lock file. The message comes after it."""
    from support.files.atomic import TemporaryPaths

    (tmp_path / "file").write_text("x")
    unusual = tmp_path / "file" / "x.lock"  # unlink raises NotADirectoryError, also for root
    ordinary = tmp_path / "y.lock"
    ordinary.write_text("x")
    paths = TemporaryPaths([str(unusual), str(ordinary)])
    paths.clean_up()
    assert not paths and not ordinary.exists()


def test_a_lock_file_of_nonsense(tmp_path):
    """Others may write into a shared temporary folder."""
    from support.files.atomic import TemporaryFolder

    (tmp_path / "x-deep.lock").write_text("[" * 1000)
    (tmp_path / "x-other.lock").write_text("5")
    TemporaryFolder(tmp_path, "x-").remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-deep.lock", "x-other.lock"]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    import errno
    import fcntl

    from support.files import atomic as files
    from support.report.output_dir import lock_folder

    (tmp_path / "x-1").mkdir()
    (tmp_path / "x-1.lock").write_text(json.dumps(files._this_machine()))

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert lock_folder(tmp_path) is None
    files.TemporaryFolder(tmp_path, "x-").remove()
    assert (tmp_path / "x-1").exists()  # whose owner may live


@pytest.mark.parametrize(
    "how",
    [
        lambda path: path.symlink_to(path.parent / "precious"),
        os.mkfifo,
        os.mkdir,
        lambda path: path.symlink_to("/dev/full"),
    ],
    ids=["a link", "a pipe", "a folder", "a device"],
)
def test_what_has_the_lock_files_name_is_not_touched(tmp_path, how):
    from support.errors import UserError
    from support.report.output_dir import lock_folder

    (tmp_path / "precious").write_text("content")
    how(tmp_path / ".lock")
    with pytest.raises(UserError, match=r"\.lock"):
        lock_folder(tmp_path)
    assert (tmp_path / "precious").read_text() == "content"


def test_bias_correction_of_any_number_of_steps_is_quick():
    """Adam's step is a number in a file."""
    from support.strategies.optimizer_shards import replay_bias_correction

    calls = []
    group = {"betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True}
    adam = SimpleNamespace(param_groups=[group], opt_id=0)
    adam.ds_opt_adam = SimpleNamespace(adam_update=lambda _, t, *rest: calls.append(t))
    replay_bias_correction(adam, 10**12)
    assert len(calls) < 20_000 and calls[-1] == 10**12
    assert 0.999 ** calls[-2] < 2**-25  # what fp32 rounds away next to 1
    calls.clear()
    replay_bias_correction(adam, 1000)
    assert calls == list(range(1, 1001))


def test_leftovers_of_killed_runs_go_and_nothing_else(tmp_path):
    from support.files.atomic import remove_leftovers

    (tmp_path / "precious").write_text("content")
    gone = [".results.123.json", ".metrics.9.jsonl", ".latest.77", ".partial-12ab34cd-best"]
    gone += [".step-00000004.partial", ".partial-step-00000004"]
    for name in gone:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
        (tmp_path / name / "link").symlink_to(tmp_path / "precious")
    (tmp_path / ".partial-0123abcd-link").symlink_to(tmp_path)
    kept = [
        ".lock",
        ".results.json",
        "results.123.json",
        ".hf.partial",
        ".results.x.json",
        "partial-1",
        ".partial-notes",
    ]
    for name in kept:
        (tmp_path / name).write_text("x")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "precious"])
    assert (tmp_path / "precious").read_text() == "content"
