"""Attacks on checkpoints, results, exports and conversions: what is damaged, and what must hold."""

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
    assert_close,
    fill,
    finish,
    launcher_command,
    load_exported,
    start,
)


@pytest.fixture(scope="session")
def work(llama, text_file) -> list:
    """Arguments of a run of four steps; its checkpoints have 2 MB, and the copies that are damaged
    here take no time."""
    return [
        "--model",
        llama,
        "--dataset",
        text_file,
        "--seq_length",
        "32",
        "--num_samples",
        "16",
        "--batch_size",
        "4",
        "--precision",
        "fp32",
        "--no_eval",
    ]


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
    """Every path below a folder with its kind and bytes; what a refused run must not change. The
    lock file is none of it."""

    def look(path):
        if path.is_symlink():
            return ("link", os.readlink(path))
        return ("file", path.read_bytes()) if path.is_file() else ("folder",)

    return {
        path.relative_to(folder).as_posix(): look(path)
        for path in folder.rglob("*")
        if path.name != ".lock"
    }


# ----------------------------------------------------------------------------- what a manifest says


def rewrite(checkpoint: Path, change) -> None:
    """Change a manifest as somebody does who knows how its digest is made."""
    from support.files.atomic import digest_of_json

    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    change(manifest)
    path.write_text(json.dumps({**manifest, "sha256": digest_of_json(manifest)}))


def manifest(name: str, change) -> Attack:
    """A row: step 4 gets a manifest that `change` has changed, with a right digest."""
    return Attack(f"manifest: {name}", prepare=lambda folder: rewrite(step(folder, 4), change))


def first(kind: str):
    """(manifest) -> its first parameter's name, file's name, or piece."""
    return lambda m: m[kind][0] if isinstance(m[kind], list) else next(iter(m[kind]))


def rename_parameter(new: str):
    def change(m):
        old = first("shapes")(m)
        m["shapes"] = {new if name == old else name: shape for name, shape in m["shapes"].items()}
        m["pieces"] = [
            {**piece, "name": new if piece["name"] == old else piece["name"]}
            for piece in m["pieces"]
        ]

    return change


def outside_file(m):
    """A piece lies in the other checkpoint's file, which this manifest does not list."""
    m["pieces"][0]["file"] = "../step-00000002/rank-00000-000.safetensors"


def listed_outside_file(m):
    name = "../step-00000002/rank-00000-000.safetensors"
    m["files"][name] = m["files"]["rank-00000-000.safetensors"]
    outside_file(m)


def set_in(*keys, value):
    """(manifest) -> None: put a value into a nested place."""

    def change(m):
        place = m
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return change


def without(*keys):
    def change(m):
        place = m
        for key in keys[:-1]:
            place = place[key]
        del place[keys[-1]]

    return change


def raw(name: str, content: bytes | str) -> Attack:
    def prepare(folder):
        path = step(folder, 4) / "manifest.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return Attack(f"manifest: {name}", prepare=prepare)


def replaced(name: str, file: str, how) -> Attack:
    """A row: a file of step 4 is removed and `how(path)` puts something else in its place."""

    def prepare(folder):
        path = step(folder, 4) / file
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        how(path)

    return Attack(f"{file}: {name}", prepare=prepare)


def elsewhere(path: Path) -> None:
    """A symbolic link to the same content, outside of the checkpoint."""
    kept = path.parents[2] / "elsewhere"
    shutil.copytree(step(path.parents[2], 2), kept, dirs_exist_ok=True)
    path.symlink_to(kept / path.name)


RANK_FILE = "rank-00000-000.safetensors"
PIECE = {
    "name": "model.embed_tokens.weight",
    "start": 0,
    "numel": 1,
    "moments": True,
    "file": RANK_FILE,
}
IN_MANIFEST = [
    raw("empty", ""),
    raw("half", '{"format_version": 1, "counters": {'),
    raw("binary", bytes(range(256))),
    raw("NULs", b"\0" * 4096),
    raw("nested 100,000 deep", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
    raw("nested 900 deep", '{"a":' + "[" * 900 + "]" * 900 + "}"),
    raw("a list", "[]"),
    raw("a number of 10,000 digits", '{"format_version": ' + "1" * 10_000 + "}"),
    raw("a lone surrogate", '{"format_version": 1, "\\ud800": 1}'),
    raw("UTF-16", '{"format_version": 1}'.encode("utf-16")),
    *(
        manifest(f"without {'.'.join(keys)}", without(*keys))
        for keys in (
            ("counters",),
            ("shapes",),
            ("pieces",),
            ("files",),
            ("adam_step",),
            ("format_version",),
        )
    ),
    *(
        manifest(f"{key} is {value!r}", set_in(key, value=value))
        for key in (
            "counters",
            "identity",
            "shapes",
            "pieces",
            "files",
            "adam_step",
            "groups",
            "scaling",
            "lr_scheduler",
        )
        for value in (None, 3.5, "x", [[]], [None])
    ),
    manifest("adam_step -1", set_in("adam_step", value=-1)),
    manifest("adam_step true", set_in("adam_step", value=True)),
    manifest("adam_step 10^15", set_in("adam_step", value=10**15)),
    manifest("step -1", set_in("counters", "step", value=-1)),
    manifest("step 10^9", set_in("counters", "step", value=10**9)),
    manifest("samples is text", set_in("counters", "samples", value="16")),
    manifest("a loss of infinity", set_in("counters", "last_loss", value=float("inf"))),
    manifest("a loss of 10^400", set_in("counters", "last_loss", value=10**400)),
    manifest("a version that turns the text", set_in("format_version", value="\u202e1")),
    manifest("best without a step", set_in("counters", "best", value={"loss": 1.0})),
    manifest(
        "best at ../..",
        set_in("counters", "best", value={"loss": 1.0, "step": "../..", "waited": 0}),
    ),
    manifest("identity.hard a list", set_in("identity", "hard", value=["parameters"])),
    manifest("scale 0", set_in("scaling", value={"scale": 0})),
    manifest("scale not a number", set_in("scaling", value={"cur_scale": float("nan")})),
    manifest(
        "a method as scaler's state", set_in("scaling", value={"cur_scale": 1, "update_scale": "x"})
    ),
    manifest(
        "a group without betas", set_in("groups", value=[{"lr": 1, "eps": 1, "weight_decay": 0}])
    ),
    manifest("an optimizer that is no name", set_in("optimizer", value=[1])),
    manifest("betas of 1", set_in("groups", 0, "betas", value=[0.9, 1])),
    manifest("scale 10^300", set_in("scaling", value={"scale": 1e300})),
    manifest("nested groups", set_in("groups", value=[[[[[]]]]])),
    manifest("shape of 10^15", set_in("shapes", "model.embed_tokens.weight", value=[10**15])),
    manifest("shape of 10^300", set_in("shapes", "model.embed_tokens.weight", value=[10**300])),
    manifest(
        "shape negative twice", set_in("shapes", "model.embed_tokens.weight", value=[-300, -64])
    ),
    manifest("shape of floats", set_in("shapes", "model.embed_tokens.weight", value=[300.0, 64.0])),
    manifest(
        "shape with 100 dimensions", set_in("shapes", "model.embed_tokens.weight", value=[1] * 100)
    ),
    manifest("a piece of 10^15", set_in("pieces", 0, "numel", value=10**15)),
    manifest("a piece from -1", set_in("pieces", 0, "start", value=-1)),
    manifest("a piece too few", lambda m: m["pieces"].pop()),
    manifest("a piece twice", lambda m: m["pieces"].append(m["pieces"][0])),
    manifest("overlapping pieces", lambda m: m["pieces"].append(PIECE)),
    manifest(
        "a piece of nothing known", lambda m: m["pieces"].append({**PIECE, "name": "nothing"})
    ),
    manifest("a piece's moments are text", set_in("pieces", 0, "moments", value="yes")),
    manifest("a piece in a file not listed", outside_file),
    manifest("a piece in a listed file outside", listed_outside_file),
    manifest("a piece in /etc/passwd", set_in("pieces", 0, "file", value="/etc/passwd")),
    manifest("a piece in JSON", set_in("pieces", 0, "file", value="model/config.json")),
    manifest("a piece whose file is null", set_in("pieces", 0, "file", value=None)),
    manifest("a piece whose name is a list", set_in("pieces", 0, "name", value=["x"])),
    *(
        manifest(f"a parameter named {name!r}", rename_parameter(name))
        for name in (
            "../../../escaped",
            "/tmp/escaped",
            "..",
            "",
            "a/../b",
            "a\\..\\b",
            "a\nb",
            "\x1b[31mred",
            "x" * 2000,
            "a//b",
            "a\0b",
        )
    ),
    manifest(
        "a listed file of /dev/zero",
        set_in("files", "/dev/zero", value={"bytes": 0, "sha256": "0" * 64}),
    ),
    manifest(
        "a listed file above", set_in("files", "../latest", value={"bytes": 14, "sha256": "0" * 64})
    ),
    manifest("a file's size is text", set_in("files", RANK_FILE, "bytes", value="many")),
    manifest("a file without a digest", without("files", RANK_FILE, "sha256")),
    manifest(
        "a listed file that is not there",
        set_in("files", "rank-1", value={"bytes": 0, "sha256": "0" * 64}),
    ),
    replaced("a pipe", "manifest.json", os.mkfifo),
    replaced("a folder", "manifest.json", os.mkdir),
    replaced("a link", "manifest.json", elsewhere),
    replaced("a link to itself", "manifest.json", lambda path: path.symlink_to(path)),
    replaced("a pipe", RANK_FILE, os.mkfifo),
    replaced("a folder", RANK_FILE, os.mkdir),
    replaced("a link", RANK_FILE, elsewhere),
    replaced("a device", RANK_FILE, lambda path: path.symlink_to("/dev/zero")),
    replaced("a link", "model/config.json", lambda path: path.symlink_to("/etc/hostname")),
    replaced(
        "a link of a folder",
        "model",
        lambda path: path.symlink_to(step(path.parents[2], 2) / "model"),
    ),
]


@table(*IN_MANIFEST)
def test_a_malformed_checkpoint_is_skipped(copy, ctx, attack, capsys):
    """The older one is taken, with one line that says why; the malformed one is as it was, and
    memory stays small."""
    from support.checkpoints import format as checkpoint_format
    from support.checkpoints import manager as checkpoint

    attack.prepare(copy)
    found, loaded = checkpoint.find("", copy / "checkpoints", ctx)
    assert found == step(copy, 2) and loaded["counters"]["step"] == 2
    [line] = capsys.readouterr().out.splitlines()
    assert (
        "Skipped" in line and "step-00000004" in line and len(line) < 700 and line.isprintable()
    ), line
    with pytest.raises(Exception) as error:  # the converter, which takes the newest, refuses it
        checkpoint_format.open_checkpoint(copy)
    assert type(error.value).__name__ == "UserError"


@pytest.mark.parametrize(
    "name",
    [
        "step-²²²²²²²²",
        "step-٠٠٠٠٠٠٠٩",
        "step-9",
        "step-000000009",
        "step-+0000009",
        "step-0000000a",
    ],
)
def test_other_names_are_no_checkpoints(copy, ctx, name):
    from support.checkpoints import format as checkpoint_format

    shutil.copytree(step(copy, 4), copy / "checkpoints" / name)
    assert checkpoint_format.list_checkpoints(copy / "checkpoints") == [
        step(copy, 4),
        step(copy, 2),
    ]


@pytest.mark.parametrize(
    "change",
    [
        without("stream"),
        without("lr_scheduler"),
        without("groups"),
        without("scaling"),
        without("identity", "told"),
        without("counters", "tokens"),
        without("counters", "best"),
        without("counters", "training_seconds"),
        set_in("something new", value={"of": "a later version"}),
        set_in("counters", "more", value=1),
    ],
)
def test_checkpoints_of_other_versions_are_read(copy, ctx, change, capsys):
    from support.checkpoints import manager as checkpoint

    rewrite(step(copy, 4), change)
    found, loaded = checkpoint.find("", copy / "checkpoints", ctx)
    assert found == step(copy, 4) and capsys.readouterr().out == ""
    assert {"stream", "lr_scheduler", "groups", "scaling"} <= loaded.keys() and loaded["counters"][
        "best"
    ] is None


# -------------------------------------------------------------------------------- a run's own files


DAMAGES = {
    "empty": lambda path: path.write_text(""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 4 + b"\n"),
    "NULs": lambda path: path.write_bytes(b"\0" * 4096),
    "nested deeply": lambda path: path.write_text("[" * 100_000 + "\n"),
    "nested in objects": lambda path: path.write_text('{"status":' * 900 + "1" + "}" * 900 + "\n"),
    "a number": lambda path: path.write_text("5\n"),
    "a list": lambda path: path.write_text("[]\n"),
    "null": lambda path: path.write_text("null\n"),
    "other keys": lambda path: path.write_text('{"status": 5, "step": "x", "loss": 1}\n'),
    "completed, no steps": lambda path: path.write_text('{"status": "completed", "step": null}\n'),
    "a folder": lambda path: (path.unlink(), path.mkdir(), (path / "x").write_text("x")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link": lambda path: (path.rename(path.with_name("moved")), path.symlink_to("moved")),
    "a long line": lambda path: path.write_text("x" * 1_000_000 + "\n"),
}
damaged = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())


@damaged
def test_damaged_results_are_seen(copy, damage):
    from support.report.results import read_results

    path = copy / "results.json"
    assert read_results(path)[0]["status"] == "completed" and read_results(path)[1] == ""
    damage(path)
    found, why = read_results(path)
    assert found is None and 0 < len(why) < 200


@damaged
def test_damaged_metrics_are_seen(copy, damage):
    from support.report.metrics_log import read_metrics

    path = copy / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert read_metrics(path) == ([(number, line) for number, line in enumerate(lines, 1)], "")
    damage(path)
    kept, why = read_metrics(path)
    assert all(line in lines for _, line in kept)
    if path.is_file() and not path.is_symlink() and not path.read_bytes().endswith(b"\n"):
        assert why == ""  # only half a last line, as of a run that was killed
    else:
        assert why


@pytest.mark.parametrize(
    "name",
    [
        "/tmp",
        ".",
        "..",
        "../..",
        "/",
        "",
        "step-2",
        "step-00000002/..",
        "../step-00000002",
        "step-²²²²²²²²",
        "step-00000002\0",
        "step-00000002\nstep-00000004",
        "step-000000021",
        "x" * 10_000,
    ],
)
@pytest.mark.parametrize("mark", ["best", "latest"])
def test_a_mark_names_a_checkpoint_or_nothing(copy, name, mark):
    from support.checkpoints import format as checkpoint_format

    (copy / "checkpoints" / mark).write_text(name)
    assert checkpoint_format.marked(copy / "checkpoints", mark) == ""
    (copy / "checkpoints" / mark).write_text("step-00000002\n")
    assert checkpoint_format.marked(copy / "checkpoints", mark) == "step-00000002"


@pytest.fixture
def manager(copy, ctx):
    """The CheckpointManager of a run in the copy, resumed at step 2; its model is a single layer."""
    import torch

    from support.checkpoints.manager import CheckpointManager, TrainingObjects
    from support.cli.parse import parse_arguments

    model = torch.nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    objects = TrainingObjects(model, torch.optim.AdamW(model.parameters()), scaler)
    manager = CheckpointManager(
        parse_arguments(["--load_best_at_end"]), ctx, copy, objects, {}, spec=None
    )
    manager._resumed_at = manager._saved_at = 2
    ctx.lock = True  # no other run uses the folder
    return manager


@damaged
def test_a_damaged_name_of_the_wandb_run(tmp_path, damage):
    from support.report.trackers import wandb_run_of

    path = tmp_path / "wandb-run.txt"
    first_run, _ = wandb_run_of(tmp_path, 0, "mine")
    assert wandb_run_of(tmp_path, 4, None) == (first_run, "mine")
    damage(path)
    again, _ = wandb_run_of(tmp_path, 4, "mine")
    assert again != first_run and path.read_text() == f"{again}\nmine\n"
    assert not path.is_symlink()


def test_what_is_set_aside_replaces_nothing(copy, manager):
    """Also not what was set aside before, as often as it happens; and everything is still there."""
    before = contents(step(copy, 4))
    for number in range(3):
        manager.take_over(None)
        aside = (
            copy / "checkpoints" / ("aside-step-00000004" + (f".{number + 1}" if number else ""))
        )
        assert contents(aside) == before and not step(copy, 4).exists() and step(copy, 2).exists()
        shutil.copytree(aside, step(copy, 4))


@damaged
@pytest.mark.parametrize("mark", ["best", "latest"])
def test_damaged_marks_are_set_aside_and_made_again(copy, manager, damage, mark, capsys):
    path = copy / "checkpoints" / mark
    path.write_text("step-00000002\n")
    damage(path)
    manager.take_over({"loss": 1.0, "step": 2, "waited": 0})
    assert os.path.lexists(f"{path}.damaged")
    [line] = capsys.readouterr().out.splitlines()
    assert mark in line
    assert (copy / "checkpoints" / "best").read_text() == "step-00000002\n"


@pytest.mark.parametrize(
    "content", [".", "..", "/", "../../victim", "step-00000002/../../../victim"]
)
def test_the_best_before_is_removed_only_if_it_is_a_checkpoint(copy, manager, content):
    victim = copy.parent / "victim"
    victim.mkdir()
    (victim / "thesis.txt").write_text("years of work")
    (copy / "checkpoints" / "best").write_text(content.replace("../../victim", str(victim)))
    manager._saved_at = 4
    manager.after_evaluation(SimpleNamespace(best={"step": 4}, step=4))
    assert (victim / "thesis.txt").exists() and step(copy, 2).exists() and step(copy, 4).exists()
    (copy / "checkpoints" / "best").write_text("step-00000002\n")
    manager.after_evaluation(SimpleNamespace(best={"step": 4}, step=4))
    assert not step(copy, 2).exists() and step(copy, 4).exists()


def break_newest(folder):
    """Both checkpoints broken, and one that was set aside before."""
    for number in (2, 4):
        os.truncate(step(folder, number) / RANK_FILE, 1000)
    shutil.copytree(step(folder, 4), folder / "checkpoints" / "aside-step-00000004")


def interrupted(folder):
    """As a run that was stopped leaves its results."""
    path = folder / "results.json"
    path.write_text(path.read_text().replace('"completed"', '"preempted"'))
    (folder / "checkpoints" / "best").write_text("step-00000002\n")


def other_shape(folder):
    rewrite(step(folder, 4), lambda m: m["identity"]["hard"].pop("shapes"))
    rewrite(step(folder, 4), rename_parameter("another"))
    tensors_follow(step(folder, 4), "another")


@table(
    Attack(
        "a block length that differs",
        interrupted,
        ("--resume", "--seq_length", "16"),
        says="seq_length 32 in the checkpoint, 16",
    ),
    Attack(
        "an older checkpoint of the same run",
        interrupted,
        ("--resume", "{}/checkpoints/step-00000002", "--seed", "9"),
        says="seed",
        soak=True,
    ),
    Attack(
        "nothing whole is left",
        lambda f: (interrupted(f), break_newest(f)),
        ("--resume",),
        says="complete and undamaged",
        soak=True,
    ),
    Attack(
        "a parameter of another name",
        lambda f: (interrupted(f), other_shape(f)),
        ("--resume",),
        says="missing in the checkpoint",
        soak=True,
    ),
)
def test_a_refused_resume_changes_nothing(script, work, copy, attack):
    attack.prepare(copy)
    before = contents(copy)
    args = [str(arg).format(copy) for arg in attack.args]
    run = script(*work, "--no_export", *args, "--output_dir", copy, folder=copy, ok=False)
    attack.check(copy, run)
    assert contents(copy) == before


def test_resume_with_every_file_of_the_run_damaged(script, work, trained, copy):
    """Nothing but the checkpoint is needed; what is damaged keeps another name."""
    (copy / "results.json").write_bytes(bytes(range(256)))
    (copy / "metrics.jsonl").write_bytes(b"\xff\xfe\n" + (copy / "metrics.jsonl").read_bytes())
    (copy / "checkpoints" / "best").write_text("..")
    (copy / "checkpoints" / "latest").unlink()
    (copy / "checkpoints" / "latest").mkdir()
    os.truncate(step(copy, 4) / RANK_FILE, 1000)
    shutil.copytree(step(copy, 2), copy / "checkpoints" / "aside-step-00000004")
    for name in (
        ".partial-0123abcd-results.json",
        ".results.12.json",
        "checkpoints/.step-00000006.partial",
    ):
        (copy / name).write_text("of a run that was killed")
    run = script(
        *work, "--no_export", "--save_every", "2", "--resume", "--output_dir", copy, folder=copy
    )
    lines = [line for line in run.out.splitlines() if "damaged" in line or "does not name" in line]
    assert len(lines) == 4 and all(
        ".damaged" in line or "Skipped" in line for line in run.out.splitlines() if "ℹ️" in line
    )

    def losses(folder):
        return [
            (json.loads(line)["step"], json.loads(line)["loss"])
            for line in open(folder / "metrics.jsonl")
        ]

    assert losses(copy) == losses(trained) and run.results["status"] == "completed"
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == [
        "aside-step-00000004",
        "aside-step-00000004.2",
        "best.damaged",
        "latest",
        "latest.damaged",
        "step-00000002",
        "step-00000004",
    ]
    assert sorted(path.name for path in copy.iterdir() if path.name != ".lock") == [
        "checkpoints",
        "metrics.jsonl",
        "metrics.jsonl.damaged",
        "results.json",
        "results.json.damaged",
    ]


# ---------------------------------------------------------------------------- export and conversion


def listed(name: str, content: bytes):
    """Put a file into step 4 and list it in its manifest."""
    import hashlib

    def prepare(folder):
        path = step(folder, 4) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        rewrite(step(folder, 4), lambda m: m["files"].update({name: facts}))

    return prepare


def convert(folder: Path, to: str):
    """Convert step 4 in this process; returns the new folder."""
    import torch

    from support.checkpoints import convert as conversion

    source = conversion.OwnCheckpoint(step(folder, 4))
    return conversion.convert(source, to, folder / "converted", torch.float32, "5GB")


@pytest.mark.parametrize(
    "prepare",
    [
        lambda f: (step(f, 4) / "model" / "modeling_evil.py").write_text("print('executed')"),
        lambda f: (step(f, 4) / "model" / "secret.json").symlink_to("/etc/passwd"),
        lambda f: (step(f, 4) / "model" / "secrets").symlink_to("/etc"),
        lambda f: os.mkfifo(step(f, 4) / "model" / "pipe.json"),
        lambda f: (step(f, 4) / "model" / "buffers.safetensors").write_bytes(b"not listed"),
        lambda f: (step(f, 4) / "model" / "adapter_config.json").write_text("{}"),
        listed("model/modeling_evil.py", b"print('executed')"),
        listed("model/pytorch_model.bin", b"\x80\x04."),
        listed("model/model.safetensors.index.json", b'{"weight_map": {}}'),
        listed("model/training_args.pt", b"x"),
        listed("model/tokenizer_evil.so", b"\x7fELF"),
    ],
    ids=range(11),
)
def test_only_listed_data_is_converted(copy, prepare):
    usual = {path.name for path in (step(copy, 4) / "model").iterdir()} | {
        "model.safetensors",
        "README.md",
    }
    prepare(copy)
    assert {path.name for path in convert(copy, "hf").iterdir()} == usual


def test_no_reference_to_code_is_converted(copy):
    config = json.loads((step(copy, 4) / "model" / "config.json").read_text())
    evil = {**config, "auto_map": {"AutoModelForCausalLM": "evil/repository--modeling.Evil"}}
    listed("model/config.json", json.dumps(evil).encode())(copy)
    listed(
        "model/tokenizer_config.json",
        b'{"auto_map": {"AutoTokenizer": ["evil/repository--t.T", null]}}',
    )(copy)
    folder = convert(copy, "hf")
    assert all("evil" not in path.read_text() for path in folder.glob("*.json"))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"5", b"[" * 100_000, b"\xff", b'{"a":' * 900 + b"1" + b"}" * 900]
)
def test_a_configuration_that_is_none(copy, content):
    from support.errors import UserError

    listed("model/config.json", content)(copy)
    with pytest.raises(UserError, match=r"config\.json"):
        convert(copy, "hf")
    assert not [path.name for path in copy.iterdir() if "converted" in path.name]


@pytest.mark.parametrize("name", ["a/b", "x" * 300, "optimizer_state.pt"])
def test_names_of_parameters_stay_inside(copy, name):
    """What the manifest's check lets through may be refused by the file system, and leaves nothing
    behind."""
    rewrite(step(copy, 4), rename_parameter(name))
    tensors_follow(step(copy, 4), name)
    before = contents(copy)
    try:
        convert(copy, "deepspeed-universal")
    except (OSError, RuntimeError):
        assert contents(copy) == before
    else:
        assert {path.split("/")[0] for path in contents(copy)} == {
            *(path.split("/")[0] for path in before),
            "converted",
        }


def tensors_follow(checkpoint: Path, name: str) -> None:
    """Give the tensors of a renamed parameter its new name, too."""
    from safetensors.torch import load_file, save_file

    from support.checkpoints.format import file_entry

    found = json.loads((checkpoint / "manifest.json").read_text())
    old = next(
        key for key in load_file(checkpoint / RANK_FILE) if key.split("@")[0] not in found["shapes"]
    ).split("@")[0]
    tensors = {
        key.replace(f"{old}@", f"{name}@"): value
        for key, value in load_file(checkpoint / RANK_FILE).items()
    }
    save_file(tensors, checkpoint / RANK_FILE)
    rewrite(
        checkpoint, lambda m: m["files"].update({RANK_FILE: file_entry(checkpoint / RANK_FILE)})
    )


def test_a_manifest_that_could_not_be_read_again_is_not_written(copy, monkeypatch):
    """A stream may leave out millions of rows, which its manifest names."""
    from support.checkpoints import format as checkpoint_format

    manifest, _ = checkpoint_format.read_manifest(step(copy, 4))
    before = (step(copy, 2) / "manifest.json").read_bytes()
    monkeypatch.setattr(checkpoint_format, "LARGEST_BYTES", 1000)
    with pytest.raises(ValueError, match="1,000 bytes"):
        checkpoint_format.write_manifest(step(copy, 2), manifest)
    assert (step(copy, 2) / "manifest.json").read_bytes() == before


# ---------------------------------------------------------------------------------------- leftovers


def test_temporary_folders_go_when_their_owner_is_dead(tmp_path):
    from support.files.atomic import TemporaryFolder

    program = (
        "import sys; from pathlib import Path;"
        "from support.files.atomic import TemporaryFolder; t = TemporaryFolder(Path(sys.argv[1]), 'x-');"
        "(t.path / 'big').write_text('x'); print(t.path, flush=True); sys.stdin.read()"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, tmp_path],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    dead, alive = (Path(process.stdout.readline().strip()) for process in started)
    other = (
        tmp_path / "x-of another machine"
    )  # which may be alive: its lock does not reach every file system
    other.mkdir()
    Path(f"{other}.lock").write_text(json.dumps({"host": "elsewhere", "boot": "another"}))
    (tmp_path / "x-unknown").mkdir()
    (tmp_path / "x-nonsense.lock").write_text("[")
    started[0].send_signal(signal.SIGKILL)
    started[0].wait()
    mine = TemporaryFolder(tmp_path, "x-")
    again = TemporaryFolder(tmp_path, "x-")
    assert not dead.exists() and not Path(f"{dead}.lock").exists()
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


def start_and_break(work: list, folder: Path, breaks, *args, env: dict | None = None) -> Run:
    """Start a run, call `breaks()` when it trains, and wait for its end."""
    command = [*launcher_command("python", 1), SCRIPT, *work, "--max_steps", "60", *args]
    process = start([*command, "--output_dir", folder], env)
    shown = []
    while "Epoch 1" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
        shown.append(line)
    breaks()
    out, err = finish(process, 120)
    return Run(process.returncode, "".join(shown) + out, err, 0.0, folder)


@pytest.mark.parametrize("breaks", [read_only, pytest.param(fill, marks=pytest.mark.soak)])
def test_a_failed_export_keeps_the_weights(script, work, tmp_path, disk, breaks):
    """No checkpoint was asked for; the disk of the export fails while the run trains."""
    elsewhere = disk(20)
    folder = tmp_path / "out"
    export = ["--export_hf", elsewhere / "model"]
    run = start_and_break(work, folder, lambda: breaks(elsewhere), *export)
    assert run.code == 1 and "step-00000060" in run.error and "convert_checkpoint.py" in run.error
    assert run.results["status"] == "failed" and "step-00000060" in run.results["reason"]
    assert {path.name for path in elsewhere.iterdir()} <= {"filler"}
    again = script(*work, "--max_steps", "60", "--resume", "--output_dir", folder, folder=folder)
    assert load_exported(folder / "hf") and again.results["steps"] == 60


@pytest.mark.soak
def test_a_failed_export_without_checkpoints(work, tmp_path, disk):
    """--no_save forbids a checkpoint: the model goes to the temporary folder."""
    small = disk(20)
    args = ["--no_save", "--export_hf", small / "model"]
    run = start_and_break(
        work, tmp_path / "out", lambda: fill(small), *args, env={"TMPDIR": tmp_path}
    )
    [kept] = tmp_path.glob("distributed_training_export_*")
    assert run.code == 1 and str(kept) in run.error and load_exported(kept)
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_temporary_folder_on_a_full_disk(disk):
    from support.files.atomic import TemporaryFolder

    small = disk(1)
    fill(small)
    with pytest.raises(OSError, match="No space left"):
        TemporaryFolder(small, "x-")
    assert [path.name for path in small.iterdir()] == ["filler"]


@pytest.mark.soak
def test_a_disk_that_fills_up_during_a_save(work, disk):
    """What was complete stays, and nothing half done is left."""
    small = disk(20)
    run = start_and_break(
        work, small / "out", lambda: fill(small), "--save_every", "30", "--no_export"
    )
    assert run.code == 1 and "No space left" in run.error
    names = {path.name for path in (small / "out" / "checkpoints").glob("*")} | {"latest"}
    assert names <= {"latest", "step-00000030"}


def test_an_export_that_cannot_fit_is_refused_before_training(script, work, disk):
    small = disk(2)
    run = script(*work, "--save_every", "2", "--output_dir", small / "out", folder=small, ok=False)
    assert run.code == 2 and "free" in run.error and "Epoch" not in run.out, run.err


@pytest.mark.soak
def test_an_export_folder_that_appears_during_training(work, tmp_path):
    """It is another run's, and is left as it is."""

    def appear():
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text("{}")

    run = start_and_break(work, tmp_path / "out", appear, "--export_hf", tmp_path / "model")
    assert run.code == 0 and run.results["export"]["folder"] == str(tmp_path / "model-2")
    assert load_exported(tmp_path / "model-2")
    assert (tmp_path / "model" / "config.json").read_text() == "{}"


@pytest.mark.soak
def test_infinity_on_a_full_nvme_folder(script, work, tmp_path, disk):
    small = disk(1)
    infinity = ["--strategy", "infinity", "--nvme_path", small, "--no_export"]
    run = script(*work, *infinity, "--output_dir", tmp_path / "out", folder=tmp_path, ok=False)
    assert run.code == 2 and "nvme_path" in run.error and list(small.iterdir()) == []


@pytest.mark.soak
def test_infinity_is_killed_and_resumes(script, work, tmp_path):
    """The same losses as without the kill, and nothing of the killed run stays in the NVMe
    folder."""
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    args = [
        *work,
        "--strategy",
        "infinity",
        "--nvme_path",
        nvme,
        "--no_export",
        "--save_every",
        "2",
    ]
    args += ["--max_steps", "8"]
    whole = script(*args)
    command = [*args, "--output_dir", tmp_path / "out"]
    killed = script(
        *command, ok=False, program=FAULT, env={"FAULT": "kill:0:6"}, folder=tmp_path / "out"
    )
    assert killed.code == -signal.SIGKILL and any(nvme.iterdir())
    resumed = script(*command, "--resume", folder=tmp_path / "out")
    assert "Resumed from" in resumed.out and resumed.losses == whole.losses
    assert not any(nvme.iterdir())


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_resume_on_four_ranks_of_a_checkpoint_of_two(script, work, strategy):
    args = [*work, "--no_export", "--strategy", strategy, "--max_steps", "6"]
    two = script(*args, "--batch_size", "4", "--save_every", "2", launcher="torchrun", ranks=2)
    start_at = two.folder / "checkpoints" / "step-00000002"
    four = script(*args, "--batch_size", "2", "--resume", start_at, launcher="torchrun", ranks=4)
    assert_close(four.losses, two.losses[2:], 1e-5)


@pytest.mark.parametrize(
    "how", [lambda p: p.write_text("x"), lambda p: p.symlink_to("nowhere"), os.mkfifo]
)
def test_the_checkpoints_folder_is_none(copy, manager, how):
    """Found before training, and not by the first save."""
    from support.errors import UserError

    shutil.rmtree(copy / "checkpoints")
    how(copy / "checkpoints")
    with pytest.raises(UserError, match="checkpoints"):
        manager.take_over(None)


# -------------------------------------------------------------------------------------------- links


def test_a_checkpoint_may_be_a_link_to_another_disk(copy, ctx, manager):
    """The user moved it there. Its files are read through the link, and only the link is renamed."""
    from support.checkpoints import manager as checkpoint

    step(copy, 2).rename(copy / "moved")
    step(copy, 2).symlink_to(copy / "moved")
    step(copy, 4).rename(copy / "moved too")
    step(copy, 4).symlink_to(copy / "moved too")
    assert checkpoint.find("", copy / "checkpoints", ctx)[0] == step(copy, 4)
    manager.take_over(None)
    assert (copy / "checkpoints" / "aside-step-00000004").is_symlink() and step(
        copy, 2
    ).is_symlink()
    checkpoint._remove_old(copy / "checkpoints", 1)
    assert (copy / "moved" / RANK_FILE).exists() and (copy / "moved too" / RANK_FILE).exists()


def test_hard_links_share_nothing_that_is_written(trained, copy, manager):
    """A copy made of hard links can be resumed and damaged without an effect on the original."""
    shutil.rmtree(copy)
    shutil.copytree(trained, copy, copy_function=os.link)
    before = contents(trained)
    manager.take_over({"loss": 1.0, "step": 2, "waited": 0})
    from support.files.atomic import write_text

    write_text(copy / "results.json", "{}")
    write_text(copy / "checkpoints" / "latest", "step-00000002\n")
    assert contents(trained) == before


@pytest.mark.soak
def test_temporary_folders_of_many_processes(tmp_path):
    """All of them create and clean up at once, and some are killed: nobody loses a folder in use."""
    from support.files.atomic import TemporaryFolder

    program = (
        "import os, random, sys, time; from pathlib import Path\n"
        "from support.files.atomic import TemporaryFolder\n"
        "draw, until = random.Random(int(sys.argv[2])), time.monotonic() + 3\n"
        "while time.monotonic() < until:\n"
        "    folder = TemporaryFolder(Path(sys.argv[1]), 'x-')\n"
        "    (folder.path / 'file').write_text('x'); time.sleep(0.02 * draw.random())\n"
        "    assert (folder.path / 'file').exists()\n"
        "    os.kill(os.getpid(), 9) if draw.random() < 0.05 else folder.remove()\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program, tmp_path, str(seed)], cwd=PROJECT)
        for seed in range(12)
    ]
    codes = {process.wait() for process in started}
    assert -signal.SIGKILL in codes and codes <= {0, -signal.SIGKILL}
    TemporaryFolder(tmp_path, "x-").remove()
    assert not any(tmp_path.iterdir())
