"""Convert checkpoints from and to other formats, one tensor at a time.

    hf                    the weights, for `AutoModelForCausalLM.from_pretrained`
    torch                 model.pt and optimizer.pt, for `torch.load(..., weights_only=True)`
    deepspeed-universal   a DeepSpeed universal checkpoint, which DeepSpeed loads if its JSON
                          configuration has `"checkpoint": {"load_universal": true}`
    checkpoint            a checkpoint of this project, for --resume, made from a DeepSpeed
                          universal checkpoint or another one that `foreign` opens

Only data is read: safetensors, JSON, and PyTorch's files with `weights_only=True`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

from support.checkpoints.format import BUFFERS, open_checkpoint, open_listed, write_manifest
from support.checkpoints.recognize import folder_named_in
from support.checkpoints.tensors import PieceReader, PieceWriter
from support.errors import UserError, first_line
from support.files.atomic import finish_folder, read_json, start_folder, write_text
from support.files.safetensors_writer import WeightFiles, write_at
from support.files.user_files import shown
from support.model.card import model_card
from support.model.lora import peft_name
from support.strategies.optimizer_shards import MOMENTS
from support.train_state import NEW_RUN


class WholeCheckpoint:
    """A checkpoint whose tensors are read whole, not as shards: of this project or another program.

    A subclass raises a UserError if the folder is no such checkpoint, or if a file is damaged.
    """

    folder: Path
    shapes: dict[str, tuple[int, ...]]  # of each parameter
    adam_step: int  # number of updates that Adam has made; 0 if there are no moments
    kinds: tuple[str, ...]  # of tensors: "weight", and after the first update also the moments
    # Of the manifest. The position in the data is unknown to another program: `samples` is 0.
    counters: dict = NEW_RUN
    settings: dict  # {flag: value} of the flags whose values are known

    def read(self, name: str, kind: str) -> torch.Tensor | None:
        """Read the whole "weight", "exp_avg" or "exp_avg_sq" of a parameter, in fp32.

        None for moments that do not exist.
        """
        raise NotImplementedError


class OwnCheckpoint(WholeCheckpoint):
    """A checkpoint of this project; see `format.open_checkpoint` for the folder."""

    def __init__(self, folder: Path):
        self.folder, self.manifest = open_checkpoint(folder)
        self.shapes = {name: tuple(shape) for name, shape in self.manifest["shapes"].items()}
        moments = MOMENTS if any(piece["moments"] for piece in self.manifest["pieces"]) else ()
        # Adafactor counts its updates, too, and has no moments that another program could use.
        self.adam_step = self.manifest["adam_step"] if moments else 0
        self.kinds = ("weight", *moments)
        self._reader = PieceReader(self.folder, self.manifest)

    def read(self, name: str, kind: str) -> torch.Tensor:
        flat = torch.empty(math.prod(self.shapes[name]))
        self._reader.read_into(flat, name, kind, 0)
        self._reader.close()  # the pages that were read stay mapped until the file is closed
        return flat.view(self.shapes[name])


class UniversalCheckpoint(WholeCheckpoint):
    """A DeepSpeed universal checkpoint, as `ds_to_universal.py` writes it.

    Args:
        folder: the folder that contains `zero/`, or its parent with `latest_universal`.
    """

    FILES: ClassVar = {"weight": "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}

    def __init__(self, folder: Path):
        if (latest := folder / "latest_universal").is_file():
            name, is_folder = folder_named_in(latest)
            if not is_folder:
                raise UserError(f"{latest} does not name a folder next to it: {shown(name)}.")
            folder = folder / name
        self.folder = folder
        names = sorted(
            path.parent.relative_to(folder / "zero").as_posix()
            for path in folder.glob("zero/**/fp32.pt")
        )
        if not names:
            raise UserError(
                f"{folder} is not a DeepSpeed universal checkpoint: it has no zero/*/fp32.pt. "
                "DeepSpeed's ds_to_universal.py converts its other checkpoints."
            )
        # A tied weight may be stored twice, the second time under its other name without moments.
        trained = [name for name in names if (folder / "zero" / name / "exp_avg.pt").is_file()]
        self.shapes = {name: tuple(self._load(name, "weight").shape) for name in trained or names}
        self.adam_step = self._step(trained[0]) if trained else 0
        self.kinds = ("weight", *(MOMENTS if trained else ()))
        self.settings = {}

    def _load(self, name: str, kind: str) -> torch.Tensor:
        path = self.folder / "zero" / name / self.FILES[kind]
        tensor = load_tensors(path)
        tensor = tensor.get("param") if isinstance(tensor, dict) else tensor
        if not isinstance(tensor, torch.Tensor):
            raise UserError(
                f"{path} contains no tensor, so this is not a DeepSpeed universal checkpoint."
            )
        return tensor

    def _step(self, name: str) -> int:
        """Read Adam's step: stages 1 and 2 store it per parameter, stage 3 with the optimizer."""
        path = self.folder / "zero" / name / "step.pt"
        try:
            if path.is_file():
                return int(load_tensors(path))
            path = self.folder / "zero" / "optimizer_state.pt"
            return int(load_tensors(path)["optimizer_state_dict"]["state"][0]["step"])
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{path} is damaged: it does not contain Adam's step.") from error

    def read(self, name: str, kind: str) -> torch.Tensor:
        return self._load(name, kind).float()


class Ignored:
    """Placeholder for the Python objects in DeepSpeed's files, so that none of their code runs."""

    def __init__(self, *_):
        pass

    def __setstate__(self, _):
        pass


IGNORED_OBJECTS = [
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "builtins.getattr",  # some versions of Python pickle an enum member as a getattr call
]


def load_tensors(path: Path):
    """Load a file of PyTorch with `weights_only=True`, so that nothing in it is executed.

    Tensors are mapped from the file and read on use.

    Raises:
        UserError: the file is missing or damaged, or contains Python objects other than
            IGNORED_OBJECTS.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing, or no regular file.")
    try:
        with torch.serialization.safe_globals([(Ignored, name) for name in IGNORED_OBJECTS]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch's readers raise many types for a damaged file
        if "weights_only" in str(error):
            reason = "it contains Python objects, and code in a file is not executed"
        else:
            reason = shown(first_line(error), 200)
        raise UserError(f"{path} cannot be read: {reason}.") from error


# ---------------------------------------------------------------------------------------- exporting


def convert(
    source: WholeCheckpoint, to: str, target: Path, dtype: torch.dtype, file_bytes: str
) -> Path:
    """Convert a checkpoint to another format, in a new folder.

    Args:
        source: an OwnCheckpoint; for "checkpoint" another WholeCheckpoint.
        to: "hf", "torch", "deepspeed-universal" or "checkpoint".
        dtype: of the weights, for "hf".
        file_bytes: largest size of one weight file, such as "5GB", for "hf".
    Returns:
        The new folder: `target`, or a numbered name if another process created `target` meanwhile.
    Raises:
        UserError: the target exists, or the source cannot be converted to this format.
        TrainingError: a file of the source cannot be read.
        ValueError: the names or shapes of the source do not make a valid manifest.
        OSError: the disk is full, or not writable.
    """
    if os.path.lexists(target):
        raise UserError(f"{target} exists: name a new folder.")
    target = target.absolute()
    temporary = start_folder(target)
    try:
        new = temporary.path / "new"
        writers: dict[str, Callable] = {
            "hf": partial(write_hf, dtype=dtype, file_bytes=file_bytes),
            "torch": write_torch,
            "deepspeed-universal": write_universal,
            "checkpoint": write_checkpoint,
        }
        writers[to](source, new)
        return finish_folder(temporary, target, replace=False)
    finally:
        temporary.remove()


# Files in a checkpoint's model/ folder other than weights: configuration, tokenizer and chat
# templates. None of them is executed.
DESCRIPTION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".bpe", ".vocab")
# Keys of a configuration that make from_pretrained download or import code.
CODE_KEYS = ("auto_map", "auto_mapping", "custom_pipelines")


def copy_description(source: OwnCheckpoint, folder: Path) -> list[str]:
    """Copy the configuration and the tokenizer of a checkpoint, without references to code.

    Only files that the manifest lists and whose suffix is one of data are copied.

    Returns:
        The names of listed files in model/ that were not copied.
    """
    left_out = []
    for name in source.manifest["files"]:
        inner = name.removeprefix("model/")
        if inner == name or name == BUFFERS:
            continue
        if not inner.endswith(DESCRIPTION_SUFFIXES) or inner.endswith(".index.json"):
            left_out.append(name)
            continue
        with open_listed(source.folder, name) as file:
            content = file.read()
        (folder / inner).parent.mkdir(parents=True, exist_ok=True)
        (folder / inner).write_bytes(_without_code(content) if inner.endswith(".json") else content)
    return left_out


def _without_code(content: bytes) -> bytes:
    """Remove CODE_KEYS from the content of a JSON file; leave any other content unchanged."""
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if not isinstance(config, dict) or not config.keys() & set(CODE_KEYS):
        return content
    data = {key: value for key, value in config.items() if key not in CODE_KEYS}
    return json.dumps(data, indent=2).encode() + b"\n"


def write_hf(source: OwnCheckpoint, folder: Path, dtype: torch.dtype, file_bytes: str) -> None:
    """Write a folder for `from_pretrained`; for LoRA adapters, a folder for peft.

    Raises:
        UserError: the checkpoint has no configuration, two of its tensors would get the same name,
            or `file_bytes` is no size.
    """
    listed = source.manifest["files"]
    adapters = "model/adapter_config.json" in listed
    if not adapters and "model/config.json" not in listed:
        raise UserError(
            f"{source.folder} was imported, so it has no model/ folder with the configuration and "
            "the tokenizer: resume it, save a checkpoint, and convert that one."
        )
    for name in copy_description(source, folder):
        print(f"ℹ️  Not copied: {shown(name)} is neither a configuration nor data of a tokenizer.")
    if not adapters:
        _note_dtype(folder / "config.json", dtype)
    rename, stem = (peft_name, "adapter_model") if adapters else (str, "model")
    buffers = load_file(source.folder / BUFFERS) if BUFFERS in listed else {}
    shapes: dict[str, Sequence[int]] = {
        rename(name): shape for name, shape in source.shapes.items()
    }
    if len(shapes) < len(source.shapes) or shapes.keys() & buffers.keys():
        raise UserError(f"{source.folder}: two of its tensors have the same name.")
    try:
        files = WeightFiles(folder, shapes, dtype, buffers, file_bytes, stem)
    except ValueError as error:
        raise UserError(f"--max_shard_size {file_bytes}: write it as 5GB or 500MB.") from error
    for name in source.shapes:
        files.write(rename(name), source.read(name, "weight"))
    files.finish()
    write_text(folder / "README.md", _model_card_of(source))


def _model_card_of(source: OwnCheckpoint) -> str:
    counters, identity = source.manifest["counters"], source.manifest["identity"]
    parameters = identity["hard"].get("parameters")
    if type(parameters) is not int:
        parameters = sum(map(math.prod, source.shapes.values()))
    facts = {
        "model": shown(identity["soft"].get("model", "unknown")),
        "steps": counters["step"],
        "parameters": parameters,
        "strategy": identity["told"].get("strategy"),
        "world_size": identity["told"].get("ranks"),
        "train_loss_first": counters["first_loss"],
        "train_loss_last": counters["last_loss"],
    }
    return model_card(facts, identity)


def _note_dtype(path: Path, dtype: torch.dtype) -> None:
    """Write the weights' dtype into a config.json."""
    try:
        config = read_json(path)
        config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    except (ValueError, TypeError) as error:
        raise UserError(
            f"The checkpoint's model/config.json is not a configuration ({shown(error)})."
        ) from error
    write_text(path, json.dumps(config, indent=2) + "\n")


def write_torch(source: WholeCheckpoint, folder: Path) -> None:
    """Write the weights to model.pt and, after the first update, Adam's states to optimizer.pt.

    model.pt contains {name: weight}. optimizer.pt contains {"step": number of updates, "exp_avg":
    {name: tensor}, "exp_avg_sq": {name: tensor}}. All tensors are in fp32.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        raise UserError(f"--to torch needs torch 2.7 or newer; this is {torch.__version__}.")

    for path, kinds in ((folder / "model.pt", ("weight",)), (folder / "optimizer.pt", MOMENTS)):
        if kinds[0] not in source.kinds:
            continue
        with FakeTensorMode():  # tensors without memory
            tensors = {
                kind: {name: torch.empty(shape) for name, shape in source.shapes.items()}
                for kind in kinds
            }
        contents = tensors.get("weight") or {"step": source.adam_step, **tensors}
        # torch writes the file without the bytes of the tensors and returns their offsets. Then
        # only one tensor is in memory at a time.
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(contents, path)
        with FakeTensorMode():
            placed = torch.load(path)
        with open(path, "rb+") as file:
            for kind in kinds:
                for name, tensor in (placed if kind == "weight" else placed[kind]).items():
                    offset = tensor.untyped_storage()._checkpoint_offset
                    write_at(file, offset, source.read(name, kind))


def write_universal(source: OwnCheckpoint, folder: Path) -> None:
    """Write a universal checkpoint that DeepSpeed's stages 1, 2 and 3 load.

    It has a folder for each parameter, and a few small files for the engine and the optimizer.

    Raises:
        UserError: the checkpoint was imported and never trained, so it has no parameter groups.
    """
    counters, groups = source.manifest["counters"], source.manifest["groups"]
    if not groups:
        raise UserError(
            f"{source.folder} was imported and has not been trained: resume it, save a checkpoint, "
            "and convert that one."
        )
    inner = folder / f"global_step{counters['step']}_universal"
    step = torch.tensor(float(source.adam_step))
    for name in source.shapes:
        # format.validate has refused names that would leave the folder.
        parameter_folder = inner / "zero" / name
        parameter_folder.mkdir(parents=True)
        for kind, file in UniversalCheckpoint.FILES.items():
            exists = kind in source.kinds
            tensor = source.read(name, kind) if exists else torch.zeros(source.shapes[name])
            torch.save({"param": tensor}, parameter_folder / file)
        torch.save(step, parameter_folder / "step.pt")
    # Stage 3 copies the values of the first group to all groups. weight_decay differs between the
    # groups, so it is left out, and the engine keeps its own.
    common = {key: value for key, value in groups[0].items() if key != "weight_decay"}
    optimizer = {"state": {0: {"step": step}}, "param_groups": [common]}
    versions = {"ds_version": _version_of_deepspeed()}
    torch.save(
        {**versions, "param_groups": groups, "optimizer_state_dict": optimizer},
        inner / "zero" / "optimizer_state.pt",
    )
    state = {
        **versions,
        "module": {},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": counters["step"],
        "global_samples": counters["samples"],
    }
    for name in (
        "mp_rank_00_model_states.pt",  # of stages 1 and 2
        "zero_pp_rank_0_mp_rank_00_model_states.pt",  # of stage 3
    ):
        torch.save(state, inner / name)
    write_text(folder / "latest_universal", inner.name)


def _version_of_deepspeed() -> str:
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return "0.19.8"  # the version that this layout was tested with


# ---------------------------------------------------------------------------------------- importing


def write_checkpoint(source, folder: Path) -> None:
    """Write a checkpoint of this project with the weights and moments of another program's.

    Raises:
        UserError: a file of the source is missing or damaged.
        ValueError: the names or shapes of the source do not make a valid manifest.
    """
    writer = PieceWriter(folder)
    for name in source.shapes:
        tensors = {kind: source.read(name, kind) for kind in source.kinds}
        # A weight that was not trained has no moments.
        writer.add(name, 0, {kind: t.flatten() for kind, t in tensors.items() if t is not None})
    writer.flush()
    manifest = {
        "counters": source.counters,
        "adam_step": source.adam_step,
        # --resume reports the settings that have changed.
        "identity": {"told": source.settings},
        "shapes": {name: list(shape) for name, shape in source.shapes.items()},
        "pieces": writer.pieces,
        "files": writer.files,
    }
    write_manifest(folder, manifest)


# --------------------------------------------------------------------------------------- inspecting


def inspect(source: OwnCheckpoint) -> str:
    """Describe a checkpoint in lines for the terminal; opening it has verified every file."""
    manifest = source.manifest
    counters, informational = manifest["counters"], manifest["identity"]["told"]
    numbers = {name: math.prod(shape) for name, shape in source.shapes.items()}
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    width = max(map(len, numbers), default=0)
    lines = [
        str(source.folder),
        f"  step {counters['step']:,}, {counters['samples']:,} samples seen, "
        f"loss {counters['last_loss']}",
        f"  saved under {informational.get('strategy', '?')} on "
        f"{informational.get('ranks', '?')} ranks, {informational.get('precision', '?')}",
        f"  {sum(numbers.values()):,} parameters; of each {', '.join(source.kinds)} in fp32; "
        f"Adam's step {source.adam_step}",
        f"  {len(manifest['files'])} files, {size:,} bytes; every SHA-256 matches",
        "",
        *(
            f"  {name:{width}}  {'×'.join(map(str, shape)):>16}  {numbers[name]:>14,}"
            for name, shape in source.shapes.items()
        ),
    ]
    return "\n".join(lines)
