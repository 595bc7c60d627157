"""The steps before DeepSpeed's engine is created: ops, patches, NVMe folder, configuration."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from distributed_training import console
from distributed_training.strategies.deepspeed import ops, patches, requirements
from distributed_training.strategies.deepspeed.options import (
    ModelSizes,
    complete_ds_config,
    write_ds_config,
)
from distributed_training.strategies.deepspeed.strategy import DeepSpeed

if TYPE_CHECKING:
    from distributed_training.model.spec import ModelSpec
    from distributed_training.ranks.context import DistContext
    from distributed_training.settings.settings import Settings


def prepare_deepspeed(
    strategy: DeepSpeed, settings: Settings, ctx: DistContext, spec: ModelSpec, folder: Path
) -> DeepSpeed:
    """Create the NVMe folder, compile DeepSpeed's ops, and fill in each "auto".

    Every rank calls it.

    Args:
        folder: the output folder, which gets ds_config.json.
    Returns:
        The strategy with DeepSpeed's complete configuration.
    """
    import deepspeed

    quiet, verbose = settings.output.quiet, settings.debug.verbose
    # The buckets of the communication hold a transformer block.
    counts, hidden = spec.counts, spec.text_config.hidden_size
    model = ModelSizes(hidden, counts.total, counts.largest, spec.tied)
    nvme_folder = None
    if strategy.needs_nvme:
        ranks = ctx.ranks_per_node, ctx.world_size  # determine the space that a node needs
        make = partial(make_nvme_folder, settings.parallelism.nvme_path, model.parameters, *ranks)
        nvme_folder = ctx.once_per_node("nvme folder", make)
    # C++ code for the optimizer on the CPU and for reads and writes of NVMe; once per machine.
    ctx.once_per_node("ops", partial(build_ops, strategy, quiet, verbose))
    patch_deepspeed(strategy, ctx.device.type)  # loads these ops; avoids waits for a GPU
    with hidden_output(verbose):
        deepspeed.init_distributed(dist_backend=ctx.backend)  # uses the existing process group
    strategy = complete(strategy, model, ctx.precision, ctx.world_size, nvme_folder)
    if ctx.is_main:
        write_config(strategy, folder)
    return strategy


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
