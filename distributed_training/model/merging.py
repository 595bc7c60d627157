"""--merge_lora: write the whole model with the trained adapters added to its weights."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from distributed_training.errors import FirstError
from distributed_training.files.safetensors_writer import WeightFiles
from distributed_training.model.frozen import refuse_changed
from distributed_training.model.lora import base_name, merged
from distributed_training.model.spec import ModelSpec
from distributed_training.model.weights import persistent_buffers
from distributed_training.ranks.context import DistContext
from distributed_training.strategies.optimizer_shards import ShardedState


def load_frozen(spec: ModelSpec, ctx: DistContext) -> nn.Module:
    """Load the model with its frozen weights again: memory-mapped, not copied.

    Raises:
        UserError: their files have changed since the run has loaded them.
    """
    source = spec.weights
    if not source.random:  # those are in a temporary folder of this run
        refuse_changed(source.folder, spec.config, source.frozen["digest"])
    return spec.load(ctx, dtype="auto")


def write_merged(
    load: Callable[[], nn.Module],
    trained: ShardedState,
    folder: Path | None,
    dtype: torch.dtype,
    errors: FirstError,
) -> None:
    """Write the whole model with the adapters added, on the rank that has a `folder`.

    Args:
        load: loads the model with its frozen weights.
        trained: this rank's part of the adapters.
    """
    adapters = {
        name: weight.clone()
        for name, weight in trained.whole_weights()  # every rank takes part
        if folder and weight is not None
    }

    def write(folder: Path) -> None:
        model = load()
        frozen = {n: p.shape for n, p in model.named_parameters() if n not in adapters}
        shapes = {base_name(name): shape for name, shape in frozen.items()}
        files = WeightFiles(folder, shapes, dtype, persistent_buffers(model))
        for name, weight in merged(model, adapters):
            files.write(name, weight)
        files.finish()

    if folder:
        errors.attempt(write, folder)
