"""--bf16_blocks: dp's transformer blocks compute entirely in bf16, as under the other strategies.

Autocast converts each weight and each input of a linear layer when it is used, and keeps norms and
the residual stream in fp32: a kernel launch for each conversion, and twice the memory traffic
between the linear layers. Here the parameters of a block are converted together, before the block
computes, and everything in it is in bf16. The parameters of the model stay in fp32, with gradients
in fp32: accumulation, DDP's reduction, the optimizer, checkpoints and exports do not change.

FSDP2's `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` does the same when it gathers a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from distributed_training.model_parts import transformer_blocks


def compute_in_bf16(model: nn.Module) -> None:
    """Let the transformer blocks of a model with fp32 parameters compute in bf16.

    This replaces the forward method of each block. Embeddings, the last norm and the output layer
    stay as they are.
    """
    for block in transformer_blocks(model):
        block.forward = Bf16Forward(block)


class ToBf16(torch.autograd.Function):
    """Convert fp32 tensors to bf16, and their gradients back, with one kernel for all of them."""

    @staticmethod
    def forward(ctx, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return copies in bf16."""
        ctx.set_materialize_grads(False)
        return tuple(_converted_together(parameters, torch.bfloat16))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients in fp32; None for parameters that were not used."""
        converted = iter(
            _converted_together([g for g in gradients if g is not None], torch.float32)
        )
        return tuple(None if g is None else next(converted) for g in gradients)


def _converted_together(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


class Bf16Forward:
    """The forward method of a block, with its parameters and inputs in bf16.

    Attributes:
        places: module, name and parameter of each fp32 parameter of the block.
    """

    def __init__(self, block: nn.Module) -> None:
        self.forward: Callable = block.forward
        self.places = [
            (module, name, parameter)
            for module in block.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.dtype == torch.float32
        ]

    def __call__(self, *args: object, **options: object) -> object:
        """Return the block's output, in bf16."""
        device = self.places[0][2].device.type
        args, options = _in_bf16(args), _in_bf16(options)
        copies = ToBf16.apply(*(parameter for _, _, parameter in self.places))
        try:
            for (module, name, _), copy in zip(self.places, copies, strict=True):
                # As in torch.func.functional_call, which would call this method again. A module
                # does not let a parameter be replaced by another tensor as an attribute.
                module._parameters[name] = copy
            with torch.autocast(device, enabled=False):
                return self.forward(*args, **options)
        finally:
            for module, name, parameter in self.places:
                module._parameters[name] = parameter


def _in_bf16(value: Any) -> Any:
    """Return arguments of a block (input, rotary embedding, mask) with bf16 instead of fp32."""
    if isinstance(value, torch.Tensor):
        return value.to(torch.bfloat16) if value.dtype == torch.float32 else value
    if type(value) in (tuple, list):
        return type(value)(map(_in_bf16, value))
    if type(value) is dict:
        return {name: _in_bf16(each) for name, each in value.items()}
    return value
