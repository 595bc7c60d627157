"""Faults of checkpoints on disk: nothing is lost, nothing is executed, no path leaves the folder."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cluster_work import reached
from conftest import SCRIPT, Run, finish, launcher_command, load_exported, start

from distributed_training.errors import UserError

RANK_FILE = "rank-00000-000.safetensors"


@pytest.fixture(scope="module")
def work(llama, text_file) -> list:
    """Settings of a run of four steps, whose checkpoints have 2 MB."""
    flags = "--seq_length 32 --num_samples 16 --batch_size 4 --precision fp32 --no_eval"
    return ["--model", llama, "--dataset", text_file, *flags.split()]


@pytest.fixture(scope="module")
def trained(script, work):
    """dp in one process, checkpoints at steps 2 and 4."""
    return script(*work, "--no_export", "--save_every", "2").folder


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """A copy of that run's folder, to damage."""
    return shutil.copytree(trained, tmp_path / "run")


def step(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step-{number:08d}"


def contents(folder: Path) -> dict[Path, bytes]:
    """The files below a folder, except the lock file."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: path.read_bytes() for path in files}


# ----------------------------------------------------------------------------- damaged checkpoints


def changed(change):
    """Change the manifest of step 4 as somebody does who knows how its digest is made."""

    def rewrite(folder: Path) -> None:
        from distributed_training.files.atomic import digest_of_json

        path = step(folder, 4) / "manifest.json"
        manifest = json.loads(path.read_text())
        del manifest["sha256"]
        change(manifest)
        path.write_text(json.dumps({**manifest, "sha256": digest_of_json(manifest)}))

    return rewrite


def rename_parameter(manifest: dict) -> None:
    """Rename a parameter in the manifest; the tensors of its file keep their names."""
    old = manifest["pieces"][0]["name"]
    manifest["shapes"]["renamed"] = manifest["shapes"].pop(old)
    for piece in manifest["pieces"]:
        piece["name"] = "renamed" if piece["name"] == old else piece["name"]


def edited(folder: Path) -> None:
    """Change a counter of step 4, and leave the digest."""
    path = step(folder, 4) / "manifest.json"
    text = path.read_text()
    assert '"step": 4' in text
    path.write_text(text.replace('"step": 4', '"step": 5'))


OUTSIDE = {"bytes": 14, "sha256": "0" * 64}
DAMAGES = {
    "an edited counter": edited,
    "half a manifest": lambda f: os.truncate(step(f, 4) / "manifest.json", 1000),
    "a later format": changed(lambda m: m.update(format_version=2)),
    "tensors outside": changed(lambda m: m["pieces"][0].update(file=f"../x/{RANK_FILE}")),
    "a listed file outside": changed(lambda m: m["files"].update({"../latest": OUTSIDE})),
    "a manifest without counters": changed(lambda m: m.pop("counters")),
    "a listed absolute path": changed(lambda m: m["files"].update({"/dev/zero": OUTSIDE})),
    "a counter that is a text": changed(lambda m: m["counters"].update(step="x")),
    "a counter that is infinite": changed(lambda m: m["counters"].update(tokens=float("inf"))),
    "a best evaluation without a loss": changed(lambda m: m["counters"].update(best={"step": 2})),
    "a signature that is a list": changed(lambda m: m["identity"].update(hard=[1])),
    "no signature": changed(lambda m: m.update(identity=None)),
    "a file without a digest": changed(lambda m: m["files"].update({RANK_FILE: 7})),
    "no pieces": changed(lambda m: m.update(pieces=[])),
    "a piece twice": changed(lambda m: m["pieces"].append(m["pieces"][0])),
    "a piece that is short": changed(lambda m: m["pieces"][0].update(numel=3)),
    "a piece of another tensor": changed(rename_parameter),
    "a shape that is a number": changed(lambda m: m["shapes"].update({m["pieces"][0]["name"]: 8})),
    "scaling that is a list": changed(lambda m: m.update(scaling=[1.0])),
    "a stream without positions": changed(lambda m: m.update(stream={"lanes": [], "bad": []})),
    "a position that is a text": changed(
        lambda m: m.update(stream={"lanes": {"0": {"reader": {"row": "1"}}}, "bad": []})
    ),
    "an optimizer that is a number": changed(lambda m: m.update(optimizer=1)),
    "Adam's step below zero": changed(lambda m: m.update(adam_step=-1)),
    "a file that is missing": lambda f: (step(f, 4) / RANK_FILE).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_skipped(copy, damage, capsys):
    """The older one is taken, with one line that says why."""
    from one_rank import one_rank

    from distributed_training.checkpoints.find import find_checkpoint
    from distributed_training.checkpoints.verify import open_checkpoint
    from distributed_training.cli.parse import parse_arguments

    damage(copy)
    settings = parse_arguments(["--resume", "--resume_force", "--output_dir", str(copy)])
    with one_rank() as ctx:
        sections = settings.output, settings.data, settings.training
        found, loaded = find_checkpoint(*sections, ctx, copy)
    assert found == step(copy, 2) and loaded["counters"]["step"] == 2
    [line] = capsys.readouterr().out.splitlines()
    assert "Skipped" in line and "step-00000004" in line and len(line) < 700 and line.isprintable()
    with pytest.raises(UserError):  # the converter takes the newest, and refuses it
        open_checkpoint(copy)


@pytest.mark.parametrize("file", ["manifest.json", RANK_FILE])
def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(copy, monkeypatch, file):
    """As of another user. Root may read everything, so the open fails in the test."""
    from distributed_training.checkpoints import verify

    def refuse(path: Path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    method = (Path, "read_bytes") if file == "manifest.json" else (verify, "sha256_of")
    monkeypatch.setattr(*method, refuse)
    with pytest.raises(UserError) as refused:
        verify.open_checkpoint(copy)
    assert file in str(refused.value) and "chmod -R a+rX" in str(refused.value)
    assert "damaged" not in str(refused.value)


# ------------------------------------------------------------------ no finished checkpoint is lost


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--resume --seq_length 16", "seq_length 32 in the checkpoint, 16"),
        ("--resume --optim sgd", "use the same --optim"),
        ("--resume {}/nowhere", "--resume .*nowhere: there is no such checkpoint"),
        ("", "holds the checkpoints of another run: --resume"),
    ],
)
def test_a_refused_run_changes_nothing(script, work, copy, flags, says):
    results = copy / "results.json"
    if flags:  # as a run that was stopped leaves it
        results.write_text(results.read_text().replace('"completed"', '"preempted"'))
    else:
        results.unlink()
    before = contents(copy)
    args = [*work, "--no_export", *flags.format(copy).split(), "--output_dir", copy]
    run = script(*args, folder=copy, ok=False)
    assert run.code == 2 and re.search(says, run.error) and contents(copy) == before


def test_resume_with_every_file_of_the_run_damaged(script, work, trained, copy):
    """Nothing but the checkpoint is needed; damaged files are replaced, a damaged checkpoint kept."""
    (copy / "results.json").write_bytes(bytes(range(256)))
    (copy / "metrics.jsonl").write_bytes(b"\xff\xfe\n" + (copy / "metrics.jsonl").read_bytes())
    os.truncate(step(copy, 4) / RANK_FILE, 1000)
    for name in (".partial-0123abcd-results.json", "checkpoints/.partial-step-00000006"):
        (copy / name).write_text("of a run that was killed")
    flags = f"--no_export --save_every 2 --resume --output_dir {copy}".split()
    run = script(*work, *flags, folder=copy)
    assert run.losses == Run(0, "", "", 0.0, trained).losses
    assert run.results["status"] == "completed"
    names = {path.name for path in (*copy.glob("checkpoints/*"), *copy.iterdir())}
    kept = {"aside-step-00000004", "latest", "step-00000002", "step-00000004"}
    assert names == kept | {"checkpoints", "loss.png", "metrics.jsonl", "results.json", ".lock"}


# -------------------------------------------------------------------------------------------- disks


def test_a_failed_export_keeps_the_weights(script, work, tmp_path, disk):
    """No checkpoint was asked for; the disk of the export becomes read-only while the run trains."""
    elsewhere, folder = disk(20), tmp_path / "out"
    flags = ["--max_steps", "60", "--output_dir", folder, "--export_hf", elsewhere / "model"]
    process = start([*launcher_command("python", 1), SCRIPT, *work, *flags])
    reached(process, "Epoch 1")
    subprocess.run(["mount", "-o", "remount,ro", elsewhere], check=True)
    out, err = finish(process, 120)
    run = Run(process.returncode, out, err, 0.0, folder)
    assert run.code == 1 and "step-00000060" in run.error and "convert_checkpoint.py" in run.error
    assert run.results["status"] == "failed" and "step-00000060" in run.results["reason"]
    assert not any(elsewhere.iterdir())
    again = script(*work, "--max_steps", "60", "--resume", "--output_dir", folder, folder=folder)
    assert load_exported(folder / "hf") and again.results["steps"] == 60


@pytest.mark.parametrize("content", ["../other", "{}/other", ".."])
def test_a_latest_file_cannot_point_outside_its_checkpoint(tmp_path, content):
    """A DeepSpeed checkpoint that names a folder elsewhere is not opened there."""
    import torch

    from distributed_training.checkpoints.foreign import open_foreign

    weight = tmp_path / "other" / "zero" / "weight"
    weight.mkdir(parents=True)
    torch.save(torch.zeros(1), weight / "fp32.pt")
    (tmp_path / "zero").symlink_to(tmp_path / "other" / "zero")
    (tmp_path / "universal").mkdir()
    (tmp_path / "universal" / "latest_universal").write_text(content.format(tmp_path))
    opened = open_foreign(tmp_path / "universal", trusted=True, scratch=tmp_path)
    with pytest.raises(UserError, match="no zero"), opened:
        pass


class Evil:
    def __reduce__(self):  # unpickling creates a folder
        return os.mkdir, ("executed",)


def test_weights_of_a_universal_checkpoint_are_never_unpickled(tmp_path, monkeypatch):
    import torch

    from distributed_training.checkpoints.foreign import open_foreign

    place = tmp_path / "zero" / "weight"
    place.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    torch.save(Evil(), place / "fp32.pt")
    opened = open_foreign(tmp_path, trusted=True, scratch=tmp_path)
    with pytest.raises(UserError, match=r"fp32\.pt"), opened:
        pass
    assert not (tmp_path / "executed").exists()
