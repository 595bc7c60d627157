"""Faults of checkpoints on disk: nothing is lost, nothing is executed, no path leaves the folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import FAULT, SCRIPT, Run, fill, finish, launcher_command, load_exported, start

RANK_FILE = "rank-00000-000.safetensors"


@pytest.fixture(scope="session")
def work(llama, text_file) -> list:
    """Arguments of a run of four steps, whose checkpoints have 2 MB."""
    return (
        f"--model {llama} --dataset {text_file} --seq_length 32 --num_samples 16 --batch_size 4 "
        "--precision fp32 --no_eval"
    ).split()


@pytest.fixture(scope="session")
def trained(script, work):
    """dp in one process, checkpoints at steps 2 and 4."""
    return script(*work, "--no_export", "--save_every", "2").folder


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """A copy of that run's folder, to damage."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def ctx():
    """A run of one rank."""
    from one_rank import one_rank

    with one_rank() as context:
        yield context


def step(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step-{number:08d}"


def contents(folder: Path) -> dict[str, tuple]:
    """Every path below a folder with its bytes, except the lock file."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else path.is_dir()
        for path in folder.rglob("*")
        if path.name != ".lock"
    }


# ----------------------------------------------------------------------------- damaged checkpoints


def changed(change):
    """Change the manifest of step 4 as somebody does who knows how its digest is made."""

    def rewrite(folder: Path) -> None:
        from support.files.atomic import digest_of_json

        path = step(folder, 4) / "manifest.json"
        manifest = json.loads(path.read_text())
        del manifest["sha256"]
        change(manifest)
        path.write_text(json.dumps({**manifest, "sha256": digest_of_json(manifest)}))

    return rewrite


OUTSIDE = {"bytes": 14, "sha256": "0" * 64}
DAMAGES = {
    "half": lambda f: os.truncate(step(f, 4) / "manifest.json", 1000),
    "a later format": changed(lambda m: m.update(format_version=2)),
    "tensors outside": changed(lambda m: m["pieces"][0].update(file=f"../x/{RANK_FILE}")),
    "a listed file outside": changed(lambda m: m["files"].update({"../latest": OUTSIDE})),
    "a listed path that becomes absolute": changed(
        lambda m: m["files"].update({"model//tmp/x": OUTSIDE})
    ),
    "a manifest without counters": changed(lambda m: m.pop("counters")),
    "a listed device": changed(lambda m: m["files"].update({"/dev/zero": OUTSIDE})),
    "a file that is missing": lambda f: (step(f, 4) / RANK_FILE).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_skipped(copy, ctx, damage, capsys):
    """The older one is taken, with one line that says why."""
    from support.checkpoints import format as checkpoint_format
    from support.checkpoints.find import find_checkpoint
    from support.cli.parse import parse_arguments
    from support.errors import UserError

    damage(copy)
    args = parse_arguments(["--resume", "--resume_force", "--output_dir", str(copy)])
    found, loaded = find_checkpoint(args, ctx, copy)
    assert found == step(copy, 2) and loaded["counters"]["step"] == 2
    [line] = capsys.readouterr().out.splitlines()
    assert "Skipped" in line and "step-00000004" in line and len(line) < 700 and line.isprintable()
    with pytest.raises(UserError):  # the converter takes the newest, and refuses it
        checkpoint_format.open_checkpoint(copy)


# ------------------------------------------------------------------ no finished checkpoint is lost


def interrupted(folder):
    """As a run that was stopped leaves its results."""
    path = folder / "results.json"
    path.write_text(path.read_text().replace('"completed"', '"preempted"'))
    (folder / "checkpoints" / "best").write_text("step-00000002\n")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--resume --seq_length 16", "seq_length 32 in the checkpoint, 16"),
        ("--resume {}/checkpoints/step-00000002 --seed 9", "seed"),
        ("--resume --optim sgd", "use the same --optim"),
        ("--resume {}/nowhere", "--resume .*nowhere: there is no such checkpoint"),
        ("--resume --dataset README.md", "dataset"),
        ("", "holds the checkpoints of another run: --resume"),
    ],
)
def test_a_refused_run_changes_nothing(script, work, copy, flags, says):
    if flags:
        interrupted(copy)
    else:
        (copy / "results.json").unlink()
    before = contents(copy)
    args = [*work, "--no_export", *flags.format(copy).split(), "--output_dir", copy]
    run = script(*args, folder=copy, ok=False)
    assert run.code == 2 and re.search(says, run.error) and contents(copy) == before


def test_resume_with_every_file_of_the_run_damaged(script, work, trained, copy):
    """Nothing but the checkpoint is needed; damaged files are replaced."""
    (copy / "results.json").write_bytes(bytes(range(256)))
    (copy / "metrics.jsonl").write_bytes(b"\xff\xfe\n" + (copy / "metrics.jsonl").read_bytes())
    os.truncate(step(copy, 4) / RANK_FILE, 1000)
    shutil.copytree(step(copy, 2), copy / "checkpoints" / "aside-step-00000004")
    for name in (".partial-0123abcd-results.json", "checkpoints/.partial-step-00000006"):
        (copy / name).write_text("of a run that was killed")
    flags = f"--no_export --save_every 2 --resume --output_dir {copy}".split()
    run = script(*work, *flags, folder=copy)
    assert run.losses == Run(0, "", "", 0.0, trained).losses
    assert run.results["status"] == "completed"
    names = sorted(path.relative_to(copy).as_posix() for path in copy.glob("checkpoints/*"))
    kept = "aside-step-00000004 aside-step-00000004.2 latest step-00000002 step-00000004"
    assert names == [f"checkpoints/{name}" for name in kept.split()]
    files = sorted(path.name for path in copy.iterdir() if path.name != ".lock")
    assert files == "checkpoints loss.png metrics.jsonl results.json".split()


# -------------------------------------------------------------------------------------------- disks


def read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)


def start_and_break(work: list, folder: Path, breaks, *args) -> Run:
    """Start a run, call `breaks()` when it trains, and wait for its end."""
    command = [*launcher_command("python", 1), SCRIPT, *work, "--max_steps", "60", *args]
    process = start([*command, "--output_dir", folder])
    shown = []
    while "Epoch 1" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
        shown.append(line)
    breaks()
    out, err = finish(process, 120)
    return Run(process.returncode, "".join(shown) + out, err, 0.0, folder)


@pytest.mark.parametrize("breaks", [read_only, pytest.param(fill, marks=pytest.mark.soak)])
@pytest.mark.parametrize("no_save", [[], pytest.param(["--no_save"], marks=pytest.mark.soak)])
def test_a_failed_export_keeps_the_weights(script, work, tmp_path, disk, breaks, no_save):
    """No checkpoint was asked for; the disk of the export fails while the run trains."""
    elsewhere = disk(20)
    folder = tmp_path / "out"
    flags = ["--export_hf", elsewhere / "model", *no_save]
    run = start_and_break(work, folder, lambda: breaks(elsewhere), *flags)
    assert run.code == 1 and "step-00000060" in run.error and "convert_checkpoint.py" in run.error
    assert run.results["status"] == "failed" and "step-00000060" in run.results["reason"]
    assert {path.name for path in elsewhere.iterdir()} <= {"filler"}
    again = script(*work, "--max_steps", "60", "--resume", "--output_dir", folder, folder=folder)
    assert load_exported(folder / "hf") and again.results["steps"] == 60


@pytest.mark.soak
def test_infinity_is_killed_and_resumes(script, work, tmp_path):
    """The same losses as without the kill, and nothing of the killed run stays in the NVMe
    folder."""
    nvme, out = tmp_path / "nvme", tmp_path / "out"
    nvme.mkdir()
    flags = f"--strategy infinity --nvme_path {nvme} --no_export --save_every 2 --max_steps 8"
    whole = script(*work, *flags.split())
    command = [*work, *flags.split(), "--output_dir", out]
    killed = script(*command, ok=False, program=FAULT, env={"FAULT": "kill:0:6"}, folder=out)
    assert killed.code == -signal.SIGKILL and any(nvme.iterdir())
    resumed = script(*command, "--resume", folder=out)
    assert "Resumed from" in resumed.out and resumed.losses == whole.losses
    assert not any(nvme.iterdir())
