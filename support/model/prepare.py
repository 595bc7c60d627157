"""Prepare a loaded model for training: its blocks, its forward pass, its device."""

import math

import torch
import torch.distributed as dist
from torch import nn

from support import patches
from support.cluster.context import DistContext
from support.gpu_generations import shares_keys
from support.model.loss import computes_loss
from support.model.spec import ModelSpec
from support.settings.model import ModelSettings
from support.strategies.wrapped import full_shape, unwrapped


def configure_transformers(isolates_documents: bool, ctx: DistContext) -> None:
    """Keep transformers from reading tensors on the device, and from storing attention scores."""
    patches.replace_packed_sequence_check(isolates_documents)
    patches.skip_padding_check()
    if not shares_keys(ctx.device.type, ctx.precision, ctx.capability):
        patches.repeat_keys_and_values()


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of `_no_split_modules`, or else those of the largest ModuleList.

    The model may be wrapped or sharded: FSDP2 replaces a module's class by a subclass with another
    name, and ZeRO-3 empties parameters.
    """
    model = unwrapped(model)
    names = set(getattr(model, "_no_split_modules", None) or ())

    def is_block(module: nn.Module) -> bool:
        return any(cls.__name__ in names for cls in type(module).__mro__)

    def size(layers: nn.ModuleList) -> int:
        return sum(math.prod(full_shape(parameter)) for parameter in layers.parameters())

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = [module for module in model.modules() if is_block(module)]
    return blocks or list(max(lists, key=size, default=[]))


def prepare_forward(model: nn.Module, model_settings: ModelSettings, spec: ModelSpec) -> None:
    """Apply --gradient_checkpointing and --compile, then remove random weights from the disk."""
    if model_settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if model_settings.compile:
        layers = transformer_blocks(model)  # identical ones share a graph
        if computes_loss(model):
            layers.append(model.get_output_embeddings())
        for layer in layers:
            layer.compile()
    dist.barrier()  # all ranks have read the weights
    if not model_settings.merge_lora:  # --merge_lora reads the weights again at the end
        spec.weights.remove_drawn()  # the temporary folder of weights that were drawn from --seed


def copy_to_device(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device; on a CPU, copy the weights that are trained from their mapped file.

    Otherwise the first update copies them on several threads, and for each page the kernel
    interrupts the cores of the others (benchmarks/RESULTS.md).
    """
    model.to(device)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_cpu:
            # Writes each page; PyTorch uses one thread for less than 2^15 elements.
            for part in parameter.detach().flatten().split(2**14):
                part.mul_(1)
