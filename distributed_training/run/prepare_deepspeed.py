"""What a run does before DeepSpeed's engine is created."""

from functools import partial
from pathlib import Path

from distributed_training.model.spec import ModelSpec
from distributed_training.ranks.context import DistContext
from distributed_training.settings.settings import Settings
from distributed_training.strategies.deepspeed.options import ModelSizes
from distributed_training.strategies.deepspeed.preparation import (
    build_ops,
    complete,
    hidden_output,
    make_nvme_folder,
    patch_deepspeed,
    warn_of_sums_in_bf16,
    write_config,
)
from distributed_training.strategies.deepspeed.strategy import DeepSpeed


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
        path = settings.parallelism.nvme_path
        make = partial(make_nvme_folder, path, model.parameters, ctx.ranks_per_node, ctx.world_size)
        nvme_folder = ctx.once_per_node("nvme folder", make)
    # C++ code for the optimizer on the CPU and for reads and writes of NVMe; once per machine.
    ctx.once_per_node("ops", partial(build_ops, strategy, quiet, verbose))
    patch_deepspeed(strategy, ctx.device.type)  # loads these ops; avoids waits for a GPU
    with hidden_output(verbose):
        deepspeed.init_distributed(dist_backend=ctx.backend)  # uses the existing process group
    strategy = complete(strategy, model, ctx.precision, ctx.world_size, nvme_folder)
    if ctx.is_main:
        warn_of_sums_in_bf16(strategy, ctx.precision, settings.training.gradient_accumulation_steps)
        write_config(strategy, folder)
    return strategy
