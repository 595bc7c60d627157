"""The command and the public function `plan` give the same plan."""

import json

import pytest

from distributed_training import Plan, plan, resolve_settings
from distributed_training.memory.estimate import predict
from tools.plan import flags, text
from tools.plan.workload import read_workload

# The same run for scripts/plan_memory.py and for `plan`.
SAME = [
    ("--model gpt2-xl --gpus 4 --gpu_memory 16", "zero2", {"gpus": 4, "gpu_memory": 16}),
    (
        "--model gpt2 --gpus 2 --gpu_memory 1 --no_fused_gelu",
        "fsdp",
        {"gpus": 2, "gpu_memory": 1, "fused_gelu": False},
    ),
    (
        "--model gpt2-medium --gpus 8 --gpu_memory 8 --host_memory 2 --gpus_per_node 4 "
        "--batch_size 2 --seq_length 256 --gradient_accumulation_steps 3 --precision fp16 "
        "--gradient_checkpointing",
        "offload",
        {"gpus": 8, "gpu_memory": 8, "host_memory": 2, "gpus_per_node": 4, "batch_size": 2}
        | {"seq_length": 256, "gradient_accumulation_steps": 3, "precision": "fp16"}
        | {"gradient_checkpointing": True},
    ),
    (
        "--model Llama-3-8B --gpu_memory 24 --lora_r 8 --load_in_4bit --isolate_documents",
        "dp",
        {"gpu_memory": 24, "lora_r": 8, "load_in_4bit": True, "isolate_documents": True},
    ),
    (
        "--model tiny-gpt2 --gpus 2 --host_memory 1",
        "zero1",
        {"gpus": 2, "host_memory": 1, "device": "cpu"},
    ),
    (
        "--model gpt2 --gpu_memory 16 --optim adafactor",
        None,
        {"gpu_memory": 16, "optim": "adafactor"},
    ),
]


@pytest.mark.parametrize(
    "line, strategy, options", SAME, ids=[line.split()[1] for line, *_ in SAME]
)
def test_a_plan_is_that_of_the_command(monkeypatch, line, strategy, options):
    monkeypatch.setattr("sys.argv", ["plan_memory.py", *line.split()])
    _, work, devices = read_workload(flags.read_flags(flags.build_parser("Plan.")))
    expected = text.as_dict(work, predict(work, strategy or "dp"), devices)
    model = line.split()[1]
    for found in (
        plan(model, strategy, **options),
        plan(resolve_settings({"model": model}), strategy, **options),
    ):
        assert isinstance(found, Plan) and (found.model, found.strategy) == (
            model,
            strategy or "dp",
        )
        row = found.as_dict()
        shared = expected.keys() & row.keys()
        assert {"peak_bytes", "total_bytes", "fits", "largest_batch", "optimizer_bytes"} <= shared
        assert {key: row[key] for key in shared} == {key: expected[key] for key in shared}
        assert sum(found.memory.values()) <= found.peak_bytes + found.memory["gradients"]
        assert json.loads(json.dumps(row)) == row and f"fits={found.fits}" in repr(found)
