"""Exports, locks, temporary folders and old output, without a run."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest
import torch

from support.checkpoints.foreign import open_foreign
from support.errors import UserError
from support.files.atomic import finish_folder, remove, start_folder


@pytest.mark.parametrize("content", ["../other", "{}/other", ".."])
def test_a_mark_names_a_folder_next_to_it(tmp_path, content):
    """A DeepSpeed checkpoint that names a folder elsewhere is not opened there."""
    weight = tmp_path / "other" / "zero" / "weight"
    weight.mkdir(parents=True)
    torch.save(torch.zeros(1), weight / "fp32.pt")
    (tmp_path / "zero").symlink_to(tmp_path / "other" / "zero")
    (tmp_path / "universal").mkdir()
    (tmp_path / "universal" / "latest_universal").write_text(content.format(tmp_path))
    opened = open_foreign(tmp_path / "universal", trusted=True, scratch=tmp_path)
    with pytest.raises(UserError, match="no zero"), opened:
        pass


@pytest.mark.parametrize("content", [b"", b"\x80\x02cos\nsystem\nU\x04trueR."])
def test_files_of_another_program_are_data(tmp_path, content):
    place = tmp_path / "zero" / "weight"
    place.mkdir(parents=True)
    (place / "fp32.pt").write_bytes(content)
    opened = open_foreign(tmp_path, trusted=True, scratch=tmp_path)
    with pytest.raises(UserError, match=r"fp32\.pt"), opened:
        pass


@pytest.mark.parametrize(
    "replace, names", [(False, ["model-2", "model-3"]), (True, ["model", "model"])]
)
def test_an_export_replaces_only_what_it_may(tmp_path, replace, names):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "earlier").write_text("x")
    writing = [start_folder(tmp_path / "model") for _ in names]  # both began at the same time
    for number, (temporary, name) in enumerate(zip(writing, names, strict=True)):
        (temporary.path / "new" / "number").write_text(str(number))
        final = finish_folder(temporary, tmp_path / "model", replace)
        assert final.name == name and (final / "number").read_text() == str(number)
        temporary.remove()
    assert (tmp_path / "model" / "earlier").exists() == (names[0] != "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"model", *names})


def test_what_cannot_be_removed_hides_no_error(tmp_path):
    """A disk that became read-only also refuses to remove a lock file. The message comes after it."""
    (tmp_path / "file").write_text("x")
    unusual = tmp_path / "file" / "x.lock"  # unlink raises NotADirectoryError, also for root
    ordinary = tmp_path / "y.lock"
    ordinary.write_text("x")
    for path in (unusual, ordinary):
        remove(path)
    assert not ordinary.exists()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    import errno
    import fcntl

    from support.files import atomic as files

    left = tmp_path / f"x-{platform.node()}-1"
    left.mkdir()
    (left / ".lock").write_text("")

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert files.lock(tmp_path / "lock") is None
    files.TemporaryFolder(tmp_path, "x-").remove()
    assert left.exists()  # whose owner may live


def test_temporary_folders_are_removed_after_their_owner_has_ended(tmp_path):
    from support.files.atomic import TemporaryFolder

    alive = TemporaryFolder(tmp_path, "x-")
    dead = tmp_path / f"x-{platform.node()[:40]}-1"
    other = tmp_path / "x-of another machine"  # whose locks may not be visible here
    for folder in (dead, other):
        folder.mkdir()
        (folder / ".lock").touch()
    mine = TemporaryFolder(tmp_path, "x-")
    assert {*tmp_path.iterdir()} == {alive.path, other, mine.path}
    for folder in (mine, alive):
        folder.remove()
    assert {*tmp_path.iterdir()} == {other}


def test_leftovers_of_killed_runs_are_removed_and_nothing_else(tmp_path):
    from support.files.atomic import remove_leftovers

    (tmp_path / "precious").write_text("content")
    folder = tmp_path / ".partial-step-00000004"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "precious")
    (tmp_path / ".partial-0123abcd-link").symlink_to(tmp_path)
    (tmp_path / ".lock").write_text("x")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "precious"]
    assert (tmp_path / "precious").read_text() == "content"


def test_the_folder_of_a_run_is_not_a_model(tmp_path):
    """The error names the exported model in it."""
    from support.cli.parse import parse_arguments
    from support.startup import check_model_path

    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="That of a run is in hf/"):
        check_model_path(parse_arguments(["--model", str(tmp_path)]))


def test_a_folder_that_not_all_nodes_share_is_refused(tmp_path):
    from support.report.results import check_all_see

    (tmp_path / ".lock").touch()
    ctx = SimpleNamespace(all_gather=lambda own: [own, "node2"])
    with pytest.raises(UserError, match=r"node2 shares with rank 0"):
        check_all_see(tmp_path, ctx)
