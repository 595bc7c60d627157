"""Set up DeepSpeed: its configuration for the model and machine, and its messages."""

import contextlib
import copy
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support import console
from support.cli.arguments import Arguments, configured_strategy
from support.cluster.context import DistContext


def configure(args: Arguments, ctx: DistContext, spec, folder: Path) -> Arguments:
    """Return the arguments with DeepSpeed's complete configuration, and initialize DeepSpeed.

    Every rank calls this function. The configuration is also written to ds_config.json in `folder`,
    which can be used as it is with --ds_config. For infinity it has the path of this job's folder.

    Raises:
        UserError: an "auto" cannot be filled in.
        MissingRequirement: the disk of --nvme_path cannot be used, an op cannot be compiled, or too
            little memory may be locked.
    """
    import deepspeed

    from support import patches
    from support.cli.ds_config import write_ds_config
    from support.strategies import ops, requirements

    if not args.verbose:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    strategy, nvme_folder = configured_strategy(args), None

    def make_nvme_folder() -> str:
        # At most 20 bytes a parameter: fp32 master, two moments, gradient and working copy.
        local_ranks = 1 if ctx.simulated else ctx.launch.local_world_size
        needed = 20 * spec.parameters * local_ranks // ctx.world_size
        created = requirements.make_nvme_folder(args.nvme_path, needed)
        return str(created.path)

    def build_ops() -> None:
        if missing := ops.missing_ops(strategy):
            show = not args.quiet or args.verbose
            ops.build(missing, console.write if show else lambda _: None, args.verbose)

    if strategy.uses_nvme:
        nvme_folder = ctx.once_per_node("nvme folder", make_nvme_folder)
        console.print0(f"📁 NVMe files: {nvme_folder} (--nvme_path chooses another disk)")
    ctx.once_per_node("ops", build_ops)
    patches.skip_shared_memory_op()
    patches.import_muon_uncompiled()
    if ctx.device.type == "cuda":
        patches.count_free_gpu_memory()
        patches.wait_once_for_offloaded_gradients()
    patches.load_compiled_ops(ops.needed_ops(strategy), ops.load)
    with quiet(args.verbose):
        # Uses the existing process group.
        deepspeed.init_distributed(dist_backend=ctx.backend)
    args = args.replace(ds_config_dict=_complete(args, ctx, spec, nvme_folder))
    if ctx.is_main:
        write_ds_config(args, folder)
    return args


def _complete(args: Arguments, ctx: DistContext, spec, nvme_folder: str | None) -> dict[str, Any]:
    """Return DeepSpeed's complete configuration."""
    from support.cli.ds_config import ModelSizes, complete_ds_config

    config = copy.deepcopy(args.ds_config_dict or {})
    if ctx.simulated and "fp16" in config:
        # With a larger scale gradients would overflow and their steps would be skipped.
        config["fp16"]["loss_scale"] = 1
    sizes = ModelSizes(
        spec.text_config.hidden_size, spec.parameters, spec.largest_parameter, spec.tied
    )
    config = complete_ds_config(config, ctx.precision, sizes, ctx.world_size, nvme_folder)
    if nvme_folder:
        from support.strategies.requirements import check_locked_memory

        buffers = config["zero_optimization"].get("offload_param", {})
        elements = buffers.get("buffer_count", 5) * buffers.get("buffer_size", 0)
        check_locked_memory(ctx.dtype.itemsize * elements)
    if args.eval_only:
        config.pop("optimizer", None)
    return config


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
def quiet(verbose: bool):
    """Hide what libraries print during set-up. Exceptions still reach the caller."""
    if verbose:
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
