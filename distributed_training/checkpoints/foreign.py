"""Open checkpoints of other programs, to convert them with `convert.write_checkpoint`.

Trainer's files and DeepSpeed's universal checkpoints are read as data. DeepSpeed's other files are
read by its ds_to_universal, and FSDP's by torch's dcp_to_torch_save: they contain pickles, and
loading one executes the code in it.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig

from distributed_training.checkpoints.recognize import newest_of_trainer
from distributed_training.errors import UserError, first_line, refused_as
from distributed_training.files import weight_files
from distributed_training.files.user_files import shown
from distributed_training.model.weights import NO_REMOTE_CODE, check_folder, from_folder, untie
from distributed_training.optimizers.optimizer import MOMENTS
from distributed_training.programs import run_program


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
    """Open a checkpoint of another program, or the newest one in a Trainer's output folder.

    Args:
        trusted: --trust_checkpoint, whether pickles may be loaded.
        scratch: a folder for a temporary copy.
    Raises:
        UserError: it is damaged, unsupported or not trusted.
    """
    folder = newest_of_trainer(folder)
    is_universal = (folder / "zero").is_dir() or (folder / "latest_universal").is_file()
    deepspeed = _folder_named_in(folder / "latest")
    is_deepspeed = any(deepspeed.glob("*_states.pt"))
    inner = (folder / name for name in ("", "pytorch_model_fsdp_0", "optimizer_0"))  # accelerate's
    fsdp = [path for path in inner if (path / ".metadata").is_file()]
    if (is_deepspeed or fsdp) and not is_universal and not trusted:
        raise UserError(
            f"{folder} is a checkpoint of DeepSpeed or FSDP, whose files are pickles: loading one "
            "executes the code in it. If you trust its author, add --trust_checkpoint."
        )
    with TemporaryDirectory(prefix=".convert-", dir=scratch) as temporary:
        if is_universal:
            yield _of_universal(folder, trusted)
        elif is_deepspeed:
            _convert_to_universal(deepspeed, f"{temporary}/universal")
            checkpoint = _of_universal(Path(temporary, "universal"), trusted)
            yield replace(checkpoint, step=checkpoint.adam_step)
        else:
            yield _of_fsdp(fsdp, Path(temporary)) if fsdp else _of_trainer(folder)


def load_tensors(path: Path, trusted: bool = False):
    """Load a file of PyTorch, whose tensors are read on use; `trusted` executes code in it."""
    advice = "whose code is executed with --trust_checkpoint"
    return weight_files.load_tensors(path, advice, trusted=trusted)


def _step_of(states: dict) -> int:
    """Return the number of updates in the states of torch's AdamW."""
    return max((int(state["step"]) for state in states.values()), default=0)


def _folder_named_in(file: Path) -> Path:
    """Return the folder next to a file whose name the file contains, or the file's own folder."""
    name = file.read_text(errors="replace").strip() if file.is_file() else ""
    folders = (path for path in file.parent.iterdir() if path.name == name and path.is_dir())
    return next(folders, file.parent)  # a path to another place is the name of no folder here


def _of_trainer(folder: Path) -> ForeignCheckpoint:
    """Open a checkpoint of Trainer with torch's AdamW, on one process or with DDP."""
    from transformers import Trainer  # its import takes seconds

    with refused_as(
        f"{folder} is not a checkpoint of Hugging Face's Trainer with torch's AdamW, of DeepSpeed "
        "or FSDP (to start from its weights alone, give it to --model)",
        longest=200,
    ):
        step = int(json.loads((folder / "trainer_state.json").read_bytes())["global_step"])
        if (folder / "adapter_config.json").exists():
            raise ValueError("it has adapters only, which cannot be imported")
        optimizer = load_tensors(folder / "optimizer.pt")
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **NO_REMOTE_CODE)
        if check_folder(str(folder), config, str(folder)):
            untie(config)
        model, info = from_folder(str(folder), config)
        if info["missing_keys"] or info["mismatched_keys"]:
            raise ValueError("the model's files do not have all of its weights")
        decayed = Trainer.get_decay_parameter_names(None, model)  # does not use its first argument
        states = _states_of(model, optimizer, set(decayed))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return ForeignCheckpoint(weights, states, _step_of(states), step)


def _states_of(model: torch.nn.Module, optimizer: dict, decayed: set[str]) -> dict[str, dict]:
    """Return {parameter name: its entry in optimizer.pt}, which numbers first those with decay."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    order = sorted(shapes, key=lambda name: name not in decayed)
    numbers = chain(*(group["params"] for group in optimizer["param_groups"]))
    states = {
        name: optimizer["state"][number]
        for name, number in zip(order, numbers, strict=True)
        if number in optimizer["state"]  # a weight without a gradient has none
    }
    if any(state[kind].shape != shapes[name] for name, state in states.items() for kind in MOMENTS):
        raise ValueError("the shapes of its moments do not fit the model")
    return states


def _convert_to_universal(folder: Path, target: str) -> None:
    """Convert a checkpoint of DeepSpeed's stages 1 to 3 with DeepSpeed, in a subprocess."""
    # One worker: two would start processes that import torch again.
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--inject_missing_state", "--num_extract_workers=1", "--num_merge_workers=1"]
    command += ["--input_folder", str(folder.absolute()), "--output_folder", target]
    code, output = run_program(command, {**os.environ, "DS_ACCELERATOR": "cpu"})
    if code:
        last = output.strip().rpartition("\n")[2]
        raise UserError(f"{folder}: DeepSpeed's ds_to_universal failed: {shown(last, 300)}")


def _of_universal(folder: Path, trusted: bool) -> ForeignCheckpoint:
    """Open a universal checkpoint: the folder that contains `zero/`, or its parent."""
    zero = _folder_named_in(folder / "latest_universal") / "zero"
    found = [path.parent for path in sorted(zero.rglob("fp32.pt"))]
    folders = {path.relative_to(zero).as_posix(): path for path in found}
    if not folders:
        raise UserError(f"{folder} is not a DeepSpeed universal checkpoint: no zero/*/fp32.pt.")
    # A tied weight may be stored twice, the second time under its other name without moments.
    trained = [name for name in folders if (folders[name] / "exp_avg.pt").is_file()]

    def read(name: str, file: str) -> torch.Tensor:
        tensor = load_tensors(folders[name] / f"{file}.pt")
        return tensor["param"] if isinstance(tensor, dict) else tensor

    weights = {name: read(name, "fp32") for name in trained or folders}
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
    try:
        for folder in folders:
            file = scratch / f"{folder.name}.pt"
            dcp_to_torch_save(folder, file)
            parts = [load_tensors(file)]
            for part in parts:  # grows: the states may be nested
                if "param_groups" in part:
                    states = part["state"]
                elif all(isinstance(value, torch.Tensor) for value in part.values()):
                    weights = weights or part
                else:
                    parts += [value for value in part.values() if isinstance(value, dict)]
        complete = all(state.keys() >= {"step", *MOMENTS} for state in states.values())
        if not (weights and complete and states.keys() <= weights.keys()):
            raise ValueError("no weights and AdamW states under the same names")
    except (CheckpointException, Exception) as error:  # the first is a BaseException
        raise UserError(
            f"{folders[0]}: .metadata or its tensors cannot be read as what get_model_state_dict "
            f"and get_optimizer_state_dict return: {shown(first_line(error), 200)}."
        ) from error
    step = _step_of(states)
    return ForeignCheckpoint(weights, states, step, step)  # the format has no step of the run
