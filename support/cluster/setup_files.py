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
from pathlib import Path

from support import PROJECT
from support.cluster import slurm
from support.errors import UserError
from support.files.user_files import read_text

NO_DIGEST = "sha256:" + 64 * "0"
DIGEST_LINE = re.compile(r'^(# |  "_digest": ")sha256:[0-9a-f]{64}', re.MULTILINE)
DIGEST_OF_SCRIPTS = (
    f"# {NO_DIGEST}\n"
    "# is this file's digest. The generator replaces the file only if it was not edited."
)


def with_digest(text: str) -> str:
    """Return `text` with its SHA-256 digest in place of NO_DIGEST."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return DIGEST_LINE.sub(rf"\g<1>sha256:{digest}", text, count=1)


def is_unedited(path: Path) -> bool:
    """Return whether a file has a digest and is unchanged since this generator wrote it."""
    text = path.read_bytes().decode(errors="replace")  # keeps line ends, which are text too
    without = DIGEST_LINE.sub(rf"\g<1>{NO_DIGEST}", text, count=1)
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
        if getattr(args, flag) and not (args.zero_stage == 3 and args.offload_optimizer):
            raise UserError(f"--{flag} needs --zero_stage 3 and --offload_optimizer.")
    # The project's own file, whose sizes of buckets the run fills in for its model.
    config = json.loads((PROJECT / f"ds_config_stage{args.zero_stage}.json").read_text())
    del config["optimizer"]
    config["train_micro_batch_size_per_gpu"] = args.batch_size or "auto"
    if args.bf16 or args.fp16:
        config["bf16"]["enabled"], config["fp16"]["enabled"] = args.bf16, args.fp16
    zero = config["zero_optimization"]
    # ZeRO-3 and offload have copies that can overlap with computation on a single rank, too.
    overlaps_on_one_rank = args.zero_stage == 3 or args.offload_optimizer
    zero |= {"overlap_comm": overlaps_on_one_rank or "auto", "reduce_scatter": True}
    place = {"device": "nvme", "nvme_path": args.nvme_path} if args.nvme_path else {"device": "cpu"}
    for flag in ("offload_optimizer", "offload_param"):
        if getattr(args, flag):
            zero[flag] = {**place, "pin_memory": True}
    if args.nvme_path:
        aio = {"block_size": 1048576, "queue_depth": 8}
        config["aio"] = {**aio, "single_submit": False, "overlap_events": True}
        if args.offload_param:
            zero["offload_param"] |= {"buffer_count": 5, "buffer_size": "auto", "max_in_cpu": 0}
    return as_json(config, made_by)


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


def read_hosts(path: str | None) -> tuple[list[str], int | None]:
    """Read a file of host names, one per line, or of lines "node1 slots=4"; # starts a comment.

    Returns:
        The host names, and the number of slots (ranks) per host if the file gives it.
    Raises:
        UserError: the file cannot be read, a line is not a host, or the numbers of slots differ.
    """
    if path is None:
        return [], None
    lines = [line.split("#")[0].strip() for line in read_text("--hosts", path).splitlines()]
    hosts, slots = [], set()
    for line in filter(None, lines):
        found = re.fullmatch(r"([\w.:%@\[\]][\w.:%@\[\]-]*)(?:\s+slots=([1-9]\d{0,3}))?", line)
        if not found or found[1] in hosts:
            raise UserError(f"--hosts {path}: {line!r} is not `HOST` or `HOST slots=N`, or twice.")
        hosts.append(found[1])
        slots |= {int(found[2])} if found[2] else set()
    if not hosts or len(slots) > 1:
        raise UserError(f"--hosts {path}: name hosts that all have the same number of slots.")
    return hosts, slots.pop() if slots else None


def launch_script(args: argparse.Namespace, made_by: str) -> str:
    """Return a script to run on each machine, or with --hosts one that starts all over ssh."""
    hosts, slots = read_hosts(args.hosts)
    gpus = args.num_gpus_per_node
    if hosts and args.num_nodes not in (1, len(hosts)):
        raise UserError(f"--num_nodes {args.num_nodes} contradicts --hosts: it names {len(hosts)}.")
    if slots and gpus not in (None, slots):
        raise UserError(f"--num_gpus_per_node {gpus} contradicts slots={slots} in {args.hosts}.")
    nodes = len(hosts) or args.num_nodes
    if not 0 <= args.node_rank < nodes:
        raise UserError(f"--node_rank {args.node_rank} is not in 0 to {nodes - 1}.")
    own_address = args.master_addr == "127.0.0.1"
    if nodes > 1 and not hosts and own_address:
        raise UserError(
            "--num_nodes above 1 needs --master_addr, "
            "the address at which the other nodes reach the first one; or --hosts."
        )
    # The first host, unless the other hosts reach it under another address.
    address = hosts[0].split("@")[-1] if hosts and own_address else args.master_addr
    return slurm.fill(
        "launch",
        made_by=made_by,
        digest=DIGEST_OF_SCRIPTS,
        project=shlex.quote(str(PROJECT)),
        activate=slurm.ACTIVATE,
        config=config_path(args.config),
        deepspeed=args.use_deepspeed and nodes == 1,
        nodes=nodes,
        ranks=slots or gpus or 1,
        node_rank=args.node_rank,
        master_addr=shlex.quote(address),
        master_port=args.master_port,
        hosts=" ".join(map(shlex.quote, hosts)),
    )


def slurm_job(args: argparse.Namespace, made_by: str) -> str:
    """Return a batch script for Slurm."""
    if args.signal_seconds and not args.requeue:
        raise UserError("--signal_seconds needs --requeue.")
    slurm.seconds_of(args.time_limit)
    gpus = args.num_gpus_per_node or 1
    named = {"partition": args.partition, "account": args.account}
    values: dict[str, object] = {
        "nodes": args.num_nodes,
        "gpus": gpus,
        "cpus": 2 * gpus,
        "time": args.time_limit,
        "project": shlex.quote(str(PROJECT)),
        "sbatch": [f"#SBATCH --{flag}={name}" for flag, name in named.items() if name],
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
