"""What a run prints and writes is what the documentation says."""

import re
import time

import pytest
from schema_check import BY_STATUS, table


@pytest.fixture(scope="module")
def run(script):
    return script(
        "--seq_length",
        "64",
        "--num_samples",
        "44",
        "--batch_size",
        "2",
        "--epochs",
        "2",
        "--logging_steps",
        "10",
        "--eval_first",
        launcher="torchrun",
        ranks=2,
    )


def test_console(run):
    lines = run.out.splitlines()
    wanted = [
        r"=== Distributed Setup ===",
        r"Rank: 0/2",
        r"Local Rank: 0",
        r"World Size: 2",
        r"Backend: gloo",
        r"GPU: none \(CPU\)",
        r"🚀 Fine-tuning tiny-gpt2 \(4\.3M parameters\)",
        r"📋 Strategy: DP",
        r"⏳ Preparing the dataset pydocs",
        r"⏳ Loading the model",
        r"✅ Model loaded: 4,339,200 parameters \(4\.3M\)",
        r"✅ Dataset ready: 44 samples",
        r"⏳ Training: steps 1 to 22",
        r"Evaluation \| Loss: 8\.\d{4} \| Perplexity: \d+\.\d\d",
        r"Epoch 1 \| Batch 0/11 \| Loss: 8\.\d{4} \| LR: 5\.00e-04",
        r"Epoch 1 \| Batch 10/11 \| Loss: \d\.\d{4} \| LR: 2\.73e-04",
        r"Epoch 1/2 \| Average Loss: \d\.\d{4}",
        r"Evaluation .*",
        r"Epoch 2 \| Batch 0/11 .*",
        r"Epoch 2 \| Batch 10/11 .*",
        r"Epoch 2/2 \| Average Loss: \d\.\d{4}",
        r"Evaluation .*",
        r"✅ Training Complete!",
        r"Process Memory: \d+\.\d\d GB resident \| \d+\.\d\d GB peak",
        r"Throughput: [\d,.]+ samples/sec \| [\d,]+ tokens/sec \| [\d,]+ tokens/sec/process "
        r"\(first 5 of 22 steps left out\)",
        r"🤗 .*/hf",
        r"📁 .*/results.json",
        r"📊 A page with its curves: python scripts/report.py .*",
    ]
    position = 0
    for pattern in wanted:
        position = next(
            (i for i in range(position, len(lines)) if re.fullmatch(pattern, lines[i])), None
        )
        assert position is not None, f"{pattern} is missing, or out of order, in\n{run.out}"
    assert len([line for line in lines if line.startswith("Epoch")]) == 6
    for epoch, losses in ((1, run.losses[:11]), (2, run.losses[11:])):
        assert f"Epoch {epoch}/2 | Average Loss: {sum(losses) / 11:.4f}" in lines


def test_nothing_of_other_libraries_shows(script):
    for strategy in ("zero3", "infinity", "fsdp"):
        run = script(
            "--strategy",
            strategy,
            "--seq_length",
            "32",
            "--max_steps",
            "2",
            "--batch_size",
            "1",
            "--no_eval",
        )
        assert run.err == ""
        shown = r"[🚀📋🔧🔎📚✅📁📊🤗ℹ⏳]|Epoch|Process Memory|Throughput"
        assert all(re.match(shown, line) for line in run.out.splitlines()), run.out


def test_results_json(run):
    results = run.results
    assert set(results) == {
        *table(*BY_STATUS["completed"]),
        "export",
    }  # the types are checked for every run: conftest.py
    assert (results["schema_version"], results["status"], results["reason"]) == (
        1,
        "completed",
        None,
    )
    assert (results["world_size"], results["global_batch_size"], results["seed"]) == (2, 4, 42)
    assert (results["steps"], results["samples"], results["tokens"]) == (22, 88, 88 * 64)
    assert (
        results["train_loss_first"] == run.losses[0]
        and results["train_loss_last"] == run.losses[-1]
    )
    assert results["train_loss_last"] < results["train_loss_first"]
    assert results["warmup_steps_excluded"] == 5
    assert results["tokens_per_second"] == pytest.approx(64 * results["samples_per_second"])
    assert results["tokens_per_second_per_gpu"] == pytest.approx(results["tokens_per_second"] / 2)
    assert (
        results["step_seconds"]["p10"]
        <= results["step_seconds"]["median"]
        <= results["step_seconds"]["p90"]
    )
    phases = results["step_phases_seconds"]
    assert (
        set(phases) == {"data", "forward", "backward", "update"}
        and phases["backward"] > phases["data"] > 0
    )
    mean_step = 4 / results["samples_per_second"]
    assert sum(phases.values()) == pytest.approx(mean_step, rel=0.05)
    for kind in ("allocated_bytes", "peak_bytes", "host_peak_bytes"):
        assert len(results["memory"][kind]) == 2
    assert all(150e6 < peak < 3e9 for peak in results["memory"]["host_peak_bytes"])
    assert "real_model_example.py" in results["command"]
    assert (
        abs(
            time.time()
            - time.mktime(time.strptime(results["started_at"][:19], "%Y-%m-%dT%H:%M:%S"))
            + time.timezone
        )
        < 3600
    )


def test_metrics_jsonl(run):
    steps = [record for record in run.metrics if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 23))
    assert {record["epoch"] for record in steps} == {1, 2}
    assert all(
        set(record) == {"step", "epoch", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}
        for record in steps
    )
    assert all(record["grad_norm"] > 0 and record["seconds"] > 0 for record in steps)
    evaluations = [record for record in run.metrics if "eval_loss" in record]
    assert [record["step"] for record in evaluations] == [0, 11, 22]
    assert evaluations[-1]["eval_loss"] == run.results["eval_loss"]


def test_a_flag_of_another_strategy_is_ignored_with_one_line(script, tmp_path):
    run = script("--nvme_path", tmp_path, "--seq_length", "32", "--max_steps", "1", "--no_eval")
    assert (
        len([line for line in run.out.splitlines() if "--nvme_path" in line and "ignored" in line])
        == 1
    )


def test_default_output_dir_is_new_for_each_run(begin, tmp_path):
    from conftest import SCRIPT, finish, launcher_command

    command = [
        *launcher_command("python", 1),
        SCRIPT,
        "--seq_length",
        "32",
        "--max_steps",
        "1",
        "--no_eval",
    ]
    finish(begin(command, cwd=tmp_path), 60)
    [folder] = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"tiny-gpt2-dp-\d{8}-\d{6}", folder.name)
    assert {file.name for file in folder.iterdir()} == {
        "results.json",
        "metrics.jsonl",
        ".lock",
        "hf",
    }
