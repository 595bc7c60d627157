"""The tensors of the model states that are in memory on this rank, for the measured memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from distributed_training.strategies.wrapped import base_optimizer


@dataclass
class LiveStates:
    """Tensors by category; memory.live counts each storage once. None stands for no tensor."""

    parameters: list[torch.Tensor | None]  # the working copies, and bitsandbytes' tables
    gradients: list[torch.Tensor | None]
    masters: list[torch.Tensor]  # fp32 weights that the optimizer updates
    moments: list[torch.Tensor]  # the optimizer's other states
    buffers: list[torch.Tensor | None]  # the model's, and those of communication
    # Where model states are between steps: "device", "host" or "nvme".
    placement: dict[str, str] = field(
        default_factory=lambda: dict.fromkeys(("parameters", "gradients", "optimizer"), "device")
    )
    # Parameters that stay on the device although the others are on NVMe.
    resident: list[torch.Tensor] = field(default_factory=list)


def plain_states(model: nn.Module, optimizer: object) -> LiveStates:
    """Return the states of PyTorch's own modules and optimizers.

    Call it at the end of backward, before the update.
    """
    base = base_optimizer(optimizer)
    masters = [parameter for group in base.param_groups for parameter in group["params"]]
    states = [value for state in base.state.values() for value in state.values()]
    parameters: list[torch.Tensor | None] = [parameter.data for parameter in model.parameters()]
    # bitsandbytes' scales and tables of weights in 4 bits; the scales are quantized too. FSDP's
    # shards have none, but their layers do.
    for holder in (*model.parameters(), *model.modules()):
        state = getattr(holder, "quant_state", None)
        while state is not None:
            parameters += [v for v in vars(state).values() if isinstance(v, torch.Tensor)]
            state = state.state2
    return LiveStates(
        parameters=parameters,
        gradients=[parameter.grad for parameter in (*model.parameters(), *masters)],
        masters=masters,
        moments=[state for state in states if isinstance(state, torch.Tensor)],
        buffers=[*model.buffers()],
    )
