"""Checks of the flags, and of the files and folders that they name, before anything is loaded."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from distributed_training.cli.parser import Options
from distributed_training.errors import UserError
from distributed_training.files.user_files import read_text
from distributed_training.known_models import EMBEDDED_MODEL, GPT2_SHAPES
from distributed_training.optimizers import OPTIMIZERS
from distributed_training.rank_shares import AUTO
from distributed_training.settings.data import Dataset, DataSettings, default_dataset
from distributed_training.settings.model import ModelSettings
from distributed_training.settings.output import OutputSettings
from distributed_training.settings.settings import DEFAULTS, FACTS
from distributed_training.strategies.strategy import Resolved, Strategy

# Of --dataset: a name that ends with one of them is a file, also if it does not exist.
DATA_SUFFIXES = (".txt", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz")

# ------------------------------------------------------------------------------ flags and flags

# The flags that each flag excludes; of a switch that is on by default its --no_NAME excludes them.
EXCLUDED = {
    f"no_{name}" if DEFAULTS[name] is True else name: facts.excludes
    for name, facts in FACTS.items()
    if facts.excludes
}


def refuse_conflicts(flags: Options, given: frozenset[str]) -> None:
    """Check that no flags exclude each other.

    Args:
        flags: the values of all flags.
        given: names of flags on the command line or in the run file.
    """
    for flag, others in EXCLUDED.items():
        for other in others:
            if _is_set(flags, flag) and _is_set(flags, other):
                raise UserError(f"--{flag} and --{other} cannot be used together: leave one out.")
    check_needs(flags, FACTS)
    datasets = [dataset.name for dataset in flags.dataset] or [default_dataset(flags.model)]
    problems = {
        "--resume needs --output_dir, the run to continue; or name a checkpoint: --resume PATH": (
            flags.resume == "" and flags.output_dir is None
        ),
        "--do_train false leaves nothing to do: add --do_eval to evaluate, or leave it out": (
            flags.do_train is False and not (flags.do_eval or flags.eval_only)
        ),
        f"--prove reads the gradient from AdamW's moments: leave --optim {flags.optim} out": (
            flags.prove and flags.optim != "adamw"
        ),
        "--packing always isolates examples: leave --no_isolate_documents out": (
            flags.packing and "isolate_documents" in given and not flags.isolate_documents
        ),
        "--simulate_gpus needs --max_steps 2 or more: the first step creates Adam's states": (
            flags.simulate_gpus and flags.max_steps == 1
        ),
        "--early_stopping_patience needs --eval_every with --streaming, which has no epochs": (
            flags.streaming and flags.early_stopping_patience and not flags.eval_every
        ),
        "--streaming reads one --dataset: a file, a folder or a dataset on the hub, not pydocs": (
            flags.streaming and (len(datasets) > 1 or datasets == ["pydocs"])
        ),
        "--streaming reads a whole split: "
        f"--train_split {flags.train_split} is a part or several": (
            flags.streaming and {*"[+"} & {*(flags.train_split or "")}
        ),
    }
    if flags.rank_shares == AUTO:
        problems |= _problems_of_auto_shares(flags)
    for problem, holds in problems.items():
        if holds:
            raise UserError(f"{problem}.")


def check_needs(flags: Options, names: Iterable[str]) -> None:
    """Check that flags, of which `names` are checked, come with those that they need."""
    for name in names:
        needs = FACTS[name].needs
        if needs and _is_set(flags, name) and not _is_set(flags, needs):
            raise UserError(f"--{name} needs --{needs}.")


def _problems_of_auto_shares(flags: Options) -> dict[str, bool]:
    """Return what --rank_shares auto excludes, and whether the flags have it."""
    numbers = "give shares such as 2,1"
    return {
        "--rank_shares auto depends on measured times, so no run repeats another exactly: "
        f"{numbers}, or leave --deterministic out": flags.deterministic,
        "--rank_shares auto cannot move the batch slots of --streaming, each of which reads its "
        f"rows on one rank: {numbers}": flags.streaming,
        "--rank_shares auto needs ranks that compute, and --simulate_gpus has one: "
        f"{numbers}": bool(flags.simulate_gpus),
    }


def check_strategy_supports(flags: Options, strategy: Strategy) -> None:
    """Check that the strategy supports what the flags ask for."""
    if flags.cuda_graph and not strategy.supports_cuda_graph:
        raise UserError(
            f"--cuda_graph records a micro-batch of dp, not of {flags.strategy}: leave it out."
        )
    if flags.load_in_4bit and not strategy.supports_4bit:
        raise UserError(
            f"--load_in_4bit does not work under {flags.strategy}, which would have to shard "
            "bitsandbytes' packed weights: use dp, zero1, zero2, offload or fsdp."
        )
    if flags.lora_dora and not strategy.supports_dora(flags.load_in_4bit):
        raise UserError(
            f"--lora_dora does not work under {flags.strategy} with --load_in_4bit: peft computes "
            "the first norms from whole weights in 4 bits. Use dp, zero1, zero2 or offload."
            if flags.load_in_4bit
            else f"--lora_dora does not work under {flags.strategy}, where a weight is whole only "
            "while its own layer computes, and DoRA computes norms of it: use dp, zero1, zero2, "
            "offload or fsdp."
        )
    if flags.rank_shares == AUTO and flags.compile and not strategy.whole_parameters:
        raise UserError(
            f"--rank_shares auto cannot tell computing from waiting in the compiled layers of "
            f"{flags.strategy}: give shares such as 2,1, or leave --compile out."
        )
    optimizer = OPTIMIZERS[flags.optim]
    if flags.rank_shares and (reason := optimizer.why_not_unequal(strategy.layout)):
        raise UserError(f"--optim {flags.optim} under {flags.strategy} needs equal GPUs: {reason}.")
    if reason := strategy.why_not(optimizer):
        raise UserError(f"--optim {flags.optim} does not work under {flags.strategy}: {reason}.")


def check_prove(flags: Options, resolved: Resolved) -> None:
    """Check that --prove may reduce gradients in fp32."""
    if flags.prove is not None and flags.reduce_dtype in ("bf16", "fp16"):
        file, _, key = resolved.sources.get("reduce_dtype", "").rpartition(": ")
        advice = f"remove {key} from {file}" if file else "leave --reduce_dtype out"
        raise UserError(f"--prove compares gradients in fp32: {advice}.")


def _is_set(flags: Options, flag: str) -> bool:
    if flag == "no_eval":
        return not flags.eval
    if flag == "export_dtype":
        return flags.export_dtype != "fp32"
    value = getattr(flags, flag)
    return bool(value) or value == ""  # --resume without a path


# ----------------------------------------------------------------------------- files and folders


def is_local_model(name: str) -> bool:
    """Return whether --model is a folder or is written like a path, and is no name on the hub."""
    if name == EMBEDDED_MODEL:  # also next to a folder of this name
        return False
    return os.path.isdir(name) or name.startswith((".", "/")) or name.count("/") > 1


def is_local_dataset(name: str) -> bool:
    """Return whether --dataset is a file or folder, or is written like one; else it is a name."""
    if name in ("pydocs", "wikitext"):
        return False
    # The hub has no name that ends like a file, except behind an owner: OWNER/NAME.en.
    looks_like_file = Path(name).suffix[1:].islower() and "/" not in name
    is_file = looks_like_file or name.endswith(DATA_SUFFIXES)
    return is_file or os.path.exists(name) or is_local_model(name)


def scratch_without_hub(model_settings: ModelSettings) -> bool:
    """Return whether the model needs nothing from the hub: GPT-2 with random weights."""
    return model_settings.from_scratch and model_settings.model in GPT2_SHAPES


def names_on_hub(model: str, datasets: Iterable[Dataset]) -> tuple[str | None, list[str]]:
    """Return the names on the hub of the model, or None, and of the datasets."""
    is_on_hub = model != EMBEDDED_MODEL and not is_local_model(model)
    return model if is_on_hub else None, datasets_on_hub(datasets)


def datasets_on_hub(datasets: Iterable[Dataset]) -> list[str]:
    """Return the names on the hub of those datasets that are there."""
    return [
        "Salesforce/wikitext" if name == "wikitext" else name
        for name, _ in datasets
        if name != "pydocs" and not is_local_dataset(name)
    ]


def check_data_paths(data: DataSettings) -> None:
    """Check that files and folders of data, and the chat template, exist and fit other flags."""
    names = [name for name, _ in data.dataset]
    paths = [("--dataset", name) for name in names if is_local_dataset(name)]
    if data.validation_file:
        paths.append(("--validation_file", data.validation_file))
    if paths:
        from distributed_training.files.folders import files_of
    for flag, name in paths:
        try:
            files_of(Path(name), f"{flag} {name}", data.include)
        except UserError as error:
            from distributed_training.cli.model_folders import or_of_hub  # after an error

            advice = or_of_hub(name) if flag == "--dataset" else ""
            raise UserError(f"{str(error).removesuffix('.')}{advice}.") from error
        if os.path.isfile(name) and not os.path.getsize(name):
            raise UserError(f"{flag} {name} is empty.")
    for flag in ("train_split", "eval_split", "dataset_revision"):
        if getattr(data, flag) and not datasets_on_hub(data.dataset):
            raise UserError(
                f"--{flag} is for datasets of the hub, and --dataset {data.dataset_name} is not "
                "one: leave it out."
            )
    if data.include and not any(Path(name).is_dir() for _, name in paths):
        raise UserError(f"--include {data.include} is for a folder of data: leave it out.")
    if data.chat_template:
        read_text("--chat_template", data.chat_template)


def check_output_dir(output: OutputSettings, eval_only: bool) -> None:
    """Check --output_dir and --logging_dir: writable, without another run unless flags allow it."""
    if output.logging_dir and "tensorboard" in output.report_to:
        check_place("--logging_dir", Path(output.logging_dir))
    if output.output_dir is None:
        return
    folder = Path(output.output_dir)
    check_place("--output_dir", folder)
    check_files_of_run(folder, saves=not (output.no_save or eval_only))
    if holds_a_run(folder) and not output.overwrite and output.resume is None:
        raise UserError(
            f"--output_dir {folder} holds another run: --resume continues it, --overwrite replaces "
            "it; or name another folder."
        )


def check_replay(output_dir: str) -> None:
    """Check that the folder of --replay holds a run, and is writable."""
    folder = Path(output_dir)
    if not holds_a_run(folder):
        raise UserError(f"--replay: --output_dir {folder} holds no run: name the folder of a run.")
    check_place("--output_dir", folder)


def check_place(flag: str, folder: Path) -> None:
    """Check that a folder is writable, or can be created; `flag` names it in messages."""
    whole = folder.absolute()
    there = next(path for path in (whole, *whole.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise UserError(f"{flag} {folder}: {there} is a file or a broken link: name a folder.")
    if not os.access(there, os.W_OK):
        raise UserError(f"{flag} {folder}: {there} is not writable.")


def check_files_of_run(folder: Path, saves: bool) -> None:
    """Check that the files that a run writes can be written, if they exist.

    Args:
        folder: the run's output folder.
        saves: whether the run may save checkpoints.
    """
    for name in ("results.json", "metrics.jsonl", "ds_config.json", ".lock"):
        path = folder / name
        if os.path.lexists(path) and not path.is_file():
            raise UserError(
                f"--output_dir {folder}: {name} is not a file: remove it, or name another folder."
            )
    checkpoints = folder / "checkpoints"
    if saves and os.path.lexists(checkpoints):
        check_place("--output_dir", checkpoints)


def holds_a_run(folder: Path) -> bool:
    """Return whether a folder holds a run, other than one that failed before it trained."""
    try:
        status = json.loads((folder / "results.json").read_text(encoding="utf-8"))["status"]
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return True
    metrics = folder / "metrics.jsonl"
    trained = metrics.is_file() and metrics.stat().st_size > 0
    return status != "failed" or trained or (folder / "checkpoints").exists()


def check_export_folder(
    output: OutputSettings, eval_only: bool, model: str, data: DataSettings
) -> None:
    """Check the folder of the export, which is replaced as a whole: no input, no other's files."""
    if output.no_export or eval_only or not (output.export_hf or output.output_dir):
        return
    flag = "--export_hf" if output.export_hf else "The export,"
    folder = Path(output.export_hf or f"{output.output_dir}/hf").absolute()
    check_place(flag, folder)
    needed = {".": "the current folder", output.output_dir: "--output_dir"}
    needed |= {output.resume: "--resume"}
    needed |= {model: "--model"} if is_local_model(model) else {}
    needed |= {name: "--dataset" for name, _ in data.dataset if is_local_dataset(name)}
    needed |= {data.validation_file: "--validation_file"}
    for path, what in ((Path(name).resolve(), what) for name, what in needed.items() if name):
        if folder.resolve() in (path, *path.parents):
            raise UserError(
                f"{flag} {folder} would replace {what}: name another folder with --export_hf."
            )
    if output.export_hf and os.path.isdir(folder) and any(folder.iterdir()):
        described = any((folder / f"{kind}config.json").is_file() for kind in ("", "adapter_"))
        exported = described and (folder / "README.md").is_file()
        if not exported or not (output.overwrite or output.resume is not None):
            advice = "; or --overwrite." if exported else "."
            raise UserError(f"{flag} {folder} is not empty: name another folder{advice}")


def check_nvme_path(nvme_path: str | None) -> None:
    """Check that --nvme_path exists; `make_nvme_folder` checks its size later."""
    if nvme_path and not os.path.isdir(nvme_path):
        raise UserError(f"--nvme_path {nvme_path}: no such folder: create it on an NVMe disk.")
