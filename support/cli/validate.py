"""What can be known to fail before the model loads: each check ends in one line that says what to
do.

The checks of the first group run before torch is imported, so that they answer within a second.
"""

from __future__ import annotations

import argparse
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
from support.cli.flags import EMBEDDED_MODEL, ignored_flags, parse_arguments, uses_nvme
from support.cli.run_file import as_yaml
from support.cluster import launch as launching
from support.cluster.launch import Launch
from support.errors import EXIT_COMPLETED, MissingRequirement, UserError
from support.files.atomic import TemporaryFolder
from support.files.folders import files_of
from support.files.user_files import read_text
from support.memory import architectures
from support.memory import estimate as planner
from support.redaction import redact

PROBE_SECONDS = 4  # the hub answers within one; the clients' own retries take 23 s to 11 minutes
NVME_PREFIX = "distributed_training_nvme_"  # of the folders that hold infinity's files
DATA_SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".parquet")
EVENT_FILES = "events.out.tfevents.*"  # TensorBoard's
GPT2_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


# ------------------------------------------------------------------------- before torch is imported


def start(argv: list[str]) -> tuple[argparse.Namespace, Launch]:
    """Read the arguments and the launcher's environment, check what can be checked, tune the
    process.

    Ends the process with exit code 2 and one line if anything is wrong.
    Returns:
        The arguments and this process's place in the run.
    """
    process.protect_output()
    verbose = "--verbose" in argv
    # For what happens while libraries are imported: a broken installation, or too little memory.
    sys.excepthook = lambda _kind, error, _traceback: launching.exit_before_start(error, verbose)
    try:
        if not os.path.isdir(os.curdir):
            raise UserError("The current folder was removed: change to another one.")
        # The launcher comes first: the DeepSpeed file's total batch size depends on the number of
        # ranks.
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
        if (
            not args.prefetch
        ):  # it writes no results, and runs where the disks and packages of the run may be missing
            check_run(args)
        args.hub_offline, args.hub_problem = ask_hub(args, launch)
        for line in ignored_flags(args) if launch.is_main and not args.quiet else ():
            print(f"ℹ️  {line}")
    except UserError as error:
        launching.exit_before_start(error, verbose)
    return args, launch


def check_run(args) -> None:
    """What the run itself needs: folders to write to, an NVMe folder, packages."""
    if not args.check:  # which may look at a run that is there
        check_output_dir(args)
        check_export_folder(args)
        check_logging_dir(args)
    check_nvme_path(args)
    check_packages(args)


def is_local_model(name: str) -> bool:
    """A folder, or something written like a path, and not a name on the hub."""
    return os.path.isdir(name) or name.startswith((".", "/", "~")) or name.count("/") > 1


def is_local_dataset(name: str) -> bool:
    """A file or folder, or something written like one, and neither built in nor a name on the hub."""
    if name in ("pydocs", "wikitext"):
        return False
    return (
        os.path.exists(name)
        or name.startswith((".", "/", "~"))
        or name.endswith(DATA_SUFFIXES)
        or name.count("/") > 1
    )


def check_model_path(args) -> None:
    """A model given as a folder must be there and be a Hugging Face model."""
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
    """Files and folders of data must be there, readable and not empty; a chat template, too."""
    named = {
        "--dataset": args.dataset if is_local_dataset(args.dataset) else None,
        "--validation_file": args.validation_file,
    }
    for flag, name in named.items():
        if name:
            check_data_path(flag, name, args.include)
    if args.include and not any(
        name and Path(name).expanduser().is_dir() for name in named.values()
    ):
        raise UserError(
            f"--include {args.include} chooses among the files of a folder, and there is none: "
            "leave it out."
        )
    if args.chat_template:
        read_text("--chat_template", args.chat_template)


def check_data_path(flag: str, name: str, include: str | None) -> None:
    """
    Raises:
        UserError: nothing there, or nothing readable.
    """
    path = Path(name).expanduser()
    for file in files_of(path, f"{flag} {name}", include):
        if not os.access(file, os.R_OK):
            raise UserError(f"{flag} {name}: {file} may not be read by this user.")
    if path.is_file() and not path.stat().st_size:
        raise UserError(f"{flag} {name} is empty.")


def check_output_dir(args) -> None:
    """A named output folder must not hold another run, unless --overwrite says so, and must be
    writable.
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
    """
    Raises:
        UserError: there is no such folder, and none can be made.
    """
    for place in (folder.absolute(), *folder.absolute().parents):
        if place.is_symlink() and not place.exists():
            raise UserError(
                f"{flag} {folder}: {place} is a link to nothing, or to itself: name another folder."
            )
        if place.exists():
            break
    if not place.is_dir():
        raise UserError(f"{flag} {folder}: {place} is a file: name a folder.")
    if not os.access(place, os.W_OK):
        raise UserError(f"{flag} {folder}: {place} is not writable.")


def holds_a_run(folder: Path) -> bool:
    """Whether a folder holds more than the results.json of a run that failed before it trained."""
    results = folder / "results.json"
    if not results.is_file():  # a pipe would be waited for
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
    """The trained model replaces the folder where it goes: that may be an earlier export, and
    nothing else that is there.
    """
    if args.no_export or args.eval_only or not (args.export_hf or args.output_dir):
        return
    folder = Path(args.export_hf or Path(args.output_dir) / "hf").absolute()
    where = f"--export_hf {args.export_hf}" if args.export_hf else f"The export, {folder},"
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
            place := Path(path).expanduser().resolve(),
            *place.parents,
        ):
            raise UserError(f"{where} would replace {name}: name another folder with --export_hf.")
    if folder.exists() and (not folder.is_dir() or os.path.ismount(folder)):
        raise UserError(
            f"{where} is a {'file' if folder.is_file() else 'mount point'}: "
            "name a folder in it or beside it."
        )
    if args.export_hf and folder.is_dir() and any(folder.iterdir()):
        described = (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()
        exported = described and (folder / "README.md").is_file()
        if not exported or not (args.overwrite or args.resume is not None):
            raise UserError(
                f"{where} is not empty: name another folder"
                + ("; or --overwrite." if exported else ".")
            )


def check_logging_dir(args) -> None:
    """TensorBoard would show the curves of an earlier run in --logging_dir as part of this one."""
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
    """What only some runs need must be installed for them."""
    for name in args.report_to:
        if importlib.util.find_spec(name) is None:
            raise MissingRequirement(f"--report_to {name} needs it: pip install {name}.")
    if args.lora_r and importlib.util.find_spec("peft") is None:
        raise MissingRequirement("--lora_r needs peft: pip install peft.")


def check_nvme_path(args) -> None:
    """A folder named for infinity must be there; whether it is large enough is seen when the
    model's size is known.
    """
    if (
        args.strategy == "infinity"
        and args.nvme_path is not None
        and not Path(args.nvme_path).is_dir()
    ):
        raise UserError(
            f"--nvme_path {args.nvme_path}: no such folder. Create it, "
            "or name a folder on a local NVMe disk."
        )


def ask_hub(args, launch: Launch) -> tuple[bool, str | None]:
    """Whether the hub is out of bounds, and, for --check only, what is wrong with that; a run
    raises it instead.
    """
    try:
        return not reach_hub(args, launch), None
    except UserError as error:
        if not args.check:
            raise
        return True, redact(str(error))


def reach_hub(args, launch: Launch) -> bool:
    """Decide whether the Hugging Face hub may be asked, before any of its libraries is imported.

    One probe replaces the clients' retries. Where the hub does not answer, HF_HUB_OFFLINE makes a
    warm cache load at once. Only the first rank of a node asks the hub, and the others load what it
    has put in the cache; but a streamed dataset is in no cache.
    Returns:
        True if the hub may be asked.
    Raises:
        UserError: the hub is needed, does not answer, and the cache lacks what is needed.
    """
    model = args.model if args.model != EMBEDDED_MODEL and not is_local_model(args.model) else None
    dataset = {"wikitext": "Salesforce/wikitext", "pydocs": None}.get(args.dataset, args.dataset)
    dataset = None if dataset and is_local_dataset(dataset) else dataset
    each_asks = args.streaming and dataset  # a stream is read by every rank
    if not (model or dataset) or not (launch.is_node_leader or each_asks):
        os.environ["HF_HUB_OFFLINE"] = "1"  # nothing to ask for
        return False
    set_offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if not set_offline and answers(endpoint):
        return True
    os.environ["HF_HUB_OFFLINE"] = "1"
    why = (
        "HF_HUB_OFFLINE is set"
        if set_offline
        else f"The Hugging Face hub ({endpoint}) cannot be reached"
    )
    no_model = (
        model is not None
        and not cached_repository("models", model)
        and not scratch_without_hub(args)
    )
    no_dataset = dataset is not None and not cached_repository("datasets", dataset)
    if no_model or no_dataset:
        raise UserError(
            f"{why}, and "
            f"{_ways_without_hub(args, model if no_model else None, dataset if no_dataset else None)}"
        )
    lacking = (
        missing_of_model(model, not args.from_scratch)
        if model and not scratch_without_hub(args)
        else []
    )
    if lacking:
        raise UserError(
            f"{why}, and the cache has no {' and no '.join(lacking)} of {model}. Run this where "
            f"there is a network (a cluster's head node): {prefetch_command(args)}"
        )
    if launch.is_main and not (set_offline or args.quiet):
        print(redact(f"ℹ️  {why}: using what is in the cache."))
    return False


def prefetch_command(args) -> str:
    """The command that downloads what this run needs, for a machine with a network that shares the
    cache's disk.
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
    """What is missing, and the three ways on."""
    named = [f"model {model}"] if model else []
    no_file = "" if args.dataset == "wikitext" else " (and no file of that name is here)"
    named += [f"dataset {dataset}{no_file}"] if dataset else []
    local = ["a local folder to --model"] * bool(model) + ["a file or folder to --dataset"] * bool(
        dataset
    )
    plain = ["--from_scratch"] * bool(model and args.model in GPT2_NAMES) + [
        "--dataset pydocs"
    ] * bool(dataset)
    return (
        f"{' and '.join(named)} {'is' if len(named) == 1 else 'are'} not in the cache. Three ways "
        f"on: where there is a network (a cluster's head node) run `{prefetch_command(args)}`, "
        f"then set HF_HUB_OFFLINE=1; pass {' and '.join(local)}; or use "
        f"{' '.join(plain) or '--model tiny-gpt2'}, which needs no hub."
    )


def scratch_without_hub(args) -> bool:
    """The GPT-2 architectures are known here, so random weights need nothing from the hub."""
    return args.from_scratch and args.model in GPT2_NAMES


def answers(endpoint: str) -> bool:
    """Whether anything answers HTTP at `endpoint`, within PROBE_SECONDS; honours the proxy
    variables.
    """
    if not endpoint.startswith(("http://", "https://")):
        return False
    answered = threading.Event()
    endpoint = re.sub(
        "//[^/?#]*@", "//", endpoint
    )  # urllib takes user:password for a part of the host's name

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

    # In a thread of its own: looking the name up and trying several addresses have time limits of
    # their own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return answered.is_set()


def huggingface_home() -> Path:
    """Where the Hugging Face libraries keep their caches."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()


def cached_repository(kind: str, name: str) -> bool:
    """Whether the hub's cache holds a snapshot of a repository ("models" or "datasets")."""
    if kind == "datasets":  # the prepared Arrow files are what loads offline
        prepared = Path(
            os.environ.get("HF_DATASETS_CACHE") or huggingface_home() / "datasets"
        ).expanduser()
        return (prepared / name.replace("/", "___").lower()).is_dir() or (
            prepared / name.replace("/", "___")
        ).is_dir()
    return any(cached_model(name).glob("snapshots/*/*"))


def cached_model(name: str) -> Path:
    """The folder of a model in the hub's cache."""
    env = os.environ
    hub = Path(
        env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or huggingface_home() / "hub"
    ).expanduser()
    return hub / f"models--{name.replace('/', '--')}"


def missing_of_model(name: str, with_weights: bool) -> list[str]:
    """What the cached snapshot of a model lacks; other programs cache parts of it, such as the
    weights alone.
    """
    folder = cached_model(name)
    try:
        snapshot = (
            folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        )
    except OSError:
        return []  # a snapshot of a commit; the libraries decide
    files = {
        file.name for file in snapshot.glob("*") if file.exists()
    }  # a download that was stopped leaves dangling links
    lacking = [] if "config.json" in files else ["config.json"]
    if not any(
        re.fullmatch(r"tokenizer\.json|vocab.*|.*\.model|.*\.tiktoken", file) for file in files
    ):
        lacking.append("tokenizer files")
    if with_weights and not any(
        re.fullmatch(r".*\.safetensors|pytorch_model.*\.bin", file) for file in files
    ):
        lacking.append("weights")
    return lacking


# ------------------------------------------------------------------------------ with torch imported


def check_visible_gpus(launch: Launch, visible: int) -> int:
    """The index of this rank's GPU.

    Args:
        launch: this process's place in the run.
        visible: GPUs that torch sees.
    Raises:
        UserError: there are fewer GPUs than ranks on this node.
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
    """Settle --precision for this device.

    Args:
        requested: "auto", "fp32", "bf16" or "fp16".
        device: a torch.device.
    Returns:
        "fp32", "bf16" or "fp16".
    Raises:
        UserError: the device cannot do what was asked for.
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
    """Whether this CPU has instructions for bf16 (avx512_bf16 or amx_bf16); without them it is
    emulated, slowly.
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


def planned_work(args, run, model: architectures.Architecture) -> planner.Work:
    """This run as the planner sees it.

    Raises:
        UserError: a configuration that the planner does not know.
    """
    if args.ds_config or args.fsdp_config or args.eval_only:
        raise UserError(
            "The planner knows this project's own DeepSpeed files, FSDP's defaults, and training."
        )
    return planner.Work(
        model,
        run.world_size,
        args.batch_size,
        args.seq_length,
        run.precision,
        args.gradient_checkpointing,
        args.gradient_accumulation_steps,
        run.device.type,
        0 if run.simulated else None,
        planner.adapters(model, args.lora_r, args.lora_targets),
        args.fused_gelu,
    )


def memory_limits(run) -> planner.Limits:
    """What the memory of this rank's device, and of its node, allow."""
    import psutil

    from support.memory.measure import memory_limit

    ranks = 1 if run.simulated else run.launch.local_world_size
    if run.device.type == "cuda":
        return planner.Limits(memory_limit(run.device), psutil.virtual_memory().total, None, ranks)
    return planner.Limits(memory_limit(run.device) // ranks)  # the ranks share the host's memory


def predicted_bytes(args, run, blueprint) -> dict[str, int] | None:
    """What the planner says of this run; None for an architecture or a configuration that it does
    not know.
    """
    try:
        model = architectures.read_architecture(blueprint.config.to_dict(), args.model)
        need = asdict(planner.predict(planned_work(args, run, model), args.strategy))
    except UserError:
        return None
    return {name: size for name, size in need.items() if isinstance(size, int)}


def ways_to_fit(args, run, blueprint) -> list[str]:
    """What the planner would change, for a run that ran out of memory: lines.

    Raises:
        UserError: an architecture or a configuration that the planner does not know.
    """
    model = architectures.read_architecture(blueprint.config.to_dict(), args.model)
    return planner.describe_ways(planned_work(args, run, model), args.strategy, memory_limits(run))


def needed_ops(strategy: str, device) -> dict[str, list[Path]]:
    """DeepSpeed's C++ ops that this strategy needs, and the folders in which they were compiled or
    are being compiled.
    """
    from torch.utils.cpp_extension import get_default_build_root

    needed = ["deepspeed_shm_comm"] if device.type == "cpu" else []
    needed += ["cpu_adam"] if strategy in ("offload", "infinity") else []
    if strategy == "infinity":
        needed += ["async_io", "pin_memory"] if _has_pin_memory_op() else ["async_io"]
    if own := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return {op: [Path(own) / op] for op in needed}
    # one for each CUDA version
    builds = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}_*"
    return {op: list(Path(get_default_build_root()).glob(f"{builds}/{op}")) for op in needed}


def _has_pin_memory_op() -> bool:
    """Whether this DeepSpeed's async_io loads an op pin_memory, as 0.19 does; found without
    importing DeepSpeed.
    """
    package = importlib.util.find_spec("deepspeed")
    folders = package.submodule_search_locations if package else ()
    return any(
        (Path(folder) / "ops" / "op_builder" / "pin_memory.py").exists() for folder in folders
    )


def ops_to_compile(strategy: str, device) -> list[str]:
    """Those of them that were not compiled on this machine before."""
    found = needed_ops(strategy, device)
    return [
        op
        for op, folders in found.items()
        if not any(file for folder in folders for file in folder.glob("*.so"))
    ]


def check_requirements(args, device) -> None:
    """What a DeepSpeed strategy needs of this machine, before any data is read.

    Raises:
        MissingRequirement: a compiler is missing, or, where something is kept on NVMe, libaio or
            the CUDA toolkit.
    """
    check_compiler(args.strategy, device)
    if uses_nvme(args.ds_config_dict):
        check_async_io(device)


def check_compiler(strategy: str, device) -> None:
    """DeepSpeed compiles its CPU Adam at the first use of offload and infinity, and on a CPU its
    collectives.

    Raises:
        MissingRequirement: there is no C++ compiler.
    """
    compiler = os.environ.get("CXX", "c++")
    if (device.type == "cpu" or strategy in ("offload", "infinity")) and shutil.which(
        compiler
    ) is None:
        raise MissingRequirement(
            f"--strategy {strategy} compiles parts of DeepSpeed at its first use, but there is no "
            f"C++ compiler ({compiler}): apt install build-essential, "
            "or module load gcc on a cluster. dp and fsdp need none."
        )


def check_async_io(device) -> None:
    """infinity reads and writes NVMe through libaio; ask before the model loads.

    On a GPU DeepSpeed compiles the op against the headers of the CUDA toolkit; CPU Adam (offload)
    needs none. `is_compatible` tests libaio only: without a toolkit `load` fails later, in a path
    that is joined to CUDA_HOME = None (deepspeed/ops/op_builder/async_io.py, include_paths).
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
    """Create this job's own folder for infinity's files, and check that they will fit; first remove
    those of killed jobs.

    Args:
        path: --nvme_path; None for the temporary folder.
        parameters: of the whole model.
        local_world_size, world_size: this node holds their share of the parameters.
    Returns:
        A new folder that the caller removes at the end.
    Raises:
        UserError: missing or not writable.
        MissingRequirement: too small, or a file system that cannot bypass the page cache.
    """
    parent = Path(path or tempfile.gettempdir())
    try:
        temporary = TemporaryFolder(parent, NVME_PREFIX, mode=0o700)
    except OSError as error:
        raise UserError(
            f"--nvme_path {parent} cannot be written: {error.strerror}. Name another folder."
        ) from error
    try:
        # fp32 master, two moments and gradient, and the working copy: 20 bytes a parameter at most.
        needed = 20 * parameters * local_world_size // world_size
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise MissingRequirement(
                f"--nvme_path {parent} has {free / 2**30:.2f} GB free, and infinity needs "
                f"{needed / 2**30:.2f} GB there: free some space, or name another folder."
            )
        check_direct_io(str(temporary.path))
    except MissingRequirement:
        temporary.remove()
        raise
    return temporary


def check_direct_io(folder: str) -> None:
    """infinity's files bypass the page cache.

    Raises:
        MissingRequirement: the file system of the folder cannot do that.
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
