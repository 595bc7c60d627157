"""Output folders of runs that never trained, for what reads runs.

tests/conftest.py loads this module as a plugin, so its fixtures are at hand in every test.
"""

import json

import pytest

LOSSES = [8.0, 7.5, 7.0, 6.5, 6.0, 5.5]
STATES = {"parameters": 8 << 20, "gradients": 8 << 20, "optimizer": 16 << 20}
RANK = {**STATES, "buffers": 0, "other": 1}
RESULTS = {
    **{"status": "completed", "strategy": "dp", "model": "tiny-gpt2", "parameters": 2 << 20},
    **{"trainable_parameters": 2, "world_size": 2, "simulated_world_size": None, "device": "cpu"},
    **{"precision": "fp32", "batch_size": 1, "gradient_accumulation_steps": 1, "seed": 1},
    **{"global_batch_size": 2, "seq_length": 8, "steps": 6, "samples": 12, "command": "python x"},
    **{"dataset": {"name": "d", "sha256": "x"}, "started_at": "2026-01-01T00:00:00+00:00"},
    "hardware": {"cpu": "c", "cores": 1, "gpu": None, "gpu_memory_bytes": None, "ram_bytes": 9},
    "versions": {"torch": "2", "deepspeed": "1", "transformers": "5"},
    "memory": {
        **{"peak_bytes": [9, 9], "host_peak_bytes": [9, 9], "nvme_bytes": 0},
        "categories_bytes_by_rank": [RANK, RANK],
        "device_categories_bytes_by_rank": [RANK, RANK],
        "predicted_bytes": {**STATES, "peak": 40 << 20},
    },
    **{"samples_per_second": 2.0, "tokens_per_second_per_gpu": 16.0, "train_loss_last": 5.5},
    "step_seconds": {"median": 1.0, "p10": 0.9, "p90": 1.2},
    "step_phases_seconds": {"data": 0.1, "forward": 0.1, "backward": 0.1, "update": 0.1},
    "communication_bytes_per_step": 8.0,
    "communication_per_step": {
        "all_reduce float32": {"calls": 1, "message_bytes": 8 << 20, "sent_bytes": 8}
    },
}


def steps(losses=LOSSES, first=1, lr=1e-3, norms=()):
    """Records of steps; earlier versions recorded no gradient norms."""
    records = [
        {"step": number, "epoch": 1, "loss": loss, "lr": lr}
        for number, loss in enumerate(losses, first)
    ]
    for record, norm in zip(records, norms, strict=False):
        record["grad_norm"] = norm
    return records


def save(folder, results, records):
    """Write an output folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


@pytest.fixture
def ours(tmp_path):
    """ours(name, records, **results) writes an output folder; `flags` and `soft` have defaults."""

    def write(name, records, flags=None, soft=None, **results):
        signature = {"hard": {"parameters": 10}, "soft": {"dataset": "a" * 64} | (soft or {})}
        facts = {"flags": flags or {"eval": True}, "run_signature": signature}
        return save(tmp_path / name, RESULTS | facts | results, records)

    return write
