"""Open checkpoints of other programs, to convert them with `convert.write_checkpoint`.

    Trainer       Hugging Face's: model.safetensors, optimizer.pt, trainer_state.json
    DeepSpeed     its universal checkpoints; others of stages 1 to 3 through its ds_to_universal
    FSDP          sharded state of torch.distributed.checkpoint, through its dcp_to_torch_save

Trainer's files and universal checkpoints are read as data. DeepSpeed's other files and the
`.metadata` of torch.distributed.checkpoint are pickles: loading one executes the code in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from support.checkpoints.convert import UNIVERSAL_FILES
from support.checkpoints.format import KINDS
from support.checkpoints.recognize import (
    deepspeed_folder,
    fsdp_folders,
    named_in,
    newest_of_trainer,
)
from support.errors import UserError, first_line
from support.files.user_files import shown
from support.model.weights import from_folder
from support.strategies.optimizer_shards import MOMENTS
from support.train_state import NEW_RUN


@dataclass
class ForeignCheckpoint:
    """Weights and Adam's moments of another program, under the names of the model's parameters."""

    shapes: dict[str, tuple[int, ...]]
    # (parameter, kind) -> the whole tensor in fp32; None for moments that do not exist.
    read: Callable[[str, str], torch.Tensor | None]
    adam_step: int  # number of updates that Adam has made; 0 without moments
    kinds: tuple[str, ...] = KINDS
    # Of the manifest. The position in the data is unknown: `samples` is 0.
    counters: dict = field(default_factory=lambda: dict(NEW_RUN))
    settings: dict = field(default_factory=dict)  # {flag: value} of the flags that are known


@contextlib.contextmanager
def open_foreign(folder: Path, trusted: bool, scratch: Path) -> Iterator[ForeignCheckpoint]:
    """Open a checkpoint of another program.

    Args:
        folder: the checkpoint; of a Trainer's output folder the newest checkpoint is opened.
        trusted: --trust_checkpoint, whether pickles may be loaded.
        scratch: a folder for a temporary copy.
    Raises:
        UserError: the folder is no checkpoint, or it is damaged, unsupported or not trusted.
    """
    folder = newest_of_trainer(folder)
    deepspeed, fsdp = deepspeed_folder(folder), fsdp_folders(folder)
    is_universal = (folder / "zero").is_dir() or (folder / "latest_universal").is_file()
    if (deepspeed or fsdp) and not is_universal and not trusted:
        kind = "a DeepSpeed checkpoint" if deepspeed else "sharded state of FSDP"
        raise UserError(
            f"{folder} is {kind}, whose files are pickles: loading one executes the code in it. "
            "If you trust its author, add --trust_checkpoint."
        )
    with TemporaryDirectory(prefix=".convert-", dir=scratch) as temporary:
        if deepspeed and not is_universal:
            folder = _to_universal(deepspeed, Path(temporary) / "universal")
        if deepspeed or is_universal:
            checkpoint = _of_universal(folder, trusted)
            if not is_universal:
                checkpoint.counters["step"] = checkpoint.adam_step
            yield checkpoint
        else:
            yield _of_fsdp(fsdp, Path(temporary)) if fsdp else _of_trainer(folder)


def load_tensors(path: Path, trusted: bool = False):
    """Load a file of PyTorch; tensors are mapped from the file and read on use.

    Args:
        trusted: execute the code of the Python objects in the file, instead of refusing them.
    Raises:
        UserError: the file is missing or damaged, or contains Python objects.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing, or no regular file.")
    try:
        return torch.load(path, map_location="cpu", weights_only=not trusted, mmap=True)
    except Exception as error:  # torch's readers raise many types for a damaged file
        reason = shown(first_line(error), 200)
        if "weights_only" in str(error):
            reason = "it contains Python objects, whose code is executed with --trust_checkpoint"
        raise UserError(f"{path} cannot be read: {reason}.") from error


# ------------------------------------------------------------------------------------------ Trainer


def _of_trainer(folder: Path) -> ForeignCheckpoint:
    """Open a checkpoint of Trainer with torch's AdamW, on one process or with DDP.

    optimizer.pt numbers the parameters by their position in the optimizer's groups: first those
    with weight decay, then the others, each in the model's order.
    """
    if not (folder / "trainer_state.json").is_file():
        raise UserError(
            f"{folder} is not a checkpoint of Hugging Face's Trainer, DeepSpeed or FSDP: it has no "
            "trainer_state.json."
        )
    optimizer, model = load_tensors(folder / "optimizer.pt"), _model_of(folder)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    try:
        trainer = json.loads((folder / "trainer_state.json").read_bytes())
        states = _states_of(model, optimizer)
        group = optimizer["param_groups"][0]
        settings = {
            "lr": group.get("initial_lr", group["lr"]),
            "weight_decay": group["weight_decay"],
            "adam_beta1": group["betas"][0],
            "adam_beta2": group["betas"][1],
            "adam_epsilon": group["eps"],
        }
        settings |= {"max_steps": trainer["max_steps"]} if "max_steps" in trainer else {}
        counters = {**NEW_RUN, "step": int(trainer["global_step"])}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{folder} is not a checkpoint of Trainer with torch's AdamW ({shown(error)}). To "
            f"start from its weights alone: real_model_example.py --model {folder}"
        ) from error
    return _from_dicts(weights, states, counters, settings)


def _model_of(folder: Path) -> nn.Module:
    """Load the model of a checkpoint of Trainer, without code from the folder."""
    from transformers import AutoConfig

    try:
        if (folder / "adapter_config.json").exists():
            raise ValueError("it has adapters only, which cannot be imported")
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model, info = from_folder(str(folder), config)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[problem]:
                raise ValueError(f"{problem.replace('_', ' ')} {next(iter(info[problem]))}")
    except Exception as error:  # transformers passes values of the file to constructors unchecked
        reason = shown(first_line(error), 200)
        raise UserError(f"{folder}: config.json and the weights do not fit: {reason}.") from error
    return model


def _states_of(model: nn.Module, optimizer: dict) -> dict[str, dict]:
    """Return {parameter name: its entry in optimizer.pt}.

    Raises:
        ValueError: the numbers or the shapes of the parameters do not follow Trainer's rule.
    """
    from transformers import Trainer

    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # does not use the first argument
    groups = [[n for n in shapes if n in decayed], [n for n in shapes if n not in decayed]]
    numbers = [group["params"] for group in optimizer["param_groups"]]
    if list(map(len, filter(None, groups))) != list(map(len, numbers)):
        raise ValueError("its groups of parameters do not fit the model")
    order = zip(chain(*groups), chain(*numbers), strict=True)
    # A weight without a gradient has no states.
    states = {n: optimizer["state"][number] for n, number in order if number in optimizer["state"]}
    if any(state[kind].shape != shapes[name] for name, state in states.items() for kind in MOMENTS):
        raise ValueError("the shapes of its moments do not fit the model")
    return states


def _from_dicts(weights: dict, states: dict, counters: dict, settings: dict) -> ForeignCheckpoint:
    """Return the checkpoint of {name: weight} and of {name: state of torch's AdamW}."""

    def read(name: str, kind: str) -> torch.Tensor | None:
        tensor = weights[name] if kind == "weight" else states.get(name, {}).get(kind)
        return None if tensor is None else tensor.float()

    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    step = max((int(state["step"]) for state in states.values()), default=0)
    kinds = KINDS if states else ("weight",)
    return ForeignCheckpoint(shapes, read, step, kinds, counters, settings)


# ------------------------------------------------------------------------------- DeepSpeed and FSDP


def _to_universal(folder: Path, universal: Path) -> Path:
    """Convert a checkpoint of DeepSpeed's stages 1 to 3 with DeepSpeed, in a subprocess."""
    # One worker: two would start processes that import torch again.
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--inject_missing_state", "--num_extract_workers=1", "--num_merge_workers=1"]
    command += ["--input_folder", str(folder.absolute()), "--output_folder", str(universal)]
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=env)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = shown(lines[-1], 300) if lines else f"exit code {done.returncode}"
        raise UserError(f"{folder}: DeepSpeed's ds_to_universal failed: {reason}")
    return universal


def _of_universal(folder: Path, trusted: bool) -> ForeignCheckpoint:
    """Open a universal checkpoint: the folder that contains `zero/`, or its parent."""
    zero = (named_in(folder / "latest_universal") or folder) / "zero"
    names = sorted(path.parent.relative_to(zero).as_posix() for path in zero.glob("**/fp32.pt"))
    if not names:
        raise UserError(f"{folder} is not a DeepSpeed universal checkpoint: no zero/*/fp32.pt.")

    def read(name: str, kind: str) -> torch.Tensor:
        path = zero / name / UNIVERSAL_FILES[kind]
        tensor = load_tensors(path)
        tensor = tensor.get("param") if isinstance(tensor, dict) else tensor
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{path} contains no tensor.")
        return tensor.float()

    # A tied weight may be stored twice, the second time under its other name without moments.
    trained = [name for name in names if (zero / name / "exp_avg.pt").is_file()]
    shapes = {name: tuple(read(name, "weight").shape) for name in trained or names}
    if not trained:
        return ForeignCheckpoint(shapes, read, 0, ("weight",))
    if (step := zero / trained[0] / "step.pt").is_file():  # of stages 1 and 2
        return ForeignCheckpoint(shapes, read, int(load_tensors(step)))
    state = load_tensors(zero / "optimizer_state.pt", trusted)["optimizer_state_dict"]["state"]
    return ForeignCheckpoint(shapes, read, int(state[0]["step"]))


def _of_fsdp(folders: list[Path], scratch: Path) -> ForeignCheckpoint:
    """Open sharded state with the names of get_model_state_dict and get_optimizer_state_dict."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    weights: dict = {}
    states: dict = {}
    for folder in folders:
        try:
            dcp_to_torch_save(folder, scratch / f"{folder.name}.pt")
        except (CheckpointException, Exception) as error:  # the first is a BaseException
            raise UserError(
                f"{folder}: .metadata or a file with its tensors cannot be read by torch's "
                f"dcp_to_torch_save: {shown(first_line(error), 200)}."
            ) from error
        for part in _parts_of(load_tensors(scratch / f"{folder.name}.pt")):
            if "param_groups" in part:
                states = part["state"]
            else:
                weights = weights or part
    complete = all(state.keys() >= {"step", *MOMENTS} for state in states.values())
    if not (weights and complete and states.keys() <= weights.keys()):
        raise UserError(
            f"{folders[0]} does not contain the weights of a model and their AdamW states under "
            "the names of get_model_state_dict and get_optimizer_state_dict."
        )
    checkpoint = _from_dicts(weights, states, dict(NEW_RUN), {})
    checkpoint.counters["step"] = checkpoint.adam_step  # the format has no other
    return checkpoint


def _parts_of(tree) -> Iterator[dict]:
    """Yield the model's weights and the optimizer's state in a nested dictionary."""
    if isinstance(tree, dict) and tree:
        is_model = all(isinstance(value, torch.Tensor) for value in tree.values())
        if is_model or tree.keys() >= {"state", "param_groups"}:
            yield tree
        else:
            for value in tree.values():
                yield from _parts_of(value)
