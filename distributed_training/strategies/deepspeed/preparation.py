"""The steps before DeepSpeed's engine is created: ops, patches, NVMe folder, configuration."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from distributed_training import console
from distributed_training.files.json_types import lookup
from distributed_training.strategies.deepspeed import ops, patches, requirements
from distributed_training.strategies.deepspeed.options import (
    ModelSizes,
    complete_ds_config,
    write_ds_config,
)
from distributed_training.strategies.deepspeed.strategy import DeepSpeed

MANY_MICRO_BATCHES = 64  # of a step, see `warn_of_sums_in_bf16`


def build_ops(strategy: DeepSpeed, quiet: bool, verbose: bool) -> None:
    """Compile the ops that the strategy needs and that are missing; one rank of a node calls it.

    Raises:
        MissingRequirement: an op cannot be compiled.
    """
    if missing := strategy.missing_ops():
        show = not quiet or verbose
        ops.build(missing, console.write if show else lambda _: None, verbose)


def patch_deepspeed(strategy: DeepSpeed, device: str) -> None:
    """Let DeepSpeed load the compiled ops, and change what is wrong or slow for a run.

    Args:
        device: "cuda" or "cpu".
    """
    patches.skip_shared_memory_op()
    patches.import_muon_uncompiled()
    patches.keep_buffers_in_fp32()
    if device == "cuda":
        patches.count_free_gpu_memory()
        patches.wait_once_for_offloaded_gradients()
    patches.load_compiled_ops(strategy.needed_ops(), ops.load)


def make_nvme_folder(path: str | None, parameters: int, ranks: int, world_size: int) -> str:
    """Create a folder for the files of the ranks of this node; one rank of a node calls it.

    Args:
        path: --nvme_path.
        parameters: of the model.
        ranks: number of ranks of this node.
    Raises:
        MissingRequirement: the disk cannot be used, or has too little free space.
    """
    # At most 20 bytes a parameter: fp32 master, two moments, gradient and working copy.
    needed = 20 * parameters * ranks // world_size
    folder = requirements.make_nvme_folder(path, needed).path
    console.print0(f"📁 NVMe files: {folder} (--nvme_path chooses another disk)")
    return str(folder)


def complete(
    strategy: DeepSpeed, model: ModelSizes, precision: str, world_size: int, nvme_folder: str | None
) -> DeepSpeed:
    """Return the strategy with DeepSpeed's complete configuration.

    Raises:
        UserError: an "auto" cannot be filled in.
        MissingRequirement: too little memory may be locked for NVMe.
    """
    config = copy.deepcopy(strategy.config or {})
    config = complete_ds_config(config, precision, model, world_size, nvme_folder)
    if nvme_folder:
        buffers = config["zero_optimization"].get("offload_param", {})
        elements = buffers.get("buffer_count", 5) * buffers.get("buffer_size", 0)
        requirements.check_locked_memory((4 if precision == "fp32" else 2) * elements)
    return replace(strategy, config=config)


def warn_of_sums_in_bf16(strategy: DeepSpeed, precision: str, accumulation: int) -> None:
    """Say that DeepSpeed adds the gradients of many micro-batches in bf16.

    Its 8 bits round a sum that is large next to a summand. In a run of docs/HOW_IT_WORKS.md the
    norm is 0.04 % too small with 64 micro-batches, and 5 % with 512.

    Args:
        accumulation: micro-batches of a step.
    """
    chosen = lookup(strategy.config, "data_types.grad_accum_dtype")
    if precision == "bf16" and chosen is None and accumulation >= MANY_MICRO_BATCHES:
        console.warn(
            f"DeepSpeed adds the gradients of {accumulation} micro-batches in bf16, so that small "
            "parts are lost. --strategy dp and fsdp add them in fp32; a larger --batch_size needs "
            "fewer micro-batches."
        )


def write_config(strategy: DeepSpeed, folder: Path) -> None:
    """Write the complete configuration to ds_config.json, which --ds_config accepts."""
    write_ds_config(strategy.config or {}, strategy.nvme_path, folder)


class OneByOne(nn.Module):
    """Module that yields a model's parameters to DeepSpeed one at a time, each then copied."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.whole, self.dtype = model, dtype

    def parameters(self, recurse: bool = True):
        for parameter in self.whole.parameters(recurse):
            parameter.data = parameter.data.to(self.dtype, copy=True)
            yield parameter


@contextlib.contextmanager
def hidden_output(verbose: bool):
    """Hide what libraries print during set-up. Exceptions still reach the caller."""
    if verbose:
        yield
        return
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
