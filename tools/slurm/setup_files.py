"""Configurations and scripts that scripts/distributed_setup.py writes.

Each file contains the command that wrote it: scripts as a comment, JSON files as a key.
"""

import argparse
import json
import shlex
from pathlib import Path

from distributed_training import PROJECT
from distributed_training.errors import UserError
from distributed_training.ranks.time_limit import seconds_of
from tools.slurm import slurm


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
    return json.dumps({"_made_by": made_by, **config}, indent=2) + "\n"


def fsdp_config(args: argparse.Namespace, made_by: str) -> str:
    """Return an FSDP configuration with the keys that accelerate and transformers also read."""
    config = {
        "_made_by": made_by,
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
    return json.dumps(config, indent=2) + "\n"


def launcher_note(args: argparse.Namespace) -> str:
    """Return what starts the ranks if --use_deepspeed cannot be followed, or ""."""
    requeues = getattr(args, "requeue", False)
    if not args.use_deepspeed or (args.num_nodes == 1 and not requeues):
        return ""
    why = "forwards no signals" if requeues else "needs ssh between the nodes"
    starter = "srun" if requeues else "torchrun"
    return (
        f"--use_deepspeed: {starter} starts the ranks, because DeepSpeed's launcher {why}. "
        "The strategy is unchanged."
    )


def launch_script(args: argparse.Namespace, made_by: str) -> str:
    """Return a script to run on each machine."""
    if args.num_nodes > 1 and args.master_addr == "127.0.0.1":
        raise UserError(
            "--num_nodes above 1 needs --master_addr, "
            "the address at which the other nodes reach the first one."
        )
    return slurm.fill(
        "launch",
        made_by=made_by,
        note=launcher_note(args),
        project=shlex.quote(str(PROJECT)),
        activate=slurm.ACTIVATE,
        config=shlex.quote(str(Path(args.config).absolute())),
        deepspeed=args.use_deepspeed and args.num_nodes == 1,
        nodes=args.num_nodes,
        ranks=args.num_gpus_per_node,
        node_rank=args.node_rank,
        master_addr=shlex.quote(args.master_addr),
        master_port=args.master_port,
    )


def slurm_job(args: argparse.Namespace, made_by: str) -> str:
    """Return a batch script for Slurm."""
    seconds_of(args.time_limit)
    gpus = args.num_gpus_per_node
    named = {"partition": args.partition, "account": args.account}
    values: dict[str, object] = {
        "nodes": args.num_nodes,
        "gpus": gpus,
        "cpus": 2 * gpus,
        "time": args.time_limit,
        "project": shlex.quote(str(PROJECT)),
        "sbatch": [f"#SBATCH --{flag}={name}" for flag, name in named.items() if name],
        "signal_seconds": args.signal_seconds,
    }
    kind = "torchrun"
    if args.use_deepspeed and args.num_nodes == 1:
        kind, values["launcher"] = "one_node", "deepspeed"
    arguments = f" --config {shlex.quote(str(Path(args.config).absolute()))}"
    # torchrun kills its ranks 30 s after a signal, so a job that must save on a signal starts them
    # with srun.
    if args.requeue:
        kind, arguments = "requeue", f"{arguments} --resume"
        values |= {"tasks": gpus, "cpus": 2}
    if args.modules:
        values["modules"] = f"module load {shlex.join(args.modules.replace(',', ' ').split())}"
    if args.venv:
        activate = Path(args.venv).expanduser().absolute() / "bin" / "activate"
        values["activate"] = f"source {shlex.quote(str(activate))}"
    about = f"Made by:\n    {made_by}\n\nSubmit it with\n    sbatch {shlex.quote(str(args.output))}"
    if note := launcher_note(args):
        about += f"\n\n{note}"
    return slurm.batch_script(kind, about, arguments, **values)
