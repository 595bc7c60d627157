"""--load_in_4bit: linear layers of bitsandbytes, whose frozen weights are in 4 bits (QLoRA).

The four bits are NF4, and the scales of their blocks are quantized as well (Dettmers et al., arXiv
2305.14314). Only runs with the flag import this module.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers import AutoHfQuantizer

from distributed_training import patches

QUANT_TYPE, SCALES_ARE_QUANTIZED = "nf4", True


def quantization(dtype: torch.dtype | str) -> BitsAndBytesConfig:
    """Return what transformers needs to know of the weights; `dtype` is that of computations."""
    patches.keep_4bit_layout()
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=QUANT_TYPE,
        bnb_4bit_use_double_quant=SCALES_ARE_QUANTIZED,
        bnb_4bit_compute_dtype=dtype,
    )


def replace_layers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace the linear layers that transformers quantizes when it loads the model.

    Args:
        model: on the meta device, without adapters.
        dtype: of the computations and of the other frozen weights.
    """
    quantizer = AutoHfQuantizer.from_config(quantization(dtype), pre_quantized=False)
    kept = getattr(model, "_keep_in_fp32_modules", None)
    quantizer.preprocess_model(model=model, device_map=None, keep_in_fp32_modules=kept)
    quantizer.postprocess_model(model)  # peft reads what this writes
    for layer in layers_in_4bit(model).values():
        if layer.bias is not None:
            layer.bias.data = layer.bias.data.to(dtype)  # as if it had been loaded


def layers_in_4bit(model: nn.Module) -> dict[str, Linear4bit]:
    """Return the layers whose weights are in 4 bits, by name."""
    return {name: each for name, each in model.named_modules() if isinstance(each, Linear4bit)}


def give_packed_shapes(model: nn.Module) -> None:
    """Replace the weights in 4 bits by plain parameters with the shape of the packed tensors.

    bitsandbytes then takes scales and shape of a weight from its layer, as with FSDP1
    (`fix_4bit_weight_quant_state_from_module`). The packed tensors are in uint8, and not in the
    dtype of the other weights, as for FSDP1: two values in a tensor of bf16 may look like a NaN,
    and the copies of FSDP2 make all NaNs equal on a GPU (pytorch/pytorch issue 159333).

    Args:
        model: on the meta device, with the layers of `replace_layers`, and maybe with adapters.
    """
    for layer in layers_in_4bit(model).values():
        size = -(-layer.weight.numel() // 2)
        packed = torch.empty(size, 1, dtype=torch.uint8, device="meta")
        layer.weight = nn.Parameter(packed, requires_grad=False)


def quantize_from_rank0(sharded: nn.Module, whole: nn.Module | None, device: torch.device) -> None:
    """Quantize weights of a model on rank 0 one by one, and copy their scales to all ranks.

    Rank 0 does it because only its host memory has the model. Its device quantizes, as under dp,
    because a CPU is slow and may round differently. A device has one whole weight at a time. The
    scales and tables are 3 % of the bytes in 4 bits, and stay whole on each rank.

    Args:
        sharded: the model under FSDP, whose layers get the scales.
        whole: on rank 0 the same model on the CPU, not in 4 bits; its layers get packed weights.
        device: of this rank.
    """
    for name, layer in layers_in_4bit(sharded).items():
        scales: list[Any] = [None]
        if whole is not None:
            source = whole.get_submodule(name)
            packed, scales[0] = quantized(source, device)
            source.weight = nn.Parameter(packed.cpu(), requires_grad=False)
        dist.broadcast_object_list(scales, src=0)
        layer.quant_state = scales[0]
        scales[0].to(device)


def quantized(layer: nn.Module, device: torch.device) -> tuple[torch.Tensor, QuantState]:
    """Return a linear layer's weight in 4 bits, uint8 of shape [bytes, 1], and its scales.

    Args:
        layer: torch.nn.Linear, or Conv1D of transformers, which has a transposed weight.
        device: on which the weight is quantized, and stays; the scales are on the CPU.
    """
    weight = layer.weight.data.to(device)
    if type(layer).__name__ == "Conv1D":
        weight = weight.T
    packed = Params4bit(weight, quant_type=QUANT_TYPE, compress_statistics=SCALES_ARE_QUANTIZED).to(
        device
    )
    packed.quant_state.to("cpu")
    return packed.data, packed.quant_state
