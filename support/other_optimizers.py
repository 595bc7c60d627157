"""The optimizers other than AdamW: SGD, Adafactor, AdamW with 8-bit states."""

import torch

from support.settings.training import TrainingSettings


def create(groups: list[dict], training: TrainingSettings) -> torch.optim.Optimizer:
    """Return the optimizer of --optim, which is not "adamw".

    Args:
        groups: the parameter groups, with the weight decay of each.
    """
    if training.optim == "sgd":
        # The fused kernel does not support FSDP2's sharded tensors.
        is_sharded = any(hasattr(p, "device_mesh") for group in groups for p in group["params"])
        return torch.optim.SGD(groups, lr=training.lr, fused=not is_sharded)
    if training.optim == "adafactor":
        from transformers.optimization import Adafactor

        # As Trainer configures it: --lr is the step size, as with the other optimizers.
        return Adafactor(groups, lr=training.lr, scale_parameter=False, relative_step=False)
    from bitsandbytes.optim import AdamW8bit

    betas = (training.adam_beta1, training.adam_beta2)
    return AdamW8bit(groups, lr=training.lr, betas=betas, eps=training.adam_epsilon)
