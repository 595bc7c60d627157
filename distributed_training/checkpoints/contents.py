"""What a checkpoint contains besides the counters: model, optimizer states, position in a stream.

saving.py and loading.py have the format of the tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import load_file

from distributed_training.checkpoints import format as files
from distributed_training.data.opening import Datasets
from distributed_training.errors import redact_value
from distributed_training.files.json_types import JsonObject
from distributed_training.files.safetensors_writer import save_file
from distributed_training.model.spec import ModelSpec
from distributed_training.model.weights import persistent_buffers
from distributed_training.strategies import gradients
from distributed_training.strategies.objects import TrainingObjects

if TYPE_CHECKING:
    from distributed_training.strategies.optimizer_shards import ShardedState

GROUP_KEYS = ("lr", "betas", "eps", "weight_decay")  # saved of each parameter group, if it has them


class WholeParts(NamedTuple):
    """What rank 0 writes besides the pieces, in memory: files by name, and tensors by file."""

    description: dict[str, bytes]
    tensors: dict[str, dict[str, torch.Tensor]]

    def write(self, folder: Path) -> None:
        """Write all files."""
        for name, content in self.description.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        for name, tensors in self.tensors.items():
            save_file(tensors, folder / name)


class Contents(NamedTuple):
    """The objects of a run that are saved in its checkpoints and loaded from them."""

    objects: TrainingObjects
    spec: ModelSpec
    datasets: Datasets  # of --streaming the position is saved
    sharded: ShardedState | None  # of this rank; None with --eval_only

    @property
    def shards(self) -> ShardedState:
        """The weights and optimizer states of this rank; --eval_only loads and saves none."""
        assert self.sharded is not None
        return self.sharded

    def manifest(self, counters: JsonObject, identity: JsonObject) -> JsonObject:
        """Return the manifest without the entries about files and pieces.

        Args:
            counters: see `TrainState.counters`.
            identity: the run signature.
        """
        objects, shards = self.objects, self.shards
        return {
            "counters": counters,
            "scaling": gradients.scaler_state(objects.scaler, objects.optimizer),
            "identity": redact_value(identity),
            "lr_scheduler": {},  # --lr_scheduler depends on the step only
            "stream": None if self.datasets.stream is None else self.datasets.stream.progress(),
            "groups": [
                {key: group[key] for key in GROUP_KEYS if key in group}
                for group in shards.base.param_groups
            ],
            "optimizer": shards.optimizer.family,
            "adam_step": shards.adam_step,
            "shapes": {name: list(shape) for name, shape in shards.shapes.items()},
        }

    @property
    def kind(self) -> str | None:
        """The kind of the rows; of a stream it is known when rows were read."""
        return self.datasets.kind

    def describe(self, folder: Path) -> dict[str, bytes]:
        """Write configuration and tokenizer to the folder `model` in `folder`; return the files."""
        from distributed_training.model.description import write_description  # not at the start

        write_description(self.spec, folder / "model", self.kind)
        paths = (path for path in (folder / "model").rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}

    def whole_parts(self, description: dict[str, bytes]) -> WholeParts:
        """Return a copy of what has no pieces: buffers, states of whole parameters.

        Args:
            description: what `describe` returned.
        """
        buffers = {} if self.spec.lora else persistent_buffers(self.objects.module)
        found = {files.BUFFERS: buffers, files.WHOLE_STATES: self.shards.whole_states()}
        tensors = {
            name: {key: t.detach().cpu().clone() for key, t in of_file.items()}
            for name, of_file in found.items()
            if of_file
        }
        return WholeParts(description, tensors)

    def load_weights(self, path: Path, manifest: JsonObject) -> None:
        """Load weights, optimizer states and buffers, after a check of all shapes."""
        from distributed_training.checkpoints.loading import check_shapes, read_shards

        check_shapes(path, manifest, self.shards)
        if files.WHOLE_STATES in manifest["files"]:
            self.shards.set_whole_states(load_file(path / files.WHOLE_STATES))
        read_shards(path, manifest, self.shards)
        saved = load_file(path / files.BUFFERS) if files.BUFFERS in manifest["files"] else {}
        for name, buffer in self.objects.module.named_buffers():
            if name in saved:
                buffer.copy_(saved[name])

    def load_progress(self, manifest: JsonObject) -> None:
        """Load the position in the stream and the loss scale."""
        stream = self.datasets.stream
        # An imported checkpoint has no position.
        if stream is not None and (manifest["stream"] or manifest["counters"]["samples"]):
            stream.resume(manifest["stream"])
        gradients.load_scaler_state(
            manifest["scaling"], self.objects.scaler, self.objects.optimizer
        )
