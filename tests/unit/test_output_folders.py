"""Exports, their weight files, locks, temporary folders and old output, without a run."""

import errno
import fcntl
import json
import os
import platform
import tempfile
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from distributed_training.checkpoints.saving import PieceWriter
from distributed_training.cli.check_run import check_model_path
from distributed_training.cli.checks import check_output_dir
from distributed_training.cli.parse import parse_arguments
from distributed_training.errors import UserError
from distributed_training.files import safetensors_writer as writer
from distributed_training.files.atomic import (
    TemporaryFolder,
    finish_folder,
    lock,
    remove_leftovers,
    remove_temporary_folders,
    start_folder,
)
from distributed_training.records.loss_figure import use_writable_matplotlib_folder
from distributed_training.run.run_folder import (
    RunFolder,
    hosts_that_do_not_share,
    settle_without_shared_disk,
)
from distributed_training.train_state import EvaluationPlan, TrainState


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


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_weights_have_the_permissions_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        writer.save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
        pieces = PieceWriter(tmp_path)
        pieces.add("weight", 0, {"weight": torch.ones(2)})
        pieces.flush()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("model.safetensors", *pieces.files), 0o666 & ~umask)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    left = tmp_path / f"x-{platform.node()}-1"
    left.mkdir()
    (left / ".lock").write_text("")

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert lock(tmp_path / "lock") is None
    TemporaryFolder(tmp_path, "x-").remove()
    assert left.exists()  # whose owner may live


def test_temporary_folders_are_removed_after_their_owner_has_ended(tmp_path):
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
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"/hf, which the run exported"):
        check_model_path(parse_arguments(["--model", str(tmp_path)]).model)


@pytest.mark.parametrize("patience, complete", [(None, False), (1, True), (2, True), (3, False)])
def test_a_run_that_stopped_early_is_complete_for_the_same_patience(tmp_path, patience, complete):
    found = {"status": "completed", "stopped_early": 2, "steps": 4}
    folder = RunFolder(None, tmp_path, True, None, {}, found, keeps_found=True)
    state = TrainState(9, 4, step=4, evaluations=EvaluationPlan(patience=patience))
    assert folder.was_complete_at(state) == complete
    found["stopped_early"] = "2"  # a damaged file
    assert not folder.was_complete_at(state)


def test_hosts_that_do_not_share_the_folder_are_found(tmp_path, monkeypatch):
    """Also if they have a folder of the same name, of an earlier run there."""
    monkeypatch.setattr(
        "distributed_training.run.run_folder.time.monotonic", count(step=20).__next__
    )
    monkeypatch.setattr("distributed_training.run.run_folder.platform.node", lambda: "node1")
    sent = []

    def send(name):
        """The other hosts look for the file as soon as they know its name."""
        sent.append((tmp_path / name).exists())
        return name

    main = SimpleNamespace(is_main=True, broadcast_from_rank0=send, all_gather=lambda own: [own])
    (tmp_path / ".lock").touch()
    assert hosts_that_do_not_share(tmp_path, main) == [] and sent == [True]
    other = SimpleNamespace(**{**vars(main), "is_main": False})
    assert hosts_that_do_not_share(tmp_path, other) == ["node1"]
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    "flags, refused",
    [
        ([], ""),
        (["--no_save"], ""),
        (["--resume", "elsewhere"], ""),
        (["--save_every", "2"], "--save_every"),
        (["--save_epochs"], "--save_epochs"),
        (["--load_best_at_end"], "--load_best_at_end"),
        (["--output_dir", "out", "--resume"], "--resume"),
    ],
)
def test_only_checkpoints_need_a_folder_that_all_nodes_share(capfd, flags, refused):
    settings = parse_arguments(flags)
    where = (
        settings.output,
        settings.training.load_best_at_end,
        "out on node1",
        ["node2", "node3"],
    )
    if refused:
        with pytest.raises(UserError, match=f"node2, node3 do not share .* leave out {refused}"):
            settle_without_shared_disk(*where)
    else:
        settle_without_shared_disk(*where)
        assert "out on node1" in capfd.readouterr().out


def test_files_of_limited_size_have_an_index(tmp_path):
    shapes = dict.fromkeys("abc", (256,))
    files = writer.WeightFiles(tmp_path, shapes, torch.float32, {}, file_bytes="2KB")
    for number, name in enumerate(shapes):
        files.write(name, torch.full((256,), float(number)))
    files.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == 3
    for number, name in enumerate(shapes):
        assert load_file(tmp_path / index[name])[name].eq(number).all()


def test_weights_are_converted_and_buffers_keep_their_types(tmp_path):
    buffers = {"counts": torch.tensor([1, -2, 3], dtype=torch.int8)}
    files = writer.WeightFiles(tmp_path, {"weight": (2, 2)}, torch.bfloat16, buffers)
    files.write("weight", torch.ones(2, 2))
    files.finish()
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["weight"].equal(torch.ones(2, 2, dtype=torch.bfloat16))
    assert tensors["counts"].equal(buffers["counts"])


def test_a_model_whose_weights_may_not_be_read(tmp_path, monkeypatch):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    # Root may read every file.
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors .*permission denied.*chmod"):
        check_model_path(parse_arguments(["--model", str(tmp_path)]).model)


@pytest.mark.parametrize(
    "name", ["results.json", "metrics.jsonl", "ds_config.json", ".lock", "checkpoints"]
)
@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_a_run_whose_files_are_of_another_kind_is_refused(tmp_path, name, flag):
    path = tmp_path / name
    path.write_text("") if name == "checkpoints" else path.mkdir()
    with pytest.raises(UserError, match=name):
        settings = parse_arguments(["--output_dir", str(tmp_path), flag])
        check_output_dir(settings.output, settings.training.eval_only)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("writable", [True, False])
def test_matplotlib_gets_a_folder_that_the_run_removes(tmp_path, monkeypatch, writable):
    """A file in the place of the home folder stands in for one that is not writable."""
    (tmp_path / "home").mkdir() if writable else (tmp_path / "home").touch()
    for name in ("MPLCONFIGDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    use_writable_matplotlib_folder()
    folder = os.environ.pop("MPLCONFIGDIR", None)
    assert (folder is None) == writable
    remove_temporary_folders()
    assert os.listdir(tmp_path) == ["home"]
