"""What a run prints and writes is what the documentation says."""

import json
import re
import shutil

import pytest
from conftest import SCRIPT, finish, launcher_command
from schema_check import BY_STATUS, table


@pytest.fixture(scope="module")
def run(script):
    flags = "--seq_length 64 --num_samples 44 --batch_size 2 --epochs 2 --logging_steps 10"
    return script(*flags.split(), "--eval_first", launcher="torchrun", ranks=2)


def test_console(run):
    lines = run.out.splitlines()
    wanted = [
        r"=== Distributed Setup ===",
        r"World Size: 2",
        r"Backend: GLOO",
        r"📥 Loading model and tokenizer\.\.\.",
        r"={60}",
        r"🚀 Fine-tuning tiny-gpt2 \(4\.3M parameters\)",
        r"📋 Strategy: DP",
        r"Device: cpu \(threads: \d+\), Precision: \w+",
        r"Epochs: 2, Batch size: 2, LR: 0\.0005, "
        r"Global batch: 2 × 2 ranks × 1 micro-batches = 4",
        r"📦 Loading dataset \(pydocs\)\.\.\.",
        r"✅ Dataset ready: 44 samples",
        r"✅ Model loaded: 4,339,200 parameters \(4\.3M\)",
        r"🚂 Starting Training \(Data Parallelism\): steps 1 to 22",
        r"Evaluation \| Loss: 8\.\d{4} \| Perplexity: \d+\.\d\d \| Bits per byte: 3\.\d{4}",
        r"Epoch 1 \| Batch 0/11 \| Loss: 8\.\d{4} \| LR: 5\.00e-04",
        r"Epoch 1 \| Batch 10/11 \| Loss: \d\.\d{4} \| LR: 2\.73e-04",
        r"Epoch 1/2, Average Loss: \d\.\d{4}",
        r"Evaluation .*",
        r"Epoch 2/2, Average Loss: \d\.\d{4}",
        r"={60}",
        r"✅ Training Complete!",
        r"Throughput: [\d,.]+ samples/sec \| [\d,]+ tokens/sec \| .* \(first 5 of 22 steps left out\)",
    ]
    remaining = iter(lines)  # each pattern matches a later line than the previous one
    for pattern in wanted:
        assert any(re.fullmatch(pattern, line) for line in remaining), f"{pattern}\n{run.out}"
    assert len([line for line in lines if line.startswith("Epoch ")]) == 6
    for epoch, losses in ((1, run.losses[:11]), (2, run.losses[11:])):
        assert f"Epoch {epoch}/2, Average Loss: {sum(losses) / 11:.4f}" in lines


def test_nothing_of_other_libraries_shows(script):
    for strategy in ("zero3", "infinity", "fsdp"):
        work = "--seq_length 32 --max_steps 2 --batch_size 1 --no_eval".split()
        run = script("--strategy", strategy, *work)
        assert run.err == ""
        shown = r"[🚀📋🔧🔎📚✅📁📊🤗ℹ⏳📥📦🚂=]|Device|Steps|Epoch|Process Memory|Throughput"
        assert all(re.match(shown, line) for line in run.out.splitlines()), run.out


def test_results_json(run):
    results = run.results  # the types are checked for every run: conftest.py
    assert set(results) == {*table(*BY_STATUS["completed"]), "export"}
    expected = {"schema_version": 1, "status": "completed", "reason": None, "world_size": 2}
    expected |= {"global_batch_size": 4, "seed": 42, "steps": 22, "samples": 88}
    expected |= {"tokens": 88 * 64, "warmup_steps_excluded": 5}
    expected |= {"train_loss_first": run.losses[0], "train_loss_last": run.losses[-1]}
    assert {key: results[key] for key in expected} == expected and run.losses[-1] < run.losses[0]
    assert results["tokens_per_second"] == pytest.approx(64 * results["samples_per_second"])
    assert results["tokens_per_second_per_gpu"] == pytest.approx(results["tokens_per_second"] / 2)
    step, phases = results["step_seconds"], results["step_phases_seconds"]
    assert step["p10"] <= step["median"] <= step["p90"]
    assert phases["backward"] > phases["data"] > 0
    mean_step = 4 / results["samples_per_second"]
    assert sum(phases.values()) == pytest.approx(mean_step, rel=0.05)
    lists = ("allocated_bytes", "peak_bytes", "host_peak_bytes")
    assert {len(results["memory"][key]) for key in lists} == {2}
    assert all(150e6 < peak < 3e9 for peak in results["memory"]["host_peak_bytes"])
    assert "real_model_example.py" in results["command"]


def test_metrics_jsonl(run):
    steps = [record for record in run.metrics if "loss" in record]
    assert [(r["step"], r["epoch"]) for r in steps] == [(n, 1 + n // 12) for n in range(1, 23)]
    assert all(record["grad_norm"] > 0 and record["seconds"] > 0 for record in steps)
    evaluations = [record for record in run.metrics if "eval_loss" in record]
    assert [record["step"] for record in evaluations] == [0, 11, 22]
    assert evaluations[-1]["eval_loss"] == run.results["eval_loss"]


def test_no_secret_is_printed_or_written(script, monkeypatch, capfd):
    from distributed_training.process import print_traceback

    monkeypatch.setenv("HF_TOKEN", "hf_CANARYcanaryCANARYcanary")
    print_traceback(ValueError("the token is hf_CANARYcanaryCANARYcanary"))
    err = capfd.readouterr().err
    run = script("--model", "http://user:canary@host/x", "--print_config")
    assert "ValueError" in err and "canary" not in (run.out + run.err + err).lower()


def test_no_file_of_a_run_has_a_secret(script, llama, text_file, tmp_path):
    """In paths and in DeepSpeed's configuration, whose copy is used by a resume without the secret."""
    place = tmp_path / "canary-of-a-path"
    model, text = shutil.copytree(llama, place / "model"), shutil.copy(text_file, place / "a.txt")
    comet = {"enabled": False, "api_key": "canary-of-a-key", "project": "mine"}
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"comet": comet, "zero_optimization": {"stage": 1}}))
    flags = (
        "--seq_length 32 --batch_size 2 --no_eval --save_every 2 --report_to tensorboard".split()
    )
    flags += ["--model", model, "--dataset", text, "--lora_r", "2", "--precision", "fp32"]
    env = {"GH_PAT": "canary-of-a-path"}
    run = script(*flags, "--ds_config", config, "--max_steps", 2, env=env)
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert {"manifest.json", "ds_config.json", "README.md"} <= {path.name for path in files}
    assert not [path for path in files if b"canary" in path.read_bytes()]
    assert "canary" not in run.out + run.err
    written = run.folder / "ds_config.json"
    assert json.loads(written.read_text())["comet"] == {**comet, "api_key": None}
    again = ["--resume", "--output_dir", run.folder, "--ds_config", written, "--max_steps", 4]
    assert script(*flags, *again, folder=run.folder).results["steps"] == 4


def test_default_output_dir_names_model_strategy_and_time(begin, tmp_path):
    """And a flag of another strategy is ignored with one line."""
    flags = ["--seq_length", "32", "--max_steps", "2", "--no_eval", "--nvme_path", tmp_path]
    command = [*launcher_command("python", 1), SCRIPT, *flags]
    out = finish(begin(command, cwd=tmp_path), 60)[0]
    [folder] = (tmp_path / "runs").iterdir()
    assert out.count("--nvme_path is used by infinity only: ignored") == 1
    assert re.fullmatch(r"tiny-gpt2-dp-\d{8}-\d{6}", folder.name)
    files = {"results.json", "metrics.jsonl", "loss.png", ".lock", "hf"}
    assert {file.name for file in folder.iterdir()} == files
