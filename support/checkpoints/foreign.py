"""Open checkpoints of other programs, to convert them with `convert.write_checkpoint`.

    Trainer       Hugging Face's: model.safetensors, optimizer.pt, trainer_state.json
    DeepSpeed     any rank count, stages 1 to 3: DeepSpeed's ds_to_universal converts it first
    FSDP          sharded state of torch.distributed.checkpoint, also as accelerate saves it

Trainer's files are read as data. DeepSpeed's files and the `.metadata` of
torch.distributed.checkpoint are pickles, and loading a pickle executes the code in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from support.checkpoints.convert import UniversalCheckpoint, WholeCheckpoint, load_tensors
from support.checkpoints.format import MOST_STEPS, is_inner_path
from support.checkpoints.recognize import deepspeed_folder, fsdp_folders, newest_of_trainer
from support.errors import UserError, first_line
from support.files.atomic import read_json
from support.files.user_files import shown
from support.model.weights import NO_REMOTE_CODE, from_config
from support.strategies.optimizer_shards import MOMENTS
from support.train_state import NEW_RUN

ADAM_STATES = {"step", *MOMENTS}
DEEPSPEED_FILES = "*_optim_states.pt"  # stage 0 has none
INDEX_BYTES = 64 << 20  # size limit of the JSON files


@contextlib.contextmanager
def open_foreign(folder: Path, trusted: bool, scratch: Path) -> Iterator[WholeCheckpoint]:
    """Open a checkpoint of another program.

    Args:
        folder: the checkpoint; of a Trainer's output folder the newest checkpoint is opened.
        trusted: --trust_checkpoint, whether pickles may be loaded.
        scratch: a folder for a temporary copy of a DeepSpeed checkpoint.
    Yields:
        The checkpoint. Files of a DeepSpeed checkpoint are removed at the end of the context.
    Raises:
        UserError: the folder is no checkpoint, or it is damaged, unsupported or not trusted.
    """
    folder = newest_of_trainer(folder)
    if (folder / "zero").is_dir() or (folder / "latest_universal").is_file():
        yield UniversalCheckpoint(folder)
        return
    deepspeed, fsdp = deepspeed_folder(folder), fsdp_folders(folder)
    if (deepspeed or fsdp) and not trusted:
        kind = "a DeepSpeed checkpoint" if deepspeed else "sharded state of FSDP"
        raise UserError(
            f"{folder} is {kind}, whose files are pickles: loading one executes the code in it. "
            "If you trust its author, add --trust_checkpoint."
        )
    if deepspeed:
        with TemporaryDirectory(prefix=".universal-", dir=scratch) as temporary:
            yield DeepSpeedCheckpoint(deepspeed, Path(temporary) / "universal")
    elif fsdp:
        yield FsdpCheckpoint(fsdp)
    else:
        yield TrainerCheckpoint(folder)


# ------------------------------------------------------------------------------------------ Trainer


class TrainerCheckpoint(WholeCheckpoint):
    """A checkpoint of Hugging Face's Trainer with AdamW, on one process or with DDP.

    optimizer.pt numbers the parameters by their position in the optimizer's groups, so their names
    follow from the model and from Trainer's rule for weight decay.

    Args:
        folder: the folder with config.json, model.safetensors (or its shards), optimizer.pt and
            trainer_state.json. scheduler.pt is not read: the schedule follows from the step.
    """

    kinds = ("weight", *MOMENTS)

    def __init__(self, folder: Path):
        self.folder = folder
        model = _empty_model(folder, self._state_of_trainer("config.json"))
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._keys = self._find_weights(model)
        optimizer = load_tensors(folder / "optimizer.pt")
        try:
            order = _parameter_order(model, optimizer)
            self._states = {
                name: optimizer["state"][number]
                for number, name in order.items()
                if number in optimizer["state"]  # a weight without a gradient has no states
            }
            self.adam_step = max((int(state["step"]) for state in self._states.values()), default=0)
            group = optimizer["param_groups"][0]
            self.settings = {
                "lr": group.get("initial_lr", group["lr"]),
                "weight_decay": group["weight_decay"],
                "adam_beta1": group["betas"][0],
                "adam_beta2": group["betas"][1],
                "adam_epsilon": group["eps"],
            }
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{folder / 'optimizer.pt'} contains no states of torch's AdamW "
                f"({type(error).__name__}: {shown(error)})."
            ) from error
        trainer = self._state_of_trainer("trainer_state.json")
        step, most = trainer.get("global_step"), trainer.get("max_steps")
        if type(step) is not int or not 0 <= step <= MOST_STEPS:
            raise UserError(f"{folder / 'trainer_state.json'}: its global_step is {shown(step)}.")
        if type(most) is int and most > 0:
            self.settings["max_steps"] = most
        self.counters = {**NEW_RUN, "step": step}

    def _state_of_trainer(self, name: str) -> dict:
        try:
            value = read_json(self.folder / name, INDEX_BYTES)
            if not isinstance(value, dict):
                raise ValueError("it is not a JSON object")
        except FileNotFoundError as error:
            raise UserError(
                f"{self.folder} is not a checkpoint of Hugging Face's Trainer, DeepSpeed or FSDP: "
                f"it has no {name}."
            ) from error
        except (OSError, ValueError) as error:
            raise UserError(f"{self.folder / name} cannot be read: {shown(error)}.") from error
        return value

    def _find_weights(self, model: nn.Module) -> dict[str, tuple[Path, str]]:
        """Return file and key of each parameter; a tied weight is stored under one of its names."""
        files = self._weight_files()
        shapes: dict[str, tuple[Path, tuple[int, ...]]] = {}
        for file in files:
            with _open_weights(file) as tensors:
                for key in list(tensors.keys()):
                    shapes[key] = file, tuple(tensors.get_slice(key).get_shape())
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        keys = {}
        for parameter, aliases in names.items():
            key = next((name for name in aliases if name in shapes), None)
            wanted, stored = tuple(parameter.shape), shapes[key][1] if key else "missing"
            if key is None or stored != wanted:
                raise UserError(
                    f"{self.folder}: the shape of {aliases[0]} is {list(wanted)} in the model of "
                    f"config.json, and {stored if key is None else list(stored)} in the weights."
                )
            keys[aliases[0]] = shapes[key][0], key
        return keys

    def _weight_files(self) -> list[Path]:
        if (self.folder / "adapter_config.json").exists():
            raise UserError(
                f"{self.folder} contains adapters only, and those of Trainer cannot be imported."
            )
        if (self.folder / "model.safetensors.index.json").is_file():
            index = self._state_of_trainer("model.safetensors.index.json").get("weight_map")
            names = list(index.values()) if isinstance(index, dict) else [None]
            if not all(isinstance(name, str) and is_inner_path(name) for name in names):
                raise UserError(f"{self.folder / 'model.safetensors.index.json'} is damaged.")
            return [self.folder / name for name in sorted(set(map(str, names)))]
        return [self.folder / "model.safetensors"]

    def read(self, name: str, kind: str) -> torch.Tensor | None:
        if kind != "weight":
            return self._states[name][kind].float() if name in self._states else None
        path, key = self._keys[name]
        with _open_weights(path) as tensors:
            return tensors.get_tensor(key).float()


@contextlib.contextmanager
def _open_weights(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise UserError(f"{path} is missing, or no regular file.")
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({shown(error)}).") from error


def _empty_model(folder: Path, config: dict) -> nn.Module:
    """Build the model of a config.json on the meta device, without memory for its weights."""
    from transformers import AutoConfig

    try:
        if "auto_map" in config:
            raise ValueError("it needs code from the folder, which is not executed")
        parsed = AutoConfig.from_pretrained(folder, local_files_only=True, **NO_REMOTE_CODE)
        with torch.device("meta"):
            return from_config(parsed)
    except Exception as error:  # transformers passes values of the file to constructors unchecked
        raise UserError(
            f"{folder / 'config.json'} describes no causal language model: "
            f"{shown(first_line(error), 200)}."
        ) from error


def _parameter_order(model: nn.Module, optimizer: dict) -> dict[int, str]:
    """Return {number in optimizer.pt: parameter name}.

    Trainer puts parameters with weight decay into the first group and the others into the second,
    each in the model's order. Its rule for weight decay has changed between versions, so each rule
    is compared with the number of parameters and their shapes in the file.

    Raises:
        ValueError: no rule fits, or several rules fit and give different orders.
        KeyError, TypeError, AttributeError: the file contains no states of AdamW.
    """
    numbers = [group["params"] for group in optimizer["param_groups"]]
    for state in optimizer["state"].values():
        if set(state) != ADAM_STATES:
            raise ValueError(f"it has the states {', '.join(sorted(map(str, state)))}")
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    orders: list[dict[int, str]] = []
    for decayed in _decay_rules(model):
        groups = [[name for name in shapes if name in decayed]]
        groups.append([name for name in shapes if name not in decayed])
        if len(numbers) == 1:
            groups = [groups[0] + groups[1]] if not groups[0] or not groups[1] else []
        if list(map(len, groups)) != list(map(len, numbers)):
            continue
        order = dict(zip(chain(*numbers), chain(*groups), strict=True))
        states = ((optimizer["state"].get(number), name) for number, name in order.items())
        fits = all(s is None or s[kind].shape == shapes[n] for s, n in states for kind in MOMENTS)
        if fits and order not in orders:
            orders.append(order)
    if len(orders) != 1:
        sizes = " + ".join(str(len(group)) for group in numbers)
        raise ValueError(
            f"its groups of {sizes} parameters "
            + ("fit the model in several orders" if orders else "do not fit the model")
        )
    return orders[0]


def _decay_rules(model: nn.Module) -> Iterator[set[str]]:
    """Yield the names of the parameters with weight decay, under each rule that Trainer has had."""
    from transformers import Trainer
    from transformers.trainer_pt_utils import get_parameter_names

    # The method does not use its first argument.
    yield set(Trainer.get_decay_parameter_names(None, model))
    outside_norms = get_parameter_names(model, [nn.LayerNorm])
    yield {name for name in outside_norms if "bias" not in name}  # until 4.46, for LayerNorm
    yield {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    yield set()  # a single group, of an optimizer that the user made


# ---------------------------------------------------------------------------------------- DeepSpeed


class DeepSpeedCheckpoint(UniversalCheckpoint):
    """A checkpoint of DeepSpeed's stages 1 to 3, converted by DeepSpeed in a subprocess.

    The step in its counters is Adam's, which does not count skipped updates.

    Args:
        folder: the folder with the `*_optim_states.pt` of each rank.
    """

    def __init__(self, folder: Path, universal: Path):
        if not any(folder.glob(DEEPSPEED_FILES)):
            raise UserError(
                f"{folder} has no {DEEPSPEED_FILES}. Checkpoints of DeepSpeed's stage 0, and those "
                "saved without the optimizer, cannot be converted."
            )
        # One worker: two would start processes that import torch again.
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += ["--inject_missing_state", "--num_extract_workers=1", "--num_merge_workers=1"]
        done = subprocess.run(
            [*command, "--input_folder", folder.absolute(), "--output_folder", universal],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "DS_ACCELERATOR": "cpu"},
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            reason = shown(lines[-1], 300) if lines else f"exit code {done.returncode}"
            raise UserError(f"{folder}: DeepSpeed's ds_to_universal failed: {reason}")
        super().__init__(universal)
        self.counters = {**NEW_RUN, "step": self.adam_step}


# --------------------------------------------------------------------------------------------- FSDP


class FsdpCheckpoint(WholeCheckpoint):
    """Sharded state that FSDP saved with torch.distributed.checkpoint, of any number of ranks.

    The names are those of `get_model_state_dict` and `get_optimizer_state_dict`: "….NAME" and
    "….state.NAME.exp_avg". The step in its counters is Adam's, because the format has no other.

    Args:
        folders: one folder with all tensors, or one for the model and one for the optimizer.
    """

    STATE = re.compile(r"(?:.*\.)?state\.(.+)\.(exp_avg|exp_avg_sq|step)")

    def __init__(self, folders: list[Path]):
        self.folder = folders[0].parent if len(folders) > 1 else folders[0]
        tensors = {key: entry for folder in folders for key, entry in _tensors_in(folder).items()}
        self._states = {
            (match[1], match[2]): tensors[key]
            for key in tensors
            if (match := self.STATE.fullmatch(key)) is not None
        }
        trained = [name for name, kind in self._states if kind == "exp_avg"]
        weights = [key for key in tensors if not self.STATE.fullmatch(key)]
        prefix = self._prefix(weights, trained)
        self._weights = {
            key.removeprefix(prefix): tensors[key]
            for key in weights
            if key.startswith(prefix) and ".param_groups." not in f".{key}"
        }
        self.shapes = {name: tuple(size) for name, (_, _, size) in self._weights.items()}
        if any((name, kind) not in self._states for name in trained for kind in MOMENTS):
            raise UserError(f"{self.folder} contains no states of torch's AdamW.")
        for (name, kind), (_, _, size) in self._states.items():
            if kind in MOMENTS and tuple(size) != self.shapes.get(name):
                raise UserError(
                    f"{self.folder}: the shape of {shown(name)} is {self.shapes.get(name)}, and "
                    f"that of its {kind} is {tuple(size)}."
                )
        self.kinds = ("weight", *(MOMENTS if trained else ()))
        self.settings = {}
        steps = (self._load(entry) for (_, kind), entry in self._states.items() if kind == "step")
        self.adam_step = max((int(step) for step in steps), default=0)
        if trained and not self.adam_step:
            raise UserError(f"{self.folder} has Adam's moments, but not its step.")
        self.counters = {**NEW_RUN, "step": self.adam_step}

    def _prefix(self, weights: list[str], trained: list[str]) -> str:
        """Return what precedes the parameters' names in the keys of the weights."""
        if not trained:
            # Without lm_head under the same prefix, "model." is a part of the names (Llama).
            wraps = (p for p in ("app.model.", "model.") if all(k.startswith(p) for k in weights))
            prefixes = {next(wraps, "")}
        else:
            prefixes = {key.removesuffix(trained[0]) for key in weights if key.endswith(trained[0])}
        for prefix in sorted(prefixes):
            if weights and {prefix + name for name in trained} <= set(weights):
                return prefix
        raise UserError(
            f"{self.folder} does not contain the weights of a model and their AdamW states under "
            "the names of get_model_state_dict and get_optimizer_state_dict."
        )

    def _load(self, entry: tuple[Path, str, torch.Size]) -> torch.Tensor:
        import torch.distributed.checkpoint as dcp

        folder, key, size = entry
        state = {key: torch.empty(size)}
        try:
            with warnings.catch_warnings():  # about the missing process group
                warnings.simplefilter("ignore")
                dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
        except (dcp.api.CheckpointException, Exception) as error:  # the first is a BaseException
            raise UserError(
                f"{folder}: {shown(key)} cannot be read, because a file is missing or damaged."
            ) from error
        return state[key]

    def read(self, name: str, kind: str) -> torch.Tensor | None:
        if kind == "weight":
            return self._load(self._weights[name])
        return self._load(self._states[name, kind]) if (name, kind) in self._states else None


def _tensors_in(folder: Path) -> dict[str, tuple[Path, str, torch.Size]]:
    """Return {key: (folder, key, shape)} of the tensors in a folder. Loads a pickle."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        return {
            key: (folder, key, entry.size)
            for key, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
    except Exception as error:  # a pickle can raise any exception
        raise UserError(
            f"{folder / '.metadata'} cannot be read: {shown(first_line(error), 200)}."
        ) from error
