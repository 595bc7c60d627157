"""Train with DeepSpeed ZeRO-2 on two ranks, and with plain PyTorch on the whole batch: compare.

    CUDA_VISIBLE_DEVICES= torchrun --nproc_per_node=2 tools/faults/deepspeed_loop.py  # on the CPU

Both start from the same weights and train on the same four batches of 16 samples. Under ZeRO-2 a
step has four micro-batches of two samples on each of two ranks. The norms of the gradients must
agree up to rounding. With DeepSpeed 0.17.6 and 0.18.0 to 0.18.2 they do not: only the gradients of
the last micro-batch reach the update (deepspeedai/DeepSpeed, issue 7718).
"""

import copy
import importlib

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RANKS, MICRO_BATCHES, SAMPLES, STEPS = 2, 4, 2, 4
CONFIG = {
    "train_micro_batch_size_per_gpu": SAMPLES,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
}

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
inputs = torch.randn(STEPS, MICRO_BATCHES, RANKS, SAMPLES, 8)
labels = torch.randint(4, (STEPS, MICRO_BATCHES, RANKS, SAMPLES))
plain = copy.deepcopy(model)
plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
# An op for inference that would be compiled for 30 seconds.
vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
deepspeed.init_distributed("gloo", verbose=False)
rank = dist.get_rank()
engine, _, _, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=CONFIG
)

for step in range(STEPS):
    for micro_batch in range(MICRO_BATCHES):
        x, y = inputs[step, micro_batch, rank], labels[step, micro_batch, rank]
        engine.backward(F.cross_entropy(engine(x), y))  # DeepSpeed divides by MICRO_BATCHES
        engine.step()  # updates the weights after the last micro-batch

    whole_loss = F.cross_entropy(plain(inputs[step].flatten(0, 2)), labels[step].flatten())
    whole_loss.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), torch.inf)
    plain_optimizer.step()
    plain_optimizer.zero_grad()
    if rank == 0:
        zero2_norm = float(engine.get_global_grad_norm())
        print(f"step {step + 1}: gradient norm {norm:.4f} whole batch, {zero2_norm:.4f} ZeRO-2")
dist.destroy_process_group()
