#!/usr/bin/env bash
# release: deepspeed 0.19.8, torch 2.13.0
# finding: In bf16 stage 1 adds the gradients of micro-batches in bf16, as stages 2 and 3 do: 512 equal micro-batches give half of their sum, because it stops growing at 256. With data_types.grad_accum_dtype fp32 the sum is right.
# guess: Stage 1 adds in fp32; only stages 2 and 3 need the key.
# matters: Long accumulation, as on a single GPU, loses small gradients: here half of the update, without a message.
# instead: Set "data_types": {"grad_accum_dtype": "fp32"} if there are more than some dozens of micro-batches.
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
from deepspeed.utils import safe_get_full_fp32_param

MICRO_BATCHES = 512
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
)


def update(stage, **options):
    """The update of a weight by SGD with rate 1, if the mean gradient is 1."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICRO_BATCHES,
        "bf16": {"enabled": True}, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True, **options,
    })
    for _ in range(MICRO_BATCHES):
        engine.backward(engine(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
        engine.step()
    return -safe_get_full_fp32_param(next(engine.module.parameters())).item()


for stage in (1, 2, 3):
    default = update(stage)
    exact = update(stage, data_types={"grad_accum_dtype": "fp32"})
    print(f"RESULT stage {stage}: update {default:g} by default, {exact:g} with fp32, 1 is right")
    assert (default, exact) == (0.5, 1.0), (default, exact)
PROGRAM
RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 "$work/env/bin/python" train.py > output 2>&1 || { cat output; exit 1; }
grep -o "RESULT.*" output | cut -d " " -f 2-
echo "As found: stage 1 adds in bf16 by default."
