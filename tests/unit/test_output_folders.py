"""Exports, locks, temporary folders and old output, without a run."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest

from support.files.atomic import TemporaryPaths, finish_folder, start_folder
from support.model.export import Target


@pytest.mark.parametrize("content", ["..", "/etc", "../other", "", "a\nb"])
def test_a_mark_names_a_folder_next_to_it(tmp_path, content):
    from support.checkpoints.recognize import named_in

    (tmp_path / "other").mkdir()
    (tmp_path / "universal").mkdir()
    (tmp_path / "universal" / "latest_universal").write_text(content)
    assert named_in(tmp_path / "universal" / "latest_universal") is None


@pytest.mark.parametrize("content", [b"", b"\x80\x02cos\nsystem\nU\x04trueR."])
def test_files_of_another_program_are_data(tmp_path, content):
    from support.checkpoints.foreign import open_foreign
    from support.errors import UserError

    place = tmp_path / "zero" / "weight"
    place.mkdir(parents=True)
    (place / "fp32.pt").write_bytes(content)
    opened = open_foreign(tmp_path, trusted=True, scratch=tmp_path)
    with pytest.raises(UserError, match=r"fp32\.pt"), opened:
        pass


@pytest.mark.parametrize(
    "own, overwrite, names",
    [
        (True, False, ["model", "model-2"]),
        (False, False, ["model-2", "model-3"]),
        (True, True, ["model", "model"]),
    ],
)
def test_an_export_replaces_only_what_it_may(tmp_path, own, overwrite, names):
    """This run's earlier export, or with --overwrite whatever is there; of two runs none loses."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "earlier").write_text("x")
    targets = [Target(tmp_path / "model", overwrite, own) for _ in names]
    writing = [start_folder(target.folder) for target in targets]  # both began at the same time
    for number, (target, temporary, name) in enumerate(zip(targets, writing, names, strict=True)):
        (temporary.path / "new" / "number").write_text(str(number))
        final = finish_folder(temporary, target.folder, target.may_be_replaced)
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
    paths = TemporaryPaths([str(unusual), str(ordinary)])
    paths.clean_up()
    assert not paths and not ordinary.exists()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    import errno
    import fcntl

    from support.files import atomic as files
    from support.report.results import lock_folder

    left = tmp_path / f"x-{platform.node()}-1"
    left.mkdir()
    (left / ".lock").write_text("")

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert lock_folder(tmp_path) is None
    files.TemporaryFolder(tmp_path, "x-").remove()
    assert left.exists()  # whose owner may live


def test_leftovers_of_killed_runs_go_and_nothing_else(tmp_path):
    from support.files.atomic import remove_leftovers

    (tmp_path / "precious").write_text("content")
    gone = [".partial-12ab34cd-best", ".partial-step-00000004"]
    for name in gone:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
        (tmp_path / name / "link").symlink_to(tmp_path / "precious")
    (tmp_path / ".partial-0123abcd-link").symlink_to(tmp_path)
    kept = [".lock", ".results.json", "results.123.json", ".hf.partial", ".partial-notes"]
    for name in kept:
        (tmp_path / name).write_text("x")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "precious"])
    assert (tmp_path / "precious").read_text() == "content"


def test_a_folder_that_not_all_nodes_share_names_only_flags_that_are_not_given(tmp_path):
    from support.cli.parse import parse_arguments
    from support.errors import UserError
    from support.report.results import check_all_see

    (tmp_path / ".lock").touch()
    ctx = SimpleNamespace(all_gather=lambda own: [own, "node2"])
    with pytest.raises(UserError, match=r"node2 shares with rank 0: .* add --no_save\.$"):
        check_all_see(tmp_path, ctx, parse_arguments(["--no_export"]))
