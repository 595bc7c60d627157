"""The optimizers other than AdamW: SGD, Adafactor, Muon, AdamW with 8-bit states."""

import torch
from torch import nn

from distributed_training.settings.training import TrainingSettings
from distributed_training.strategies.muon import DECAY, MuonAndAdamW
from distributed_training.strategies.wrapped import transformer_blocks


def create(
    groups: list[dict], model: nn.Module, training: TrainingSettings
) -> torch.optim.Optimizer:
    """Return the optimizer of --optim, which is not "adamw".

    Args:
        groups: the parameter groups, with the weight decay of each.
        model: the model that has these parameters.
    """
    if training.optim == "sgd":
        # The fused kernel does not support FSDP2's sharded tensors.
        is_sharded = any(hasattr(p, "device_mesh") for group in groups for p in group["params"])
        return torch.optim.SGD(groups, lr=training.lr, fused=not is_sharded)
    if training.optim == "adafactor":
        from transformers.optimization import Adafactor

        # As Trainer configures it: --lr is the step size, as with the other optimizers.
        return Adafactor(groups, lr=training.lr, scale_parameter=False, relative_step=False)
    betas = (training.adam_beta1, training.adam_beta2)
    if training.optim == "muon":
        groups = separate_matrices(groups, transformer_blocks(model))
        return MuonAndAdamW(groups, training.lr, betas, training.adam_epsilon)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, lr=training.lr, betas=betas, eps=training.adam_epsilon)


def separate_matrices(groups: list[dict], blocks: list[nn.Module]) -> list[dict]:
    """Return parameter groups for Muon, the first of which has the matrices that it updates.

    Args:
        groups: the matrices and embeddings, then the other groups.
        blocks: the transformer blocks. Embeddings and the output layer are outside of them.
    """
    in_blocks = {id(p) for block in blocks for p in block.parameters() if p.dim() == 2}
    first, *others = groups
    matrices = [p for p in first["params"] if id(p) in in_blocks]
    rest = [p for p in first["params"] if id(p) not in in_blocks]
    muon, adamw = {**first, "params": matrices, "momentum": DECAY}, {**first, "params": rest}
    return [group for group in (muon, adamw, *others) if group["params"]]
