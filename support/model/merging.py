"""--merge_lora: write the whole model with the trained adapters added to its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from support.errors import FirstError
from support.files.safetensors_writer import WeightFiles
from support.model.lora import base_name, merged
from support.model.weights import persistent_buffers

if TYPE_CHECKING:
    from support.checkpoints.manager import CheckpointManager


def write_merged(
    trained: CheckpointManager, folder: Path | None, dtype: torch.dtype, errors: FirstError
) -> None:
    """Write the whole model with the adapters added, on the rank that has a `folder`."""
    adapters = {
        name: weight.clone() if folder else None for name, weight in trained.state.whole_weights()
    }

    def write(folder: Path) -> None:
        # The frozen weights are read again from their files: memory-mapped, not copied.
        model = trained.spec.load(trained.ctx, dtype="auto")
        frozen = {n: p.shape for n, p in model.named_parameters() if n not in adapters}
        shapes = {base_name(name): shape for name, shape in frozen.items()}
        files = WeightFiles(folder, shapes, dtype, persistent_buffers(model))
        for name, weight in merged(model, adapters):
            files.write(name, weight)
        files.finish()

    if folder:
        errors.attempt(write, folder)
