"""Attacks on the results that the report of a comparison reads."""

import json
import os
from pathlib import Path

import pytest
from attacks import Attack, table
from command_lines import DEEP, DIGITS

RANK = {
    "parameters": 8,
    "gradients": 8,
    "optimizer": 16,
    "buffers": 0,
    "other": 1,
    "activations": None,
    "logits": None,
}

RESULTS = {
    "status": "completed",
    "strategy": "dp",
    "model": "tiny-gpt2",
    "parameters": 2,
    "trainable_parameters": 2,
    "world_size": 2,
    "simulated_world_size": None,
    "device": "cpu",
    "precision": "fp32",
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "global_batch_size": 2,
    "seq_length": 8,
    "seed": 1,
    "steps": 2,
    "samples": 4,
    "dataset": {"name": "d", "sha256": "x"},
    "hardware": {"cpu": "c", "cores": 1, "gpu": None, "gpu_memory_bytes": None, "ram_bytes": 9},
    "command": "python x",
    "versions": {"torch": "2", "deepspeed": "1", "transformers": "5"},
    "started_at": "2026-01-01T00:00:00+00:00",
    "memory": {
        "peak_bytes": [9, 9],
        "host_peak_bytes": [9, 9],
        "nvme_bytes": 0,
        "categories_bytes_by_rank": [RANK, RANK],
        "device_categories_bytes_by_rank": [RANK, RANK],
        "placement": {"optimizer": "device"},
        "predicted_bytes": {"parameters": 8, "gradients": 8, "optimizer": 16, "peak": 40},
        "step_bytes_by_rank": [None],
    },
    "samples_per_second": 2.0,
    "tokens_per_second_per_gpu": 16.0,
    "warmup_steps_excluded": 0,
    "train_loss_first": 3.0,
    "train_loss_last": 2.0,
    "step_phases_seconds": {"data": 0.1, "forward": 0.1, "backward": 0.1, "update": 0.1},
    "communication_bytes_per_step": 8.0,
    "communication_per_step": {
        "all_reduce float32": {"calls": 1, "message_bytes": 8, "sent_bytes": 8}
    },
}

STEP = {"loss": 3.0, "lr": 0.1, "tokens_per_second": 16.0}

WRONG = [None, "x", "²", -1, True, [], {}, [None], {"x": 1}, [[[]]], 10**400, float("nan")]


def save_run(folder: Path, results, metrics=(STEP, STEP)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(
        results if isinstance(results, str) else json.dumps(results)
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in metrics))


def damaged(value, wrong):
    """Every version of `value` in which one part is `wrong`, or is missing."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield {name: other for name, other in value.items() if name != key}
            for part in damaged(inner, wrong):
                yield value | {key: part}
    elif isinstance(value, list) and value:
        for part in damaged(value[0], wrong):
            yield [part, *value[1:]]
    yield wrong


@pytest.fixture
def report(tmp_path):
    """report() reads the runs in tmp_path and makes all texts of the report; returns the
    comparison.
    """
    from support.report import compare, tables

    def make():
        comparison = compare.read_comparison(tmp_path)
        for text in (tables.as_file, tables.as_json, tables.as_markdown):
            text(comparison)
        return comparison

    return make


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"world_size": 1},
        {"communication_bytes_per_step": None, "communication_per_step": None},
        {"device": "cuda", "hardware": RESULTS["hardware"] | {"gpu": "G", "gpu_memory_bytes": 99}},
        {"memory": RESULTS["memory"] | {"predicted_bytes": None}},
        {"precision": "bf16"},
        {"train_loss_last": 0},
    ],
)
def test_results_that_are_right_are_compared(tmp_path, report, change):
    save_run(tmp_path / "dp" / "1", RESULTS | change)
    save_run(tmp_path / "zero2" / "1", RESULTS | change | {"strategy": "zero2"})
    assert report().same_model


def test_a_simulation_is_reported(tmp_path, report):
    gone = (
        "samples_per_second",
        "tokens_per_second_per_gpu",
        "step_phases_seconds",
        "train_loss_last",
        "train_loss_first",
    )
    results = {key: None if key in gone else value for key, value in RESULTS.items()} | {
        "simulated_world_size": 4
    }
    save_run(tmp_path / "dp" / "1", results, [])
    comparison = report()
    assert comparison.reference is not None and comparison.simulated


@pytest.mark.attack
@pytest.mark.parametrize(
    "strategy, wrong",
    [*[("zero2", wrong) for wrong in WRONG], ("dp", None), ("dp", [])],
    ids=lambda value: repr(value)[:9],
)
def test_any_damage_to_results_ends_in_a_report(tmp_path, report, wrong, strategy):
    save_run(tmp_path / "dp" / "1", RESULTS)
    save_run(tmp_path / "zero2" / "1", RESULTS | {"strategy": "zero2"})
    for results in damaged(RESULTS, wrong):
        save_run(tmp_path / strategy / "1", results)
        report()
    for metrics in damaged([STEP, STEP], wrong):
        save_run(
            tmp_path / strategy / "1", RESULTS, metrics if isinstance(metrics, list) else [metrics]
        )
        report()


@table(
    Attack("nested", prepare=lambda folder: save_run(folder / "dp" / "1", '{"a":' * DEEP), code=3),
    Attack(
        "digits",
        prepare=lambda folder: save_run(folder / "dp" / "1", f'{{"steps": {DIGITS}}}'),
        code=3,
    ),
    Attack(
        "a pipe",
        prepare=lambda folder: (
            (folder / "dp" / "1").mkdir(parents=True)
            or os.mkfifo(folder / "dp" / "1" / "results.json")
        ),
        code=3,
    ),
    Attack("a list", prepare=lambda folder: save_run(folder / "dp" / "1", "[]"), code=3),
    Attack("a number", prepare=lambda folder: save_run(folder / "dp" / "1", "7"), code=3),
    Attack(
        "a number as status",
        prepare=lambda folder: save_run(folder / "dp" / "1", {"status": 7, "reason": 8}),
        code=3,
    ),
    Attack(
        "no samples_per_second",
        prepare=lambda folder: save_run(folder / "dp" / "1", RESULTS | {"samples_per_second": "x"}),
        code=3,
    ),
)
def test_status_of_a_damaged_run(attack, tmp_path, main_of):
    attack.prepare(tmp_path)
    attack.check(tmp_path, main_of("compare_report", tmp_path / "dp" / "1", "--status"))
