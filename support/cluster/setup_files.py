"""Configurations and scripts that scripts/distributed_setup.py writes.

Each file contains the command that wrote it and a digest of its own text, so that a later command
can detect whether it was edited. Scripts have both as comments, JSON files as keys.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import unicodedata
from pathlib import Path

from support import PROJECT
from support.cli.ds_config import bucket_sizes
from support.cluster import slurm
from support.errors import UserError
from support.known_models import EMBEDDED_MODEL, EMBEDDED_SHAPE, EMBEDDED_VOCABULARY, GPT2_SHAPES

NO_DIGEST = "sha256:" + 64 * "0"
DIGEST_LINE = r'^(# |  "_digest": ")sha256:[0-9a-f]{64}'
DIGEST_OF_SCRIPTS = (
    f"# {NO_DIGEST}\n"
    "# is this file's digest. The generator replaces the file only if it was not edited."
)
HOST = r"[A-Za-z0-9._:%\[\]-]+"


def check_values(args: argparse.Namespace) -> None:
    """Reject values with characters that a line of a script cannot contain.

    A line end in a value would end a comment, and the shell would execute the rest.
    """
    for name, value in vars(args).items():
        for character in str(value) if isinstance(value, str | Path) else "":
            if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
                raise UserError(
                    f"--{name} {str(value)!r} contains the character U+{ord(character):04X}, "
                    "which a script cannot contain: remove it."
                )


def with_digest(text: str) -> str:
    """Return `text` with its SHA-256 digest in place of NO_DIGEST."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return re.sub(DIGEST_LINE, rf"\g<1>sha256:{digest}", text, count=1, flags=re.MULTILINE)


def is_unedited(path: Path) -> bool:
    """Return whether a file has a digest and is unchanged since this generator wrote it."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    without = re.sub(DIGEST_LINE, rf"\g<1>{NO_DIGEST}", text, count=1, flags=re.MULTILINE)
    return without != text and with_digest(without) == text


def as_json(config: dict, made_by: str) -> str:
    """Return a configuration as JSON text, with the command that made it and room for a digest."""
    config = {"_made_by": made_by, "_digest": NO_DIGEST, **config}
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def deepspeed_config(args: argparse.Namespace, made_by: str) -> str:
    """Return a DeepSpeed configuration, in which the training script replaces "auto"."""
    if args.bf16 and args.fp16:
        raise UserError("--bf16 and --fp16 exclude each other: leave one out.")
    for flag in ("offload_param", "nvme_path"):
        if getattr(args, flag) and args.zero_stage != 3:
            raise UserError(f"--{flag} needs --zero_stage 3.")
    if (args.nvme_path or args.offload_param) and not args.offload_optimizer:
        raise UserError("--nvme_path and --offload_param need --offload_optimizer: add it.")
    sets_precision = args.bf16 or args.fp16
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size or "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": args.bf16 if sets_precision else "auto"},
        "fp16": {"enabled": args.fp16 if sets_precision else "auto"},
        "zero_optimization": _zero_config(args, read_model(args.model)),
    }
    if args.nvme_path:
        aio = {"block_size": 1048576, "queue_depth": 8}
        config["aio"] = {**aio, "single_submit": False, "overlap_events": True}
    return as_json(config, made_by)


def _zero_config(args: argparse.Namespace, model: dict) -> dict:
    zero: dict = {"stage": args.zero_stage}
    on_nvme = {"device": "nvme", "nvme_path": args.nvme_path}
    device = on_nvme if args.nvme_path else {"device": "cpu"}
    for flag in ("offload_optimizer", "offload_param"):
        if getattr(args, flag):
            zero[flag] = {**device, "pin_memory": True}
    params_on_nvme = bool(args.nvme_path and args.offload_param)
    if params_on_nvme:
        # A buffer must hold a rank's shard of any parameter: with one rank, the whole parameter.
        size = model["largest"] + 4096
        zero["offload_param"] |= {"buffer_count": 5, "buffer_size": size, "max_in_cpu": 0}
    sizes = bucket_sizes(model["width"], model["parameters"], model["tied"] and params_on_nvme)
    for key, size in sizes.items():
        stage3_only = key.startswith(("stage3_", "sub_group"))
        if key == "reduce_bucket_size" or stage3_only == (args.zero_stage == 3):
            zero[key] = size
    # ZeRO-3 and offload have copies that can overlap with computation on a single rank, too.
    overlaps_on_one_rank = args.zero_stage == 3 or args.offload_optimizer
    return zero | {
        "overlap_comm": True if overlaps_on_one_rank else "auto",
        "reduce_scatter": True,
        "contiguous_gradients": True,
    }


def read_model(name: str) -> dict:
    """Read the sizes of a model: a GPT-2 model by name, or the config.json in a folder.

    The number of parameters is approximate: 12 · width² per layer (attention 4, MLP 8) and the
    embeddings.

    Args:
        name: name of a GPT-2 model or of the embedded model, or a folder with config.json.
    Returns:
        {"width": hidden size, "parameters": their number, "largest": elements of the largest
        parameter (the token embedding), "tied": whether input and output embeddings are tied}.
    Raises:
        UserError: `name` is none of these, or sizes in config.json are missing or invalid.
    """
    if name in GPT2_SHAPES or name == EMBEDDED_MODEL:
        layers, _, width = GPT2_SHAPES.get(name, EMBEDDED_SHAPE)
        vocabulary, tied = 50257 if name in GPT2_SHAPES else EMBEDDED_VOCABULARY, True
    else:
        try:
            config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
            layers = config.get("num_hidden_layers") or config["n_layer"]
            width, vocabulary = config.get("hidden_size") or config["n_embd"], config["vocab_size"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            names = ", ".join([EMBEDDED_MODEL, *GPT2_SHAPES, "or a folder with config.json"])
            raise UserError(f"--model {name}: use {names}.") from error
        if not all(type(number) is int and number > 0 for number in (layers, width, vocabulary)):
            raise UserError(
                f"--model {name}: its config.json has sizes that are not positive whole numbers."
            )
        tied = config.get("tie_word_embeddings", True) is not False
    embedding = vocabulary * width
    parameters = 12 * layers * width**2 + embedding * (1 if tied else 2)
    return {"width": width, "parameters": parameters, "largest": embedding, "tied": tied}


def fsdp_config(args: argparse.Namespace, made_by: str) -> str:
    """Return an FSDP configuration with the keys that accelerate and transformers also read."""
    config = {
        "fsdp_sharding_strategy": args.sharding_strategy,
        "fsdp_mixed_precision": args.mixed_precision,
        "fsdp_offload_params": args.offload_params,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False,
        "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": True,
        "fsdp_cpu_ram_efficient_loading": True,
    }
    if args.layer_class:
        config["fsdp_transformer_layer_cls_to_wrap"] = [args.layer_class]
    return as_json(config, made_by)


def read_hosts(path: str) -> tuple[list[str], int | None]:
    """Read a file of host names, one per line.

    Lines of DeepSpeed's format, "node1 slots=4", are also accepted; # starts a comment.

    Returns:
        The host names in the file's order, and the number of slots (ranks) per host, or None if the
        file does not give it.
    Raises:
        UserError: the file cannot be read or names no host, a name is invalid or occurs twice, or
            the numbers of slots differ.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(f"--hosts {path} cannot be read: {reason}.") from error
    hosts: dict[str, None] = {}  # an ordered set: the file may name very many
    slots: set[int] = set()
    for number, words in enumerate((line.split("#")[0].split() for line in lines), 1):
        if not words:
            continue
        host, *options = words
        place = f"--hosts {path}, line {number}"
        slots_match = re.fullmatch(r"slots=([1-9][0-9]{0,3})", " ".join(options))
        if not re.fullmatch(rf"([A-Za-z0-9._-]+@)?{HOST}", host) or host.startswith("-"):
            raise UserError(f"{place}: {host!r} is not a host name.")
        if options and not slots_match:
            raise UserError(f"{place}: after the host name only slots=N can follow.")
        if host in hosts:
            raise UserError(f"{place}: {host} is listed twice: remove one line.")
        hosts[host] = None
        slots |= {int(slots_match[1])} if slots_match else set()
    if not hosts:
        raise UserError(
            f"--hosts {path} names no host: write one on each line, the first is the master."
        )
    if len(slots) > 1:
        raise UserError(f"--hosts {path}: every host must have the same number of slots.")
    return list(hosts), slots.pop() if slots else None


def launch_script(args: argparse.Namespace, made_by: str) -> str:
    """Return a script to run on each machine, or with --hosts one that starts all over ssh."""
    hosts, slots = read_hosts(args.hosts) if args.hosts else ([], None)
    if hosts and args.num_nodes not in (1, len(hosts)):
        named = f"--hosts {args.hosts}, which names {len(hosts)}"
        raise UserError(f"--num_nodes {args.num_nodes} contradicts {named}.")
    gpus = args.num_gpus_per_node
    if slots and gpus not in (None, slots):
        raise UserError(f"--num_gpus_per_node {gpus} contradicts slots={slots} in {args.hosts}.")
    nodes, ranks = len(hosts) or args.num_nodes, slots or gpus or 1
    if not 0 <= args.node_rank < nodes:
        raise UserError(f"--node_rank {args.node_rank} is not in 0 to {nodes - 1}.")
    if nodes > 1 and not hosts and args.master_addr == "127.0.0.1":
        raise UserError(
            "--num_nodes above 1 needs --master_addr, "
            "the address at which the other nodes reach the first one; or --hosts."
        )
    if not re.fullmatch(HOST, args.master_addr) or args.master_addr.startswith("-"):
        raise UserError(f"--master_addr {args.master_addr!r} is not a host name or address.")
    if args.master_port > 65535:
        raise UserError(f"--master_port {args.master_port} is not a port: use 1024 to 65535.")
    # The first host, unless the other hosts reach it under another address.
    first_host = hosts and args.master_addr == "127.0.0.1"
    return slurm.fill(
        "launch",
        made_by=made_by,
        digest=DIGEST_OF_SCRIPTS,
        project=shlex.quote(str(PROJECT)),
        activate=slurm.ACTIVATE,
        config=config_path(args.config),
        deepspeed=args.use_deepspeed and nodes == 1,
        nodes=nodes,
        ranks=ranks,
        node_rank=args.node_rank,
        master_addr=shlex.quote(hosts[0].split("@")[-1] if first_host else args.master_addr),
        master_port=args.master_port,
        hosts=" ".join(map(shlex.quote, hosts)),
    )


def slurm_job(args: argparse.Namespace, made_by: str) -> str:
    """Return a batch script for Slurm."""
    if not re.fullmatch(r"[0-9]{1,7}(-[0-9]{1,2})?(:[0-9]{1,4}){0,3}", args.time_limit):
        raise UserError(f"--time_limit {args.time_limit}: write it as HH:MM:SS or D-HH:MM:SS.")
    sbatch = []
    for flag in ("partition", "account"):
        if name := getattr(args, flag):
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,+@-]*", name):
                raise UserError(f"--{flag} {name!r} is not a valid name in Slurm.")
            sbatch.append(f"#SBATCH --{flag}={name}")
    if args.signal_seconds and not args.requeue:
        raise UserError("--signal_seconds needs --requeue.")
    gpus = args.num_gpus_per_node or 1
    values: dict[str, object] = {
        "nodes": args.num_nodes,
        "gpus": gpus,
        "cpus": 2 * gpus,
        "time": args.time_limit,
        "project": shlex.quote(str(PROJECT)),
        "sbatch": sbatch,
        "signal_seconds": args.signal_seconds or slurm.SIGNAL_SECONDS,
    }
    arguments = f" --config {config_path(args.config)}"
    # torchrun kills its ranks 30 s after a signal, so a job that must save on a signal starts them
    # with srun.
    kind = "deepspeed" if args.use_deepspeed and args.num_nodes == 1 else "torchrun"
    if args.requeue:
        kind, arguments = "requeue", f"{arguments} --resume"
        values |= {"tasks": gpus, "cpus": 2}
    if modules := re.findall("[^ ,]+", args.modules or ""):
        values["modules"] = f"module load {shlex.join(modules)}"
    if args.venv:
        activate = Path(args.venv).expanduser().absolute() / "bin" / "activate"
        values["activate"] = f"source {shlex.quote(str(activate))}"
    about = f"Made by:\n    {made_by}\n\nSubmit it with\n    sbatch {shlex.quote(str(args.output))}"
    text = slurm.batch_script(kind, about, arguments, **values)
    return text.replace("\n", f"\n{DIGEST_OF_SCRIPTS}\n", 1)  # below the first line


def config_path(path: str) -> str:
    """Return the absolute path of the run file, quoted for a shell.

    The file must exist, so that a wrong path is reported now and not after the job was queued.
    """
    if not Path(path).is_file():
        raise UserError(f"--config {path}: no such file.")
    return shlex.quote(str(Path(path).absolute()))


def next_step(args: argparse.Namespace) -> str:
    """Return the command that uses the written file."""
    output = shlex.quote(str(args.output))
    by_hand = args.command == "launcher" and not args.hosts and args.num_nodes > 1
    return {
        "deepspeed": f"python real_model_example.py --ds_config {output}",
        "fsdp": f"python real_model_example.py --strategy fsdp --fsdp_config {output}",
        "launcher": f"bash {output}" + ("    # on each machine, with NODE_RANK=0, 1, …" * by_hand),
        "slurm": f"sbatch {output}",
    }[args.command]
