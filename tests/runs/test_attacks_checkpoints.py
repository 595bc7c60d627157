"""Faults of checkpoints on disk: nothing is lost, nothing is executed, no path leaves the folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from attacks import Attack, table
from conftest import (
    FAULT,
    PROJECT,
    SCRIPT,
    Run,
    fill,
    finish,
    launcher_command,
    load_exported,
    start,
)

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
    "empty": lambda f: (step(f, 4) / "manifest.json").write_text(""),
    "half": lambda f: os.truncate(step(f, 4) / "manifest.json", 1000),
    "missing": lambda f: (step(f, 4) / "manifest.json").unlink(),
    "a later format": changed(lambda m: m.update(format_version=2)),
    "tensors outside": changed(lambda m: m["pieces"][0].update(file=f"../x/{RANK_FILE}")),
    "a listed file outside": changed(lambda m: m["files"].update({"../latest": OUTSIDE})),
    "a listed device": changed(lambda m: m["files"].update({"/dev/zero": OUTSIDE})),
    "a parameter outside": changed(lambda m: m["shapes"].update({"../../escaped": [1]})),
    "a parameter at the root": changed(lambda m: m["shapes"].update({"/tmp/escaped": [1]})),
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


@pytest.mark.parametrize("damage", [b"", b"\x00\xff" * 512 + b"\n", b"5\n"])
def test_damaged_metrics_are_seen(copy, damage):
    from support.report.metrics_file import read_metrics

    path = copy / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert read_metrics(path) == (records, [])
    path.write_bytes(damage)
    kept, unreadable = read_metrics(path)
    assert kept == [] and bool(unreadable) == bool(damage)


@pytest.mark.parametrize("name", ["", "..", "step-00000002/..", "step-²²²²²²²²"])
def test_a_mark_names_a_checkpoint_or_nothing(copy, name):
    from support.checkpoints import format as checkpoint_format

    (copy / "checkpoints" / "best").write_text(name)
    assert checkpoint_format.marked(copy / "checkpoints", "best") == ""
    (copy / "checkpoints" / "best").write_text("step-00000002\n")
    assert checkpoint_format.marked(copy / "checkpoints", "best") == "step-00000002"


# ------------------------------------------------------------------ no finished checkpoint is lost


@pytest.fixture
def manager(copy, ctx, monkeypatch):
    """The CheckpointManager of a run in the copy, resumed at step 2; its model is a single layer."""
    import torch

    from support.checkpoints import manager as checkpoints
    from support.cli.parse import parse_arguments

    model = torch.nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.AdamW(model.parameters())
    objects = checkpoints.TrainingObjects(model, optimizer, scaler, None, torch.zeros(()))
    monkeypatch.setattr(checkpoints, "run_signature", lambda *_: {})
    manager = checkpoints.CheckpointManager(
        parse_arguments(["--load_best_at_end"]), ctx, copy, objects, None, {}
    )
    manager._resumed_at = manager._saved_at = 2
    ctx.lock = True  # no other run uses the folder
    return manager


def test_what_is_set_aside_replaces_nothing(copy, manager):
    """Also not what was set aside before."""
    before = contents(step(copy, 4))
    for suffix in ("", ".2"):
        manager.take_over(None)
        aside = copy / "checkpoints" / f"aside-step-00000004{suffix}"
        assert contents(aside) == before and not step(copy, 4).exists() and step(copy, 2).exists()
        shutil.copytree(aside, step(copy, 4))


@pytest.mark.parametrize("content", ["..", "/", "../../victim", "step-00000002/../../../victim"])
def test_the_best_before_is_removed_only_if_it_is_a_checkpoint(copy, manager, content):
    victim = copy.parent / "victim"
    victim.mkdir()
    (victim / "thesis.txt").write_text("years of work")
    (copy / "checkpoints" / "best").write_text(content)
    manager._saved_at = 4
    manager.after_evaluation(SimpleNamespace(best={"step": 4}, step=4))
    assert (victim / "thesis.txt").exists() and step(copy, 2).exists() and step(copy, 4).exists()
    (copy / "checkpoints" / "best").write_text("step-00000002\n")
    manager.after_evaluation(SimpleNamespace(best={"step": 4}, step=4))
    assert not step(copy, 2).exists() and step(copy, 4).exists()


def interrupted(folder):
    """As a run that was stopped leaves its results."""
    path = folder / "results.json"
    path.write_text(path.read_text().replace('"completed"', '"preempted"'))
    (folder / "checkpoints" / "best").write_text("step-00000002\n")


@table(
    Attack(
        "a block length that differs",
        interrupted,
        ("--resume", "--seq_length", "16"),
        says="seq_length 32 in the checkpoint, 16",
    ),
    Attack(
        "an older checkpoint of a run with another seed",
        interrupted,
        ("--resume", "{}/checkpoints/step-00000002", "--seed", "9"),
        says="seed",
    ),
    Attack(
        "another optimizer",
        interrupted,
        ("--resume", "--optim", "sgd"),
        says="use the same --optim",
    ),
    Attack(
        "a folder that does not exist",
        interrupted,
        ("--resume", "{}/nowhere"),
        says="--resume .*nowhere: there is no such checkpoint",
    ),
    Attack(
        "checkpoints without results.json",
        lambda folder: (folder / "results.json").unlink(),
        says="holds the checkpoints of another run: --resume",
    ),
)
def test_a_refused_run_changes_nothing(script, work, copy, attack):
    """It is refused before the data is read and the weights are loaded."""
    attack.prepare(copy)
    before = contents(copy)
    args = [str(arg).format(copy) for arg in attack.args]
    run = script(*work, "--no_export", *args, "--output_dir", copy, folder=copy, ok=False)
    attack.check(copy, run)
    assert contents(copy) == before and "dataset" not in run.out


def test_resume_with_every_file_of_the_run_damaged(script, work, trained, copy):
    """Nothing but the checkpoint is needed; a damaged mark keeps another name."""
    (copy / "results.json").write_bytes(bytes(range(256)))
    (copy / "metrics.jsonl").write_bytes(b"\xff\xfe\n" + (copy / "metrics.jsonl").read_bytes())
    (copy / "checkpoints" / "best").write_text("..")
    (copy / "checkpoints" / "latest").unlink()
    (copy / "checkpoints" / "latest").mkdir()
    os.truncate(step(copy, 4) / RANK_FILE, 1000)
    shutil.copytree(step(copy, 2), copy / "checkpoints" / "aside-step-00000004")
    for name in (".partial-0123abcd-results.json", "checkpoints/.partial-step-00000006"):
        (copy / name).write_text("of a run that was killed")
    flags = f"--no_export --save_every 2 --resume --output_dir {copy}".split()
    run = script(*work, *flags, folder=copy)
    lines = [line for line in run.out.splitlines() if "damaged" in line or "does not name" in line]
    assert len(lines) == 2

    def losses(folder):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [(json.loads(line)["step"], json.loads(line)["loss"]) for line in lines]

    assert losses(copy) == losses(trained) and run.results["status"] == "completed"
    assert (
        sorted(path.name for path in (copy / "checkpoints").iterdir())
        == (
            "aside-step-00000004 aside-step-00000004.2 best.damaged latest latest.damaged "
            "step-00000002 step-00000004"
        ).split()
    )
    files = sorted(path.name for path in copy.iterdir() if path.name != ".lock")
    assert files == "checkpoints loss.png metrics.jsonl results.json".split()


OWNER = """
import sys
from pathlib import Path
from support.files.atomic import TemporaryFolder
temporary = TemporaryFolder(Path(sys.argv[1]), "x-")
(temporary.path / "big").write_text("x")
print(temporary.path, flush=True)
sys.stdin.read()
"""


def test_temporary_folders_go_when_their_owner_is_dead(tmp_path):
    from support.files.atomic import TemporaryFolder

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", OWNER, tmp_path]
    started = [subprocess.Popen(command, cwd=PROJECT, **pipes) for _ in range(2)]
    dead, alive = (Path(process.stdout.readline().strip()) for process in started)
    # Of another machine, which may be alive: its lock does not reach every file system.
    other = tmp_path / "x-of another machine"
    other.mkdir()
    (other / ".lock").touch()
    (tmp_path / "x-unknown").mkdir()
    started[0].send_signal(signal.SIGKILL)
    started[0].wait()
    mine = TemporaryFolder(tmp_path, "x-")
    again = TemporaryFolder(tmp_path, "x-")
    assert not dead.exists()
    assert all(
        path.exists() for path in (alive, other, mine.path, again.path, tmp_path / "x-unknown")
    )
    for folder in (mine, again):
        folder.remove()
        assert not any(os.path.exists(path) for path in folder.paths)
    started[1].kill()
    for process in started:
        process.communicate()


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


def test_an_export_that_cannot_fit_is_refused_before_training(script, work, disk):
    small = disk(2)
    run = script(*work, "--save_every", "2", "--output_dir", small / "out", folder=small, ok=False)
    assert run.code == 2 and "free" in run.error and "Epoch" not in run.out, run.err


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


def test_a_checkpoint_may_be_a_link_to_another_disk(copy, ctx, manager):
    """The user moved it there. Its files are read through the link, and only the link is renamed."""
    from support.checkpoints.find import find_checkpoint
    from support.cli.parse import parse_arguments

    step(copy, 4).rename(copy / "moved")
    step(copy, 4).symlink_to(copy / "moved")
    args = parse_arguments(["--resume", "--resume_force", "--output_dir", str(copy)])
    assert find_checkpoint(args, ctx, copy)[0] == step(copy, 4)
    manager.take_over(None)
    assert (copy / "checkpoints" / "aside-step-00000004").is_symlink()
    assert (copy / "moved" / RANK_FILE).exists()
