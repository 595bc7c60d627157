"""AdamW for every strategy, its parameter groups and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return two parameter groups: weight decay for matrices, no decay for biases and norms."""
    # A parameter that ZeRO-3 has partitioned has an empty shape; its full shape is in ds_shape.
    is_matrix = {
        p: len(getattr(p, "ds_shape", p.shape)) >= 2 for p in model.parameters() if p.requires_grad
    }
    groups = [
        {"params": [p for p in is_matrix if is_matrix[p]], "weight_decay": weight_decay},
        {"params": [p for p in is_matrix if not is_matrix[p]], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]  # LoRA adapters are all matrices


def adamw(model: nn.Module, args) -> torch.optim.AdamW:
    """Return the optimizer of dp and fsdp; the ds_config files configure DeepSpeed's the same."""
    return torch.optim.AdamW(
        parameter_groups(model, args.weight_decay),
        lr=args.lr,
        betas=(0.9, 0.999),
        eps=1e-8,
        fused=True,
    )


def learning_rate(step: int, total_steps: int, args) -> float:
    """Return the learning rate of a step: linear warm-up to --lr, then --lr_scheduler.

    Args:
        step: the optimizer step, counted from 0.
        total_steps: the step at which "linear" and "cosine" reach 0.
        args: --lr, --warmup_steps, --lr_scheduler.
    """
    if step < args.warmup_steps:
        return args.lr * (step + 1) / (args.warmup_steps + 1)
    progress = (step - args.warmup_steps) / max(1, total_steps - args.warmup_steps)
    factors = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }
    return args.lr * factors[args.lr_scheduler]


def set_learning_rate(optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups of PyTorch's or DeepSpeed's optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = lr
