"""The optimizer of --optim, its parameter groups and its learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from support.cli.arguments import Arguments


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


def create(model: nn.Module, args: Arguments) -> torch.optim.Optimizer:
    """Return the optimizer of dp and fsdp; DeepSpeed's is the same, see `for_deepspeed`."""
    return _create(parameter_groups(model, args.weight_decay), args)


def for_deepspeed(model: nn.Module, args: Arguments) -> dict[str, Any]:
    """Return the arguments of deepspeed.initialize that determine the optimizer.

    DeepSpeed creates AdamW, or the optimizer of the user's file, from its configuration. For the
    others of --optim it calls our function. --eval_only needs no optimizer.
    """
    arguments: dict[str, Any] = {"model_parameters": parameter_groups(model, args.weight_decay)}
    if args.optim != "adamw" and not args.eval_only:
        arguments["optimizer"] = lambda groups: _create(groups, args)
    return arguments


def _create(groups: list[dict], args: Arguments) -> torch.optim.Optimizer:
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if args.optim == "adamw":
        return torch.optim.AdamW(groups, lr=args.lr, **adam, fused=True)
    if args.optim == "sgd":
        # The fused kernel does not support FSDP2's sharded tensors.
        return torch.optim.SGD(groups, lr=args.lr, fused=args.strategy != "fsdp")
    if args.optim == "adafactor":
        from transformers.optimization import Adafactor

        # As Trainer configures it: --lr is the step size, as with the other optimizers.
        return Adafactor(groups, lr=args.lr, scale_parameter=False, relative_step=False)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, lr=args.lr, **adam)


def learning_rate(step: int, total_steps: int, args: Arguments) -> float:
    """Return the learning rate of a step: linear warm-up to --lr, then --lr_scheduler.

    Args:
        step: the optimizer step, counted from 0.
        total_steps: the step at which "linear" and "cosine" reach 0.
    """
    warmup_steps = args.warmup_steps or math.ceil(args.warmup_ratio * total_steps)
    if step < warmup_steps:
        return args.lr * (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
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
