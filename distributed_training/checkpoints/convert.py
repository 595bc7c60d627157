"""Convert checkpoints of this project to other formats.

    hf          the weights, for `AutoModelForCausalLM.from_pretrained`
    torch       model.pt and optimizer.pt, for `torch.load(..., weights_only=True)`
    checkpoint  the other direction; `foreign` opens checkpoints of other programs for it

`convert_checkpoint` writes all three.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from distributed_training import arguments
from distributed_training.checkpoints import foreign
from distributed_training.checkpoints.format import BUFFERS, kinds_of, write_manifest
from distributed_training.checkpoints.loading import PieceReader
from distributed_training.checkpoints.saving import PieceWriter
from distributed_training.checkpoints.verify import open_checkpoint
from distributed_training.errors import UserError, explained
from distributed_training.files.atomic import finish_folder, start_folder
from distributed_training.files.safetensors_writer import WeightFiles
from distributed_training.files.user_files import shown
from distributed_training.model.card import model_card
from distributed_training.model.lora import peft_name
from distributed_training.optimizers.optimizer import MOMENTS
from distributed_training.ranks.context import DTYPES
from distributed_training.train_state import NEW_RUN

FORMATS = ("hf", "torch", "checkpoint")


class OwnCheckpoint:
    """A checkpoint of this project whose tensors are read whole, after a check of all files.

    Attributes:
        kinds: "weight", and after the first update also the moments of the optimizer.
        adam_step: number of updates that the optimizer has counted; 0 without moments.
    """

    def __init__(self, folder: Path):
        self.folder, self.manifest = open_checkpoint(folder)
        self.shapes = {name: tuple(shape) for name, shape in self.manifest["shapes"].items()}
        kinds = {kind: None for piece in self.manifest["pieces"] for kind in kinds_of(piece)}
        # Adafactor counts its updates as well, but has no moments that another program could use.
        self.adam_step = self.manifest["adam_step"] if kinds.keys() - {"weight"} else 0
        self.kinds = ("weight", *(kind for kind in kinds if kind != "weight"))
        self._reader = PieceReader(self.folder, self.manifest)

    def read(self, name: str, kind: str) -> torch.Tensor:
        """Read one of `kinds` of a whole parameter, in fp32; see `has`."""
        flat = torch.empty(math.prod(self.shapes[name]))
        self._reader.read_into(flat, name, kind, 0)
        self._reader.close()
        return flat.view(self.shapes[name])

    def has(self, name: str, kind: str) -> bool:
        """Return whether a parameter has tensors of a kind: under Muon some have other moments."""
        pieces = (piece for piece in self.manifest["pieces"] if piece["name"] == name)
        return all(kind in kinds_of(piece) for piece in pieces)


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    to: str,
    dtype: str = "fp32",
    max_shard_size: str = "1GB",
    trust_checkpoint: bool = False,
) -> Path:
    """Convert a checkpoint to another format, without a network and a GPU.

    Args:
        source: the folder of a checkpoint; or of a run, whose newest checkpoint is converted; or,
            to "checkpoint", that of a checkpoint of Hugging Face's Trainer, DeepSpeed or FSDP.
        target: the new folder.
        to: "hf": the model for `from_pretrained`, or adapters for peft; "torch": model.pt,
            {name: weight}, and optimizer.pt, {"step": int, "exp_avg": {name: tensor},
            "exp_avg_sq": {name: tensor}}, in fp32, after Muon also "momentum_buffer"; "checkpoint":
            for --resume.
        dtype: of the weights of "hf": "fp32", "bf16" or "fp16".
        max_shard_size: largest size of a file of the weights of "hf", such as "500MB".
        trust_checkpoint: load a checkpoint of DeepSpeed or FSDP, although that executes the code
            in its pickles.
    Returns:
        The new folder.
    Raises:
        UserError: the source is missing, damaged or not supported, the target exists, or an
            argument is unknown. Nothing remains of the target.
    """
    for name, value, known in (("to", to, FORMATS), ("dtype", dtype, DTYPES)):
        if not isinstance(value, str) or value not in known:
            raise UserError(f"{name}={shown(repr(value))} is not one of {', '.join(known)}.")
    source = Path(arguments.path("source", source))
    target = Path(arguments.path("target", target))
    if not source.is_dir():
        raise UserError(f"{source}: no such folder.")

    def write(folder: Path) -> None:
        if to == "checkpoint":
            with foreign.open_foreign(source, trust_checkpoint, folder.parent) as opened:
                write_checkpoint(opened, folder)
        elif to == "hf":
            write_hf(OwnCheckpoint(source), folder, DTYPES[dtype], max_shard_size)
        else:
            write_torch(OwnCheckpoint(source), folder)

    with explained():  # a full disk, for example
        return write_folder(target, write)


def write_folder(target: Path, write: Callable[[Path], None]) -> Path:
    """Write a new folder with `write`, and return it; after an error nothing remains."""
    if os.path.lexists(target):
        raise UserError(f"{target} exists: name a new folder.")
    target = target.absolute()
    temporary = start_folder(target)
    try:
        write(temporary.path / "new")
        return finish_folder(temporary, target, replace=False)
    finally:
        temporary.remove()


def write_hf(source: OwnCheckpoint, folder: Path, dtype: torch.dtype, file_bytes: str) -> None:
    """Write a folder for `from_pretrained`, or for LoRA adapters a folder for peft.

    Args:
        file_bytes: largest size of one file of weights, such as "1GB"; one is in memory at a time.
    """
    described = [name for name in source.manifest["files"] if name.startswith("model/")]
    if not described:
        raise UserError(
            f"{source.folder} was imported, so it has no model/ folder with the configuration and "
            "the tokenizer: resume it, save a checkpoint, and convert that one."
        )
    buffers = load_file(source.folder / BUFFERS) if BUFFERS in described else {}
    for name in set(described) - {BUFFERS}:
        copy = folder / name.removeprefix("model/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, copy)
    rename: Callable[[str], str] = str
    stem = "model"
    if "model/adapter_config.json" in described:
        rename, stem = peft_name, "adapter_model"
    else:
        config = json.loads((folder / "config.json").read_text())
        config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shapes = {rename(name): list(shape) for name, shape in source.shapes.items()}
    try:
        files = WeightFiles(folder, shapes, dtype, buffers, file_bytes, stem)
    except ValueError as error:
        raise UserError(f"--max_shard_size {file_bytes}: write it as 5GB or 500MB.") from error
    for name in source.shapes:
        files.write(rename(name), source.read(name, "weight"))
    files.finish()
    counters, identity = source.manifest["counters"], source.manifest["identity"]
    facts = {
        "train_loss_first": counters["first_loss"],
        "train_loss_last": counters["last_loss"],
        "steps": counters["step"],
        "parameters": identity["hard"].get("parameters", 0),
        "model": identity["soft"].get("model", "?"),
        "strategy": identity["told"].get("strategy", "?"),
        "world_size": identity["told"].get("ranks", "?"),
    }
    (folder / "README.md").write_text(model_card(facts, identity))


def write_torch(source: OwnCheckpoint, folder: Path) -> None:
    """Write the weights to model.pt and, after the first update, Adam's states to optimizer.pt.

    model.pt contains {name: weight}. optimizer.pt contains {"step": number of updates, "exp_avg":
    {name: tensor}, "exp_avg_sq": {name: tensor}}; after a run with Muon its matrices are in
    "momentum_buffer". All tensors are in fp32.
    """
    torch.save({n: source.read(n, "weight") for n in source.shapes}, folder / "model.pt")
    moments = {
        kind: {n: source.read(n, kind) for n in source.shapes if source.has(n, kind)}
        for kind in source.kinds[1:]
    }
    if moments:
        torch.save({"step": source.adam_step, **moments}, folder / "optimizer.pt")


def write_checkpoint(source, folder: Path) -> None:
    """Write a checkpoint of this project from a foreign.ForeignCheckpoint."""
    writer = PieceWriter(folder)
    for name, weight in source.weights.items():
        state = source.states.get(name, {})  # a weight that was not trained has none
        tensors = {"weight": weight, **{kind: state[kind] for kind in MOMENTS if state}}
        writer.add(name, 0, {kind: tensor.flatten() for kind, tensor in tensors.items()})
    writer.flush()
    manifest = {
        "counters": {**NEW_RUN, "step": source.step},
        "adam_step": source.adam_step,
        "identity": {},
        "shapes": {name: list(weight.shape) for name, weight in source.weights.items()},
        "pieces": writer.pieces,
        "files": writer.files,
    }
    write_manifest(folder, manifest)


def inspect(source: OwnCheckpoint) -> str:
    """Describe a checkpoint in lines for the terminal; opening it has verified every file."""
    counters, told = source.manifest["counters"], source.manifest["identity"]["told"]
    files = source.manifest["files"].values()
    strategy, ranks, precision = (told.get(key, "?") for key in ("strategy", "ranks", "precision"))
    shapes = [f"  {name}  {'×'.join(map(str, shape))}" for name, shape in source.shapes.items()]
    return f"""{source.folder}
  step {counters["step"]:,}, {counters["samples"]:,} samples, last loss {counters["last_loss"]}
  saved under {strategy} on {ranks} ranks, {precision}
  {sum(map(math.prod, source.shapes.values())):,} parameters; of each {", ".join(source.kinds)} \
in fp32; Adam's step {source.adam_step}
  {len(files)} files, {sum(f["bytes"] for f in files):,} bytes; every SHA-256 matches

""" + "\n".join(shapes)
