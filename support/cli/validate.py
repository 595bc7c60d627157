"""Checks before the model is loaded; each fails with one line that says what to do.

The checks of the first group run before torch is imported, so that they finish within a second.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path

from support import process
from support.cli.arguments import Arguments
from support.cli.flags import ignored_flags, parse_arguments, uses_nvme
from support.cli.run_file import as_yaml
from support.cluster import launch as launching
from support.cluster.launch import Launch
from support.errors import EXIT_COMPLETED, MissingRequirement, UserError
from support.files.atomic import TemporaryFolder
from support.files.folders import files_of
from support.files.user_files import read_text
from support.known_models import EMBEDDED_MODEL, GPT2_SHAPES
from support.memory import architectures
from support.memory import estimate as planner
from support.redaction import redact
from support.strategy import STRATEGIES
from support.units import GB

PROBE_SECONDS = 4  # the hub answers within 1 s; the clients' own retries take 23 s to 11 minutes
NVME_PREFIX = "distributed_training_nvme_"  # of the names of folders with infinity's files
DATA_SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".parquet")
EVENT_FILES = "events.out.tfevents.*"  # TensorBoard's


# ------------------------------------------------------------------------- before torch is imported


def start(argv: list[str]) -> tuple[Arguments, Launch]:
    """Read the arguments and the launcher's environment, run the first checks, tune the process.

    If a check fails, the process exits with one line and code 2. With --print_config it prints the
    flags and exits with code 0.

    Args:
        argv: the arguments, without the program's name.
    Returns:
        The arguments, which cannot be changed, and this process's place in the run.
    """
    process.protect_output()
    verbose = "--verbose" in argv
    # For errors while libraries are imported: a broken installation, or too little memory.
    sys.excepthook = lambda _kind, error, _traceback: launching.exit_before_start(error, verbose)
    try:
        if not os.path.isdir(os.curdir):
            raise UserError("The current folder was removed: change to another one.")
        # Before the arguments: the DeepSpeed file's train_batch_size depends on the world size.
        launch = launching.detect_launch()
        args = parse_arguments(argv)
        if args.print_config:
            print(redact(as_yaml(args)), end="")
            process.check_output()
            sys.exit(EXIT_COMPLETED)
        launching.tune_process(args, launch)
        if args.simulate_gpus:
            launch = launching.simulated(launch, args.simulate_gpus)
        check_model_path(args)
        check_data_paths(args)
        if args.prefetch and launch.world_size > 1:
            raise UserError(
                "--prefetch fills the cache from one process: start it with python, "
                "without a launcher."
            )
        # --prefetch writes no results, and may run where the run's disks and packages are missing.
        if not args.prefetch:
            check_run(args)
        hub_offline, hub_problem = ask_hub(args, launch)
        args = args.replace(hub_offline=hub_offline, hub_problem=hub_problem)
        for line in ignored_flags(args) if launch.is_main and not args.quiet else ():
            print(f"ℹ️  {line}")
    except UserError as error:
        launching.exit_before_start(error, verbose)
    return args, launch


def check_run(args) -> None:
    """Check what the run needs: writable folders, an NVMe folder, packages.

    Raises:
        UserError: a folder cannot be used.
        MissingRequirement: a package is missing.
    """
    if not args.check:  # --check may be given with the folders of an existing run
        check_output_dir(args)
        check_export_folder(args)
        check_logging_dir(args)
    check_nvme_path(args)
    check_packages(args)


def is_local_model(name: str) -> bool:
    """Return whether --model is a folder or is written like a path, and is no name on the hub."""
    return os.path.isdir(name) or name.startswith((".", "/", "~")) or name.count("/") > 1


def is_local_dataset(name: str) -> bool:
    """Return whether --dataset is a file or folder, or is written like one; else it is a name."""
    if name in ("pydocs", "wikitext"):
        return False
    return (
        os.path.exists(name)
        or name.startswith((".", "/", "~"))
        or name.endswith(DATA_SUFFIXES)
        or name.count("/") > 1
    )


def check_model_path(args) -> None:
    """Check that a model given as a folder exists and is a Hugging Face model.

    Raises:
        UserError: there is no such folder, or it holds adapters only, no config.json or an invalid
            one.
    """
    if not is_local_model(args.model):
        return
    folder = Path(args.model).expanduser()
    if not folder.is_dir():
        raise UserError(f"--model {args.model}: no such folder.")
    if not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
        raise UserError(
            f"--model {args.model}: the folder holds adapters only: train with --merge_lora to "
            "have the whole model, or go on with their run (--resume, "
            "and --lora_r and --model as then)."
        )
    if not (folder / "config.json").is_file():
        raise UserError(
            f"--model {args.model}: the folder has no config.json, "
            "so it holds no Hugging Face model."
        )
    architectures.check_config(str(folder / "config.json"))


def check_data_paths(args) -> None:
    """Check that files and folders of data, and the chat template, exist and can be read.

    Raises:
        UserError: a file is missing, not readable or empty, or --include has no folder.
    """
    paths = {
        "--dataset": args.dataset if is_local_dataset(args.dataset) else None,
        "--validation_file": args.validation_file,
    }
    for flag, name in paths.items():
        if name:
            check_data_path(flag, name, args.include)
    if args.include and not any(
        name and Path(name).expanduser().is_dir() for name in paths.values()
    ):
        raise UserError(
            f"--include {args.include} chooses among the files of a folder, and there is none: "
            "leave it out."
        )
    if args.chat_template:
        read_text("--chat_template", args.chat_template)


def check_data_path(flag: str, name: str, include: str | None) -> None:
    """Check one file or folder of data.

    Args:
        flag: the flag that names it.
        name: the flag's value.
        include: patterns of --include, or None.
    Raises:
        UserError: it does not exist, has no files with data, or cannot be read.
    """
    path = Path(name).expanduser()
    for file in files_of(path, f"{flag} {name}", include):
        if not os.access(file, os.R_OK):
            raise UserError(f"{flag} {name}: {file} may not be read by this user.")
    if path.is_file() and not path.stat().st_size:
        raise UserError(f"{flag} {name} is empty.")


def check_output_dir(args) -> None:
    """Check that --output_dir is writable, and holds no other run unless the flags allow it.

    Raises:
        UserError: it is not writable, or holds a run and neither --resume nor --overwrite is given.
    """
    if args.output_dir is None:
        return
    folder = Path(args.output_dir)
    check_place("--output_dir", folder)
    if not (args.overwrite or args.resume is not None) and holds_a_run(folder):
        raise UserError(
            f"--output_dir {folder} holds another run: --resume continues it, --overwrite "
            "replaces it; or name another folder."
        )


def check_place(flag: str, folder: Path) -> None:
    """Check that a folder exists and is writable, or can be created.

    Args:
        flag: the flag that names it, for messages.
        folder: the folder; its parents need not exist.
    Raises:
        UserError: neither is true.
    """
    for ancestor in (folder.absolute(), *folder.absolute().parents):
        if ancestor.is_symlink() and not ancestor.exists():
            raise UserError(
                f"{flag} {folder}: {ancestor} is a link to nothing, or to itself: "
                "name another folder."
            )
        if ancestor.exists():
            break
    if not ancestor.is_dir():
        raise UserError(f"{flag} {folder}: {ancestor} is a file: name a folder.")
    if not os.access(ancestor, os.W_OK):
        raise UserError(f"{flag} {folder}: {ancestor} is not writable.")


def holds_a_run(folder: Path) -> bool:
    """Return whether a folder holds a run, other than one that failed before it trained.

    A results.json that cannot be read counts as a run.
    """
    results = folder / "results.json"
    if not results.is_file():  # reading a pipe would block
        return os.path.lexists(results)
    try:
        status = json.loads(results.read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True
    trained = (folder / "checkpoints").exists() or any(
        file.stat().st_size for file in folder.glob("metrics.jsonl")
    )
    return status != "failed" or trained


def check_export_folder(args) -> None:
    """Check the folder of the export, which is replaced as a whole.

    Raises:
        UserError: the folder is not writable; it is or contains something that the run needs; or it
            is not empty, unless it holds an earlier export and --overwrite or --resume is given.
    """
    if args.no_export or args.eval_only or not (args.export_hf or args.output_dir):
        return
    folder = Path(args.export_hf or Path(args.output_dir) / "hf").absolute()
    description = f"--export_hf {args.export_hf}" if args.export_hf else f"The export, {folder},"
    if not folder.is_file():
        check_place("--export_hf" if args.export_hf else "The export,", folder)
    needed = {
        "the current folder": ".",
        "--output_dir": args.output_dir,
        "--resume": args.resume,
        "--model": args.model if is_local_model(args.model) else None,
        "--dataset": args.dataset if is_local_dataset(args.dataset) else None,
    }
    for name, path in needed.items():
        if path and folder.resolve() in (
            needed_path := Path(path).expanduser().resolve(),
            *needed_path.parents,
        ):
            raise UserError(
                f"{description} would replace {name}: name another folder with --export_hf."
            )
    if folder.exists() and (not folder.is_dir() or os.path.ismount(folder)):
        raise UserError(
            f"{description} is a {'file' if folder.is_file() else 'mount point'}: "
            "name a folder in it or beside it."
        )
    if args.export_hf and folder.is_dir() and any(folder.iterdir()):
        described = (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()
        exported = described and (folder / "README.md").is_file()
        if not exported or not (args.overwrite or args.resume is not None):
            raise UserError(
                f"{description} is not empty: name another folder"
                + ("; or --overwrite." if exported else ".")
            )


def check_logging_dir(args) -> None:
    """Check that --logging_dir is writable and has no curves of another run.

    TensorBoard would show them as part of this run.

    Raises:
        UserError: it is not writable, or has curves and neither --resume nor --overwrite is given.
    """
    if args.logging_dir is None:
        return
    check_place("--logging_dir", Path(args.logging_dir))
    if args.overwrite or args.resume is not None:
        return
    folder = Path(args.logging_dir)
    if any(folder.glob(EVENT_FILES)):
        raise UserError(
            f"--logging_dir {folder} holds the curves of another run: name another folder, "
            "or --overwrite."
        )


def check_packages(args) -> None:
    """Check that the optional packages that the flags need are installed.

    Raises:
        MissingRequirement: one is missing.
    """
    for name in args.report_to:
        if importlib.util.find_spec(name) is None:
            raise MissingRequirement(f"--report_to {name} needs it: pip install {name}.")
    if args.lora_r and importlib.util.find_spec("peft") is None:
        raise MissingRequirement("--lora_r needs peft: pip install peft.")


def check_nvme_path(args) -> None:
    """Check that infinity's folder exists; `make_nvme_folder` checks its size later.

    Raises:
        UserError: there is no such folder.
    """
    if (
        STRATEGIES[args.strategy].uses_nvme
        and args.nvme_path is not None
        and not Path(args.nvme_path).is_dir()
    ):
        raise UserError(
            f"--nvme_path {args.nvme_path}: no such folder. Create it, "
            "or name a folder on a local NVMe disk."
        )


def ask_hub(args, launch: Launch) -> tuple[bool, str | None]:
    """Decide whether the hub is used, and report with --check what is missing without it.

    Returns:
        Whether the hub must not be used; and with --check the text of the error, or None.
    Raises:
        UserError: without --check; see `reach_hub`.
    """
    try:
        return not reach_hub(args, launch), None
    except UserError as error:
        if not args.check:
            raise
        return True, redact(str(error))


def reach_hub(args, launch: Launch) -> bool:
    """Decide whether the Hugging Face hub is used, before any of its libraries is imported.

    One probe replaces the clients' retries. If the hub does not answer, HF_HUB_OFFLINE is set, with
    which the libraries load from the cache without delay. Only the first rank of a node uses the
    hub; the others load from the cache that it has filled. A streamed dataset is not cached, so
    every rank reads it from the hub.

    Returns:
        True if the hub may be used.
    Raises:
        UserError: the hub does not answer, and the cache lacks a file that the run needs.
    """
    model = args.model if args.model != EMBEDDED_MODEL and not is_local_model(args.model) else None
    dataset = {"wikitext": "Salesforce/wikitext", "pydocs": None}.get(args.dataset, args.dataset)
    dataset = None if dataset and is_local_dataset(dataset) else dataset
    every_rank = args.streaming and dataset  # every rank reads a streamed dataset
    if not (model or dataset) or not (launch.is_node_leader or every_rank):
        os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is needed from the hub
        return False
    set_offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if not set_offline and answers(endpoint):
        return True
    os.environ["HF_HUB_OFFLINE"] = "1"
    reason = (
        "HF_HUB_OFFLINE is set"
        if set_offline
        else f"The Hugging Face hub ({endpoint}) cannot be reached"
    )
    no_model = (
        model is not None
        and not cached_repository("models", model)
        and not scratch_without_hub(args)
    )
    no_data = dataset is not None and not cached_repository("datasets", dataset)
    if no_model or no_data:
        raise UserError(
            f"{reason}, and "
            f"{_ways_without_hub(args, model if no_model else None, dataset if no_data else None)}"
        )
    missing_files = (
        missing_of_model(model, not args.from_scratch)
        if model and not scratch_without_hub(args)
        else []
    )
    if missing_files:
        raise UserError(
            f"{reason}, and the cache has no {' and no '.join(missing_files)} of {model}. Run "
            f"this where there is a network (a cluster's head node): {prefetch_command(args)}"
        )
    if launch.is_main and not (set_offline or args.quiet):
        print(redact(f"ℹ️  {reason}: using what is in the cache."))
    return False


def prefetch_command(args) -> str:
    """Return the command that downloads what this run needs.

    It is meant for a machine that has a network and shares the cache's disk, such as a head node.
    """
    flags = ["--model", args.model, "--dataset", args.dataset]
    for flag in (
        "dataset_config",
        "text_column",
        "validation_file",
        "chat_template",
        "cache_dir",
        "max_bad_rows",
        "include",
    ):
        flags += [f"--{flag}", str(getattr(args, flag))] if flag in args.given else []
    flags += ["--from_scratch"] if args.from_scratch else []
    return shlex.join(
        [
            "env",
            f"HF_HOME={huggingface_home()}",
            "python",
            "real_model_example.py",
            "--prefetch",
            *flags,
        ]
    )


def _ways_without_hub(args, model: str | None, dataset: str | None) -> str:
    """Return the end of a message: what is missing in the cache, and the three remedies."""
    missing = [f"model {model}"] if model else []
    no_file = "" if args.dataset == "wikitext" else " (and no file of that name is here)"
    missing += [f"dataset {dataset}{no_file}"] if dataset else []
    local_paths = ["a local folder to --model"] * bool(model) + [
        "a file or folder to --dataset"
    ] * bool(dataset)
    hubless_flags = ["--from_scratch"] * bool(model and args.model in GPT2_SHAPES) + [
        "--dataset pydocs"
    ] * bool(dataset)
    return (
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in the cache. Three "
        "ways on: where there is a network (a cluster's head node) run "
        f"`{prefetch_command(args)}`, then set HF_HUB_OFFLINE=1; pass "
        f"{' and '.join(local_paths)}; or use {' '.join(hubless_flags) or '--model tiny-gpt2'}, "
        "which needs no hub."
    )


def scratch_without_hub(args) -> bool:
    """Return whether the model needs nothing from the hub: GPT-2 with random weights.

    The shapes of GPT-2's sizes are in support/cli/flags.py (GPT2_SHAPES).
    """
    return args.from_scratch and args.model in GPT2_SHAPES


def answers(endpoint: str) -> bool:
    """Return whether an HTTP server answers at `endpoint` within PROBE_SECONDS.

    The proxy variables of the environment are used. An HTTP error counts as an answer.
    """
    if not endpoint.startswith(("http://", "https://")):
        return False
    answered = threading.Event()
    # urllib takes user:password for a part of the host's name.
    endpoint = re.sub("//[^/?#]*@", "//", endpoint)

    def ask() -> None:
        try:
            urllib.request.urlopen(
                urllib.request.Request(endpoint, method="HEAD"), timeout=PROBE_SECONDS
            ).close()
        except urllib.error.HTTPError:
            pass  # an error page is an answer
        except (OSError, ValueError, http.client.HTTPException):
            return
        answered.set()

    # In a thread, to limit the total time: the name lookup and each address have their own time
    # limits.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return answered.is_set()


def huggingface_home() -> Path:
    """Return the folder with the caches of the Hugging Face libraries (HF_HOME)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()


def cache_folder(cache_dir: str | None) -> Path:
    """Return the folder of tokenized datasets and of the embedded tokenizer (--cache_dir)."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    return huggingface_home() / "distributed_training"


def cached_repository(kind: str, name: str) -> bool:
    """Return whether the cache holds a repository.

    Args:
        kind: "models" or "datasets".
        name: of the repository.
    """
    if kind == "datasets":  # offline, the prepared Arrow files are loaded
        prepared = Path(
            os.environ.get("HF_DATASETS_CACHE") or huggingface_home() / "datasets"
        ).expanduser()
        return (prepared / name.replace("/", "___").lower()).is_dir() or (
            prepared / name.replace("/", "___")
        ).is_dir()
    return any(cached_model(name).glob("snapshots/*/*"))


def cached_model(name: str) -> Path:
    """Return the folder of a model in the hub's cache, whether or not it exists."""
    env = os.environ
    hub = Path(
        env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or huggingface_home() / "hub"
    ).expanduser()
    return hub / f"models--{name.replace('/', '--')}"


def missing_of_model(name: str, with_weights: bool) -> list[str]:
    """Return which kinds of files the cached snapshot of a model lacks.

    Other programs cache parts of a model, for example the weights only.

    Args:
        name: of the model on the hub.
        with_weights: the run needs the weights.
    Returns:
        Descriptions for a message, such as "tokenizer files"; empty also if the cache has no
        branch "main".
    """
    folder = cached_model(name)
    try:
        snapshot = (
            folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        )
    except OSError:
        return []  # the cache holds a commit without a branch; the libraries decide
    # exists(): an interrupted download leaves dangling links.
    files = {file.name for file in snapshot.glob("*") if file.exists()}
    missing_files = [] if "config.json" in files else ["config.json"]
    if not any(
        re.fullmatch(r"tokenizer\.json|vocab.*|.*\.model|.*\.tiktoken", file) for file in files
    ):
        missing_files.append("tokenizer files")
    if with_weights and not any(
        re.fullmatch(r".*\.safetensors|pytorch_model.*\.bin", file) for file in files
    ):
        missing_files.append("weights")
    return missing_files


# ------------------------------------------------------------------------------ with torch imported


def check_visible_gpus(launch: Launch, visible: int) -> int:
    """Choose this rank's GPU.

    Args:
        launch: this process's place in the run.
        visible: number of GPUs that torch sees.
    Returns:
        The index of the GPU among the visible ones.
    Raises:
        UserError: this node has more ranks than visible GPUs.
    """
    if launch.launcher == "simulated":
        return 0
    if launch.launcher == "srun" and (visible == 1 or "SLURM_GPUS_PER_TASK" in os.environ):
        return 0  # Slurm shows each task its own GPUs (--gpus-per-task, --gpu-bind)
    if launch.local_world_size > visible:
        raise UserError(
            f"{launch.local_world_size} ranks were started on this node, but only {visible} "
            f"GPU(s) are visible: start {visible} (--nproc_per_node, --num_gpus), "
            "or check CUDA_VISIBLE_DEVICES."
        )
    return launch.local_rank


def choose_precision(requested: str, device) -> str:
    """Resolve --precision for this device.

    Args:
        requested: "auto", "fp32", "bf16" or "fp16".
        device: a torch.device.
    Returns:
        "fp32", "bf16" or "fp16".
    Raises:
        UserError: the device does not support the requested precision.
    """
    import torch

    if device.type == "cuda":
        has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
        if requested == "bf16" and not has_bf16:
            name = torch.cuda.get_device_name(device)
            raise UserError(
                f"--precision bf16 needs an Ampere GPU or newer, and this is a {name}: use fp16, "
                "or fp32."
            )
        return ("bf16" if has_bf16 else "fp16") if requested == "auto" else requested
    if requested == "fp16":
        raise UserError("--precision fp16 needs a GPU: on a CPU use bf16, or fp32.")
    return ("bf16" if cpu_computes_bf16() else "fp32") if requested == "auto" else requested


def cpu_computes_bf16() -> bool:
    """Return whether this CPU has bf16 instructions (avx512_bf16 or amx_bf16).

    Without them, bf16 is emulated and slow.
    """
    try:
        flags = next(
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("flags")
        ).split()
    except (OSError, StopIteration):
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def planned_work(args, ctx, model: architectures.Architecture) -> planner.Workload:
    """Describe this run for the memory estimate (support/memory/estimate.py).

    Raises:
        UserError: the estimate does not support the run: it uses the user's own DeepSpeed or FSDP
            file, or only evaluates.
    """
    if args.ds_config or args.fsdp_config or args.eval_only:
        raise UserError(
            "The planner knows this project's own DeepSpeed files, FSDP's defaults, and training."
        )
    return planner.Workload(
        model,
        ctx.world_size,
        args.batch_size,
        args.seq_length,
        ctx.precision,
        args.gradient_checkpointing,
        args.gradient_accumulation_steps,
        ctx.device.type,
        0 if ctx.simulated else None,
        planner.adapters(model, args.lora_r, args.lora_targets),
        args.fused_gelu,
    )


def memory_limits(ctx) -> planner.Limits:
    """Return the memory limits of this rank's device and of its node, in bytes."""
    import psutil

    from support.memory.measure import memory_limit

    ranks = 1 if ctx.simulated else ctx.launch.local_world_size
    if ctx.device.type == "cuda":
        return planner.Limits(memory_limit(ctx.device), psutil.virtual_memory().total, None, ranks)
    return planner.Limits(memory_limit(ctx.device) // ranks)  # the ranks share the host's memory


def predicted_bytes(args, ctx, spec) -> dict[str, int] | None:
    """Return the memory estimate of this run.

    Returns:
        Bytes by kind of memory; None if the estimate does not support the architecture or the
        configuration.
    """
    try:
        model = architectures.read_architecture(spec.config.to_dict(), args.model)
        estimate = asdict(planner.predict(planned_work(args, ctx, model), args.strategy))
    except UserError:
        return None
    return {name: size for name, size in estimate.items() if isinstance(size, int)}


def ways_to_fit(args, ctx, spec) -> list[str]:
    """Return lines of advice with estimated memory, for a run that ran out of memory.

    Raises:
        UserError: the estimate does not support the architecture or the configuration.
    """
    model = architectures.read_architecture(spec.config.to_dict(), args.model)
    return planner.describe_ways(planned_work(args, ctx, model), args.strategy, memory_limits(ctx))


def needed_ops(strategy: str, device) -> dict[str, list[Path]]:
    """Return DeepSpeed's C++ ops that this strategy needs, with the folders of their builds.

    A folder may not exist yet, or hold an unfinished build.

    Args:
        strategy: a DeepSpeed strategy.
        device: a torch.device.
    """
    from torch.utils.cpp_extension import get_default_build_root

    needed = ["deepspeed_shm_comm"] if device.type == "cpu" else []
    needed += ["cpu_adam"] if STRATEGIES[strategy].offloads else []
    if STRATEGIES[strategy].uses_nvme:
        needed += ["async_io", "pin_memory"] if _has_pin_memory_op() else ["async_io"]
    if own := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return {op: [Path(own) / op] for op in needed}
    # torch has one build folder for each CUDA version.
    builds = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}_*"
    return {op: list(Path(get_default_build_root()).glob(f"{builds}/{op}")) for op in needed}


def _has_pin_memory_op() -> bool:
    """Return whether this DeepSpeed's async_io loads an op pin_memory, as 0.19 does.

    DeepSpeed is not imported: its files are tested.
    """
    package = importlib.util.find_spec("deepspeed")
    folders = package.submodule_search_locations if package else ()
    return any(
        (Path(folder) / "ops" / "op_builder" / "pin_memory.py").exists() for folder in folders
    )


def ops_to_compile(strategy: str, device) -> list[str]:
    """Return the ops of `needed_ops` that are not compiled yet on this machine."""
    op_folders = needed_ops(strategy, device)
    return [
        op
        for op, folders in op_folders.items()
        if not any(file for folder in folders for file in folder.glob("*.so"))
    ]


def check_requirements(args, device) -> None:
    """Check what a DeepSpeed strategy needs of this machine, before any data is read.

    Raises:
        MissingRequirement: the compiler is missing; or, if something is offloaded to NVMe, libaio
            or the CUDA toolkit.
    """
    check_compiler(args.strategy, device)
    if uses_nvme(args.ds_config_dict):
        check_async_io(device)


def check_compiler(strategy: str, device) -> None:
    """Check for the C++ compiler that DeepSpeed needs.

    DeepSpeed compiles its CPU Adam at the first use of offload and infinity, and on a CPU its
    shared-memory collectives.

    Raises:
        MissingRequirement: there is no C++ compiler.
    """
    compiler = os.environ.get("CXX", "c++")
    if (device.type == "cpu" or STRATEGIES[strategy].offloads) and shutil.which(compiler) is None:
        raise MissingRequirement(
            f"--strategy {strategy} compiles parts of DeepSpeed at its first use, but there is no "
            f"C++ compiler ({compiler}): apt install build-essential, "
            "or module load gcc on a cluster. dp and fsdp need none."
        )


def check_async_io(device) -> None:
    """Check that DeepSpeed's async_io op, with which infinity reads and writes NVMe, can be built.

    On a GPU, DeepSpeed compiles the op with the headers of the CUDA toolkit; CPU Adam (offload)
    needs none. `is_compatible` tests for libaio only. Without the toolkit, `load` fails later, when
    it joins a path to CUDA_HOME = None (deepspeed/ops/op_builder/async_io.py, include_paths).

    Raises:
        MissingRequirement: DeepSpeed's async_io op cannot be built here.
    """
    import torch
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import CUDA_HOME

    compiles_for_cuda = device.type == "cuda" and not torch.version.hip
    if compiles_for_cuda and CUDA_HOME is None and not installed_ops.get("async_io"):
        raise MissingRequirement(
            "--strategy infinity on a GPU compiles with the CUDA toolkit, which was not found: "
            "install the one of torch's CUDA version, "
            "or set CUDA_HOME (module load cuda on a cluster)."
        )
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise MissingRequirement(
            "--strategy infinity needs libaio, which is missing here: apt install libaio-dev "
            "(without root: conda install libaio, "
            "then set CFLAGS and LDFLAGS to its include and lib folders)."
        )


def make_nvme_folder(
    path: str | None, parameters: int, local_world_size: int, world_size: int
) -> TemporaryFolder:
    """Create this job's own folder for infinity's files, and check that they will fit.

    The folders of killed jobs are removed first.

    Args:
        path: --nvme_path; None for the temporary folder.
        parameters: number of parameters of the whole model.
        local_world_size: ranks on this node.
        world_size: all ranks; this node stores local_world_size / world_size of the model.
    Returns:
        A new folder, which the caller removes at the end.
    Raises:
        UserError: `path` does not exist or is not writable.
        MissingRequirement: it has too little free space, or its file system has no direct I/O.
    """
    parent = Path(path or tempfile.gettempdir())
    try:
        temporary = TemporaryFolder(parent, NVME_PREFIX, mode=0o700)
    except OSError as error:
        raise UserError(
            f"--nvme_path {parent} cannot be written: {error.strerror}. Name another folder."
        ) from error
    try:
        # At most 20 bytes a parameter: fp32 master, two moments and gradient, and the working copy.
        needed = 20 * parameters * local_world_size // world_size
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise MissingRequirement(
                f"--nvme_path {parent} has {free / GB:.2f} GB free, and infinity needs "
                f"{needed / GB:.2f} GB there: free some space, or name another folder."
            )
        check_direct_io(str(temporary.path))
    except MissingRequirement:
        temporary.remove()
        raise
    return temporary


def check_direct_io(folder: str) -> None:
    """Check that a folder's file system supports direct I/O, which infinity uses.

    Raises:
        MissingRequirement: it does not.
    """
    try:
        os.close(
            os.open(Path(folder) / "probe", os.O_CREAT | os.O_RDWR | getattr(os, "O_DIRECT", 0))
        )
    except OSError as error:
        raise MissingRequirement(
            f"--nvme_path {Path(folder).parent}: its file system cannot do direct I/O "
            f"({error.strerror}), as NFS and tmpfs often cannot: name a folder on a local disk."
        ) from error
