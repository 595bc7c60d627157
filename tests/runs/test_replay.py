"""--replay shows a step of a run, and --skip_steps leaves the batches of steps out."""

import hashlib
import json
import random
import shlex
import shutil
import subprocess
import sys
from pydoc_data.topics import topics

import numpy as np
import pytest
from conftest import PROJECT, slow, soak

from tools.runs.outliers import replay_command

# Batches of four sequences on two ranks, and of the same four on one.
WORK = "--seq_length 32 --num_samples 38 --save_every 4 --no_export --no_eval --weight_decay 1"
WORK = [*WORK.split(), *"--dropout 0.1 --lr 1e-3 --precision fp32".split()]
TWO_RANKS = ["--batch_size", "1", "--gradient_accumulation_steps", "2"]


def files_of(folder):
    """The digests of all files of a run except replays."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith("replay-")
    }


def replay_of(run, step):
    return json.loads((run.folder / f"replay-{step}.json").read_text())


@pytest.fixture(scope="module")
def run(script):
    return script(*WORK, *TWO_RANKS, launcher="torchrun", ranks=2)


def check_sequences(replay, total):
    """Each sequence of the step is there once, and their parts make the whole."""
    sequences = replay["sequences"]
    places = {(one["rank"], one["micro_batch"], one["row"]) for one in sequences}
    assert len(places) == len(sequences) == total
    assert sum(one["gradient_share"] for one in sequences) == pytest.approx(1)
    # The norm of a sum is at most the sum of the norms.
    assert sum(one["gradient_norm"] for one in sequences) >= replay["grad_norm"] * 0.99
    norms = np.array([layer["gradient_norm"] for layer in replay["layers"]])
    assert np.sqrt((norms**2).sum()) == pytest.approx(replay["grad_norm"])
    for one in sequences:
        documents = one["text"].split("<|endoftext|>")
        for text, origin in zip(documents, one["origins"], strict=True):
            assert text.strip() in topics[origin["row"].removeprefix("pydocs, ")]


@pytest.mark.parametrize(
    "strategy",
    ["dp", *map(slow, ("zero2", "zero3", "fsdp")), *map(soak, ("zero1", "offload", "infinity"))],
)
def test_a_repeated_step_is_the_same_and_the_run_stays(script, run, strategy):
    if strategy != "dp":
        how = ["--strategy", strategy]
        run = script(*WORK, *TWO_RANKS, *how, launcher="torchrun", ranks=2)
    before = files_of(run.folder)
    work = [*WORK, *TWO_RANKS, "--strategy", strategy, "--replay"]
    # From the checkpoint of step 4, with a step between; and from the beginning.
    for step in (6, 2):
        script(*work, str(step), launcher="torchrun", ranks=2, folder=run.folder)
        replay = replay_of(run, step)
        assert replay["equal"] is True and replay["loss"] == run.losses[step - 1]
        assert replay["grad_norm"] == run.metrics[step - 1]["grad_norm"]
        assert replay["outcome"] == "updated"
        check_sequences(replay, total=4)
    assert files_of(run.folder) == before


def test_another_strategy_and_number_of_ranks(script, run):
    work = [*WORK, "--batch_size", "4", "--dropout", "0", "--strategy", "zero3"]
    done = script(*work, "--replay", "10", folder=run.folder)  # the last step, of two sequences
    replay = replay_of(run, 10)
    assert replay["equal"] is False and replay["loss"] == pytest.approx(run.losses[9], rel=0.05)
    assert "a difference of" in done.out and "the run: dp on 2 ranks" in done.out
    assert "dropout 0.1 in that run, 0.0 now" in done.out
    check_sequences(replay, total=2)
    # Without dropout the loss of the step is the mean over its tokens.
    targets = [one["targets"] for one in replay["sequences"]]
    losses = [one["loss"] for one in replay["sequences"]]
    assert np.average(losses, weights=targets) == pytest.approx(replay["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_step_at_which_the_run_stopped(script):
    """The replay stops at the same step, and shows its sequences."""
    work = [*WORK, "--batch_size", "2", "--lr", "1000", "--optim", "sgd", "--max_grad_norm", "0"]
    run = script(*work, "--weight_decay", "0", ok=False)
    assert run.code == 1 and "--replay" in run.error
    step = len(run.losses) + 1
    done = script(*work, "--weight_decay", "0", "--replay", str(step), folder=run.folder)
    replay = replay_of(run, step)
    assert replay["outcome"] == "stopped" and replay["loss"] is None
    assert replay["sequences"] and "not finite" in done.out


@pytest.mark.slow
def test_a_replay_that_cannot_be_made(script, run):
    work = [*WORK, *TWO_RANKS]

    def refused(*flags, folder=run.folder, ranks=2):
        launcher = "torchrun" if ranks > 1 else "python"
        done = script(*flags, launcher=launcher, ranks=ranks, folder=folder, ok=False)
        assert done.code == (2 if ranks == 1 else 1)  # torchrun exits with 1
        return done.error

    before = files_of(run.folder)
    assert "this run has 10 steps" in refused(*work, "--replay", "11")
    assert "seed 42 in that run, 5 now" in refused(*work, "--seed", "5", "--replay", "2")
    assert "global batch 4 in that run, 2 now" in refused(*work, "--replay", "2", ranks=1)
    assert "holds no run" in refused(*work, "--replay", "2", folder=run.folder / "hf", ranks=1)
    assert files_of(run.folder) == before


def test_skipped_steps_are_not_trained_on(script, tmp_path):
    """A resume without the batch of step 6, the evaluation and the save of which are made."""
    work = [*WORK, "--batch_size", "4", "--save_every", "2", "--output_dir", tmp_path]
    whole = script(*work, folder=tmp_path).metrics
    work += ["--eval_every", "3", "--eval_samples", "4"]
    work.remove("--no_eval")
    start = tmp_path / "checkpoints" / "step-00000004"
    run = script(*work, "--resume", start, "--skip_steps", "6,10", folder=tmp_path)
    steps = [record["step"] for record in run.metrics if "loss" in record]
    assert steps == [1, 2, 3, 4, 5, 7, 8, 9]
    assert run.results["skipped_steps"] == [6, 10] and run.results["steps"] == 10
    assert [r["step"] for r in run.metrics if "eval_loss" in r] == [6, 9, 10]
    assert (tmp_path / "checkpoints" / "step-00000006").is_dir()
    later = {record["step"]: record for record in run.metrics if "loss" in record}
    assert later[5]["loss"] == whole[4]["loss"] and later[7]["loss"] != whole[6]["loss"]
    assert later[7]["lr"] == whole[6]["lr"]
    # A checkpoint after the step contains its update, unless it was skipped before.
    refused = script(*work, "--resume", "--skip_steps", "7,10", folder=tmp_path, ok=False)
    assert refused.code == 2 and "--skip_steps 7" in refused.error
    later = start.with_name("step-00000008")
    again = script(*work, "--resume", later, "--skip_steps", "6,9", folder=tmp_path)
    assert again.results["skipped_steps"] == [6, 9]
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000008")
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000006")
    # Also from a checkpoint before the skipped step, by the command that report.py prints.
    command = shlex.split(replay_command(again.results, tmp_path, 8))[2:]
    replay = script(*command, folder=tmp_path)
    assert replay_of(replay, 8)["equal"] is True
    # A command without the flag, as that of a later resume.
    replay = script(*work, "--replay", "8", folder=tmp_path)
    assert replay_of(replay, 8)["equal"] is True


@pytest.mark.slow
def test_a_step_before_a_resume_with_other_settings(script):
    """The checkpoint of the resume is gone; DeepSpeed's configuration has the settings, too."""
    work = [*WORK, "--strategy", "zero2", "--batch_size", "4", "--save_every", "3"]
    first = script(*work, "--max_steps", "3")
    more = [*work, "--lr", "1e-4", "--weight_decay", "0", "--max_steps", "8", "--keep_last", "1"]
    later = script(*more, "--resume", folder=first.folder)
    replay = script(*more, "--replay", "3", folder=first.folder)
    assert replay_of(replay, 3)["equal"] is True and replay_of(replay, 3)["changed_settings"] == []
    script(*more, "--replay", "5", folder=first.folder)
    replay = replay_of(first, 5)
    assert "lr 0.001 up to step 3 in that run" in " ".join(replay["changed_settings"])
    assert replay["recorded_loss"] == later.losses[4]


@pytest.mark.slow
def test_a_run_that_continues_another_folder_has_its_own_settings(script, tmp_path):
    """Its steps begin after the checkpoint; those before it are in the other folder."""
    work = [*WORK, "--batch_size", "4", "--save_every", "2"]
    first = script(*work, "--max_steps", "4")
    saved = first.folder / "checkpoints" / "step-00000002"
    more = [*work, "--lr", "1e-4", "--max_steps", "6"]
    second = script(*more, "--resume", saved, folder=tmp_path / "second")
    [signature] = second.results["signatures"]
    assert signature["from_step"] == 3 and signature["told"]["lr"] == 1e-4
    replay = script(*more, "--replay", "5", folder=second.folder)
    assert replay_of(replay, 5)["equal"] is True and replay_of(replay, 5)["changed_settings"] == []


@pytest.mark.slow
def test_measured_shares_and_skipped_steps(script):
    """The ranks measure their speed in steps 4 to 8, one of which is skipped."""
    work = "--seq_length 32 --batch_size 2 --max_steps 12 --no_export --no_eval".split()
    for skipped in ("3,6", "8"):
        flags = ["--rank_shares", "auto", "--skip_steps", skipped]
        run = script(*work, *flags, launcher="torchrun", ranks=2)
        assert run.results["steps"] == 12
        assert any("rank_seconds_per_token" in record for record in run.metrics)


@pytest.mark.slow
def test_the_page_and_the_replay_name_a_bad_row(script, tmp_path, begin):
    """Three bad rows at known steps: a table of numbers, another script, a repeated token."""
    words = [" ".join(p.split()) for name in sorted(topics) for p in topics[name].split("\n\n")]
    rows = [text.split(" ", 4) for text in words if 200 < len(text) < 600][:128]
    rows = [{"prompt": " ".join(row[:4]), "completion": f" {row[4]}"} for row in rows]
    numbers = random.Random(0)
    bad = {
        30: "\t".join(str(numbers.randint(0, 9999)) for _ in range(100)),
        34: "".join(chr(numbers.randint(0x0E01, 0x0E30)) for _ in range(250)),
        38: "zq " * 150,
    }
    order = np.random.default_rng([42, 1]).permutation(len(rows))
    lines = {step: int(order[2 * step - 1]) + 1 for step in bad}  # the second row of the step
    for step, text in bad.items():
        rows[lines[step] - 1] = {"prompt": "a", "completion": f" {text}"}
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    pretraining = "--max_steps 300 --batch_size 16 --seq_length 64 --lr 2e-3 --warmup_steps 20"
    base = script(*pretraining.split(), "--no_eval", timeout=600)
    work = ["--model", base.folder / "hf", "--dataset", data, "--lr", "1e-4", "--batch_size", "2"]
    work += "--seq_length 64 --save_every 10 --no_export --no_eval --validation_split 0".split()
    run = script(*work)
    report = [sys.executable, PROJECT / "scripts" / "report.py", run.folder]
    printed = subprocess.run(report, capture_output=True, text=True, check=True).stdout
    found = {int(line.split()[1][:-1]) for line in printed.splitlines() if " step " in line}
    assert found >= {*bad} and len(found) <= len(bad) + 2  # rounding may add a step of good rows
    command = printed.splitlines()[-1]
    assert "--replay" in command
    for step, line in lines.items():
        script(*work, "--replay", str(step), folder=run.folder)
        first = replay_of(run, step)["sequences"][0]
        assert first["origins"] == [{"dataset": str(data), "row": f"{data}, line {line}"}]
        assert first["gradient_share"] > 0.6
    subprocess.run(report, capture_output=True, text=True, check=True)
    page = (run.folder / "report.html").read_text()
    assert all(f"Replay of step {step}" in page for step in bad)
    assert "stands out" in page
