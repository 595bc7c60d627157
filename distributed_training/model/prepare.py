"""Prepare a loaded model for training: its forward pass, its device."""

import torch
import torch.distributed as dist
from torch import nn

from distributed_training import patches
from distributed_training.hardware import shares_keys
from distributed_training.model.loss import computes_loss
from distributed_training.model.spec import ModelSpec
from distributed_training.model_parts import transformer_blocks
from distributed_training.ranks.context import DistContext
from distributed_training.settings.model import ModelSettings


def configure_transformers(isolates_documents: bool, ctx: DistContext) -> None:
    """Keep transformers from reading tensors on the device, and from storing attention scores."""
    patches.replace_packed_sequence_check(isolates_documents)
    patches.skip_padding_check()
    if not shares_keys(ctx.device.type, ctx.precision, ctx.capability):
        patches.repeat_keys_and_values()


def prepare_forward(model: nn.Module, model_settings: ModelSettings, spec: ModelSpec) -> None:
    """Apply --gradient_checkpointing and --compile, then remove random weights from the disk."""
    if model_settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if model_settings.compile:
        layers = transformer_blocks(model)  # identical ones share a graph
        if computes_loss(model):
            layers.append(model.get_output_embeddings())
        for layer in layers:
            # Not layer.compile(): the hooks that gather its parameters would split its graph.
            layer.forward = torch.compile(layer.forward, dynamic=False)
    dist.barrier()  # all ranks have read the weights
    if not model_settings.merge_lora:  # --merge_lora reads the weights again at the end
        spec.weights.remove_drawn()  # the temporary folder of weights that were drawn from --seed


def copy_to_device(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device; on a CPU, copy the weights that are trained from their mapped file.

    Otherwise the first update copies them on several threads, and for each page the kernel
    interrupts the cores of the others (tools/benchmarks/RESULTS.md).
    """
    model.to(device)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_cpu:
            # Writes each page; PyTorch uses one thread for less than 2^15 elements.
            for part in parameter.detach().flatten().split(2**14):
                part.mul_(1)
