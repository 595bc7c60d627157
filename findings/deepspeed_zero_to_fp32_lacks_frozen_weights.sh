#!/usr/bin/env bash
# release: deepspeed 0.19.8, torch 2.13.0
# finding: zero_to_fp32 of a bf16 checkpoint of stage 1 leaves out every frozen weight without an error. From stages 2 and 3 it returns them, but in bf16.
# guess: All weights are there at every stage, in float32.
# matters: The file of a model with frozen layers, or with adapters, that was trained under stage 1 has only its trained part; loading it with strict=False leaves the rest random.
# instead: Take the frozen weights from the model that the run started from, and compare the names before publishing.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile setuptools wheel torch==2.13.0 numpy==2.4.6
"$work/env/bin/pip" install --quiet --no-compile --no-build-isolation deepspeed==0.19.8
cd "$work"
cat > train.py <<'PROGRAM'
import socket

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
)


def converted(stage):
    """The types of the weights that zero_to_fp32 returns for a model with a frozen layer."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model[1].parameters(), config={
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    })
    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
    engine.step()
    engine.save_checkpoint(f"stage{stage}")
    weights = get_fp32_state_dict_from_zero_checkpoint(f"stage{stage}")
    return {name: str(weight.dtype) for name, weight in weights.items()}


TRAINED = {"1.weight": "torch.float32", "1.bias": "torch.float32"}
FROZEN = {"0.weight": "torch.bfloat16", "0.bias": "torch.bfloat16"}
for stage in (1, 2, 3):
    found = converted(stage)
    print(f"RESULT stage {stage}: {found}")
    assert found == (TRAINED if stage == 1 else {**TRAINED, **FROZEN}), found
PROGRAM
RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 "$work/env/bin/python" train.py > output 2>&1 || { cat output; exit 1; }
grep -o "RESULT.*" output | cut -d " " -f 2-
echo "As found: after stage 1 the frozen layer is missing."
