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
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from support.checkpoints import recognize
from support.errors import UserError, first_line, refused_as
from support.files.user_files import shown
from support.model.weights import NO_REMOTE_CODE, from_folder
from support.process import run_program
from support.strategies.optimizer_shards import MOMENTS

UNIVERSAL_FILES = {"weight": "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}


@dataclass
class ForeignCheckpoint:
    """Weights and Adam's moments of another program; the tensors are mapped from their files."""

    weights: dict[str, torch.Tensor]  # by the name of the parameter
    # {parameter: {"exp_avg", "exp_avg_sq"}}; a parameter that was not trained is missing.
    states: dict[str, dict]
    adam_step: int  # number of updates that Adam has made; 0 without states
    step: int = 0  # of the run. Its position in the data is not known


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
    folder = recognize.newest_of_trainer(folder)
    deepspeed, fsdp = recognize.deepspeed_folder(folder), recognize.fsdp_folders(folder)
    is_universal = (folder / "zero").is_dir() or (folder / "latest_universal").is_file()
    if (deepspeed or fsdp) and not is_universal and not trusted:
        raise UserError(
            f"{folder} is a checkpoint of DeepSpeed or FSDP, whose files are pickles: loading one "
            "executes the code in it. If you trust its author, add --trust_checkpoint."
        )
    with TemporaryDirectory(prefix=".convert-", dir=scratch) as temporary:
        if is_universal:
            yield _of_universal(folder, trusted)
        elif deepspeed:
            checkpoint = _of_universal(_to_universal(deepspeed, temporary), trusted)
            checkpoint.step = checkpoint.adam_step
            yield checkpoint
        else:
            yield _of_fsdp(fsdp, Path(temporary)) if fsdp else _of_trainer(folder)


def load_tensors(path: Path, trusted: bool = False):
    """Load a file of PyTorch; tensors are mapped from the file and read on use.

    Args:
        trusted: execute the code of the Python objects in the file, instead of refusing them.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=not trusted, mmap=True)
    except Exception as error:  # of a dozen classes
        reason = shown(first_line(error), 200)
        if "weights_only" in str(error):
            reason = "it contains Python objects, whose code is executed with --trust_checkpoint"
        raise UserError(f"{path} cannot be read: {reason}.") from error


def _step_of(states: dict) -> int:
    """Return the number of updates in the states of torch's AdamW."""
    return max((int(state["step"]) for state in states.values()), default=0)


# ------------------------------------------------------------------------------------------ Trainer


def _of_trainer(folder: Path) -> ForeignCheckpoint:
    """Open a checkpoint of Trainer with torch's AdamW, on one process or with DDP."""
    with refused_as(
        f"{folder} is not a checkpoint of Hugging Face's Trainer with torch's AdamW, of DeepSpeed "
        f"or FSDP (real_model_example.py --model {folder} starts from its weights alone)",
        longest=200,
    ):
        trainer = json.loads((folder / "trainer_state.json").read_bytes())
        model, optimizer = _model_of(folder), load_tensors(folder / "optimizer.pt")
        states = _states_of(model, optimizer)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        return ForeignCheckpoint(weights, states, _step_of(states), int(trainer["global_step"]))


def _model_of(folder: Path) -> nn.Module:
    """Load the model of a checkpoint of Trainer, without code from the folder."""
    from transformers import AutoConfig

    if (folder / "adapter_config.json").exists():
        raise ValueError("it has adapters only, which cannot be imported")
    config = AutoConfig.from_pretrained(folder, local_files_only=True, **NO_REMOTE_CODE)
    model, info = from_folder(str(folder), config)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            raise ValueError(f"{problem.replace('_', ' ')} {next(iter(info[problem]))}")
    return model


def _states_of(model: nn.Module, optimizer: dict) -> dict[str, dict]:
    """Return {parameter name: its entry in optimizer.pt}.

    optimizer.pt numbers the parameters by their position in the optimizer's groups: first those
    with weight decay, then the others, each in the model's order.
    """
    from transformers import Trainer

    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # does not use the first argument
    order = [n for n in shapes if n in decayed] + [n for n in shapes if n not in decayed]
    numbers = chain(*(group["params"] for group in optimizer["param_groups"]))
    states = {}
    for name, number in zip(order, numbers, strict=True):
        if state := optimizer["state"].get(number):  # a weight without a gradient has none
            states[name] = state
            if any(state[kind].shape != shapes[name] for kind in MOMENTS):
                raise ValueError("the shapes of its moments do not fit the model")
    return states


# ------------------------------------------------------------------------------- DeepSpeed and FSDP


def _to_universal(folder: Path, scratch: str) -> Path:
    """Convert a checkpoint of DeepSpeed's stages 1 to 3 with DeepSpeed, in a subprocess."""
    # One worker: two would start processes that import torch again.
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--inject_missing_state", "--num_extract_workers=1", "--num_merge_workers=1"]
    command += ["--input_folder", str(folder.absolute()), "--output_folder", f"{scratch}/universal"]
    code, output = run_program(command, {**os.environ, "DS_ACCELERATOR": "cpu"})
    if code:
        last_line = output.strip().rpartition("\n")[2]
        raise UserError(f"{folder}: DeepSpeed's ds_to_universal failed: {shown(last_line, 300)}")
    return Path(scratch, "universal")


def _of_universal(folder: Path, trusted: bool) -> ForeignCheckpoint:
    """Open a universal checkpoint: the folder that contains `zero/`, or its parent."""
    zero = (recognize.named_in(folder / "latest_universal") or folder) / "zero"
    folders = {
        path.parent.relative_to(zero).as_posix(): path.parent for path in zero.rglob("fp32.pt")
    }
    # A tied weight may be stored twice, the second time under its other name without moments.
    trained = [name for name in sorted(folders) if (folders[name] / "exp_avg.pt").is_file()]
    if not folders:
        raise UserError(f"{folder} is not a DeepSpeed universal checkpoint: no zero/*/fp32.pt.")

    def read(name: str, kind: str) -> torch.Tensor:
        tensor = load_tensors(folders[name] / UNIVERSAL_FILES[kind])
        return tensor["param"] if isinstance(tensor, dict) else tensor

    weights = {name: read(name, "weight") for name in trained or sorted(folders)}
    states = {name: {kind: read(name, kind) for kind in MOMENTS} for name in trained}
    if not trained:
        step = 0
    elif (file := folders[trained[0]] / "step.pt").is_file():  # of stages 1 and 2
        step = load_tensors(file)
    else:
        optimizer = load_tensors(zero / "optimizer_state.pt", trusted)["optimizer_state_dict"]
        step = optimizer["state"][0]["step"]
    return ForeignCheckpoint(weights, states, int(step))


def _of_fsdp(folders: list[Path], scratch: Path) -> ForeignCheckpoint:
    """Open sharded state with the names of get_model_state_dict and get_optimizer_state_dict."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    weights: dict = {}
    states: dict = {}
    for folder in folders:
        file = scratch / f"{folder.name}.pt"
        try:
            dcp_to_torch_save(folder, file)
        except (CheckpointException, Exception) as error:  # the first is a BaseException
            raise UserError(
                f"{folder}: .metadata or a file with its tensors cannot be read by torch's "
                f"dcp_to_torch_save: {shown(first_line(error), 200)}."
            ) from error
        for part in _parts_of(load_tensors(file)):
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
    step = _step_of(states)
    return ForeignCheckpoint(weights, states, step, step)  # the format has no step of the run


def _parts_of(tree) -> Iterator[dict]:
    """Yield the model's weights and the optimizer's state in a nested dictionary."""
    if isinstance(tree, dict) and tree:
        is_model = all(isinstance(value, torch.Tensor) for value in tree.values())
        if is_model or tree.keys() >= {"state", "param_groups"}:
            yield tree
        else:
            for value in tree.values():
                yield from _parts_of(value)
