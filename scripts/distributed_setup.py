#!/usr/bin/env python3
"""Generate a DeepSpeed or FSDP configuration, a launch script or a Slurm job.

    python scripts/distributed_setup.py deepspeed --zero_stage 2 --offload_optimizer --bf16 \\
        --output config/ds_config.json
    python scripts/distributed_setup.py fsdp --sharding_strategy FULL_SHARD \\
        --mixed_precision BFLOAT16
    python scripts/distributed_setup.py launcher --config config.yaml --num_gpus_per_node 4 \\
        --use_deepspeed
    python scripts/distributed_setup.py slurm --config config.yaml --num_nodes 4 \\
        --num_gpus_per_node 8 --time_limit 48:00:00
    python scripts/distributed_setup.py slurm --config config.yaml --requeue \\
        --results runs/short --max_steps 50000

The last command also prints how many jobs the run needs and how often it should save. Each file
contains the command that generated it. A generated file that was not edited is replaced; any other
existing file is replaced only with --force. `SUBCOMMAND --help` lists the flags.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import process

if __name__ == "__main__":
    process.catch_signals()

from support.cli import argument_types as kinds
from support.cli.fsdp_config import SHARDING
from support.cluster import setup_files
from support.errors import EXIT_FAILED, UserError
from support.files.atomic import write_text
from support.report import slurm_budget

count = kinds.whole(1, 100_000)
DEFAULT = "(default: %(default)s)"


def build_parser() -> argparse.ArgumentParser:
    """Build the parser: each subcommand with its flags."""
    parser = kinds.Parser(
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
        epilog="\n".join(__doc__.splitlines()[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")
    for name, summary, output, add_flags in (
        (
            "deepspeed",
            "a DeepSpeed configuration, for --ds_config",
            "config/ds_config.json",
            [add_deepspeed_flags],
        ),
        (
            "fsdp",
            "an FSDP configuration, for --fsdp_config",
            "config/fsdp_config.json",
            [add_fsdp_flags],
        ),
        (
            "launcher",
            "a script that starts a run without a scheduler",
            "scripts/run_training.sh",
            [add_script_flags, add_launcher_flags],
        ),
        (
            "slurm",
            "a Slurm batch script",
            "scripts/slurm_job.sh",
            [add_script_flags, add_slurm_flags, add_budget_flags],
        ),
    ):
        command = commands.add_parser(name, help=summary, allow_abbrev=False)
        add = command.add_argument
        add("--output", type=Path, default=Path(output), help=f"the file to write {DEFAULT}")
        add("--force", action="store_true", help="replace it even if it was edited")
        for add_group in add_flags:
            add_group(add)
    return parser


def add_deepspeed_flags(add: Callable) -> None:
    """Add the flags of `deepspeed`; `add` is the subcommand's `add_argument`, as in the others."""
    add("--zero_stage", type=int, choices=(1, 2, 3), default=2, help=f"what is sharded {DEFAULT}")
    add(
        "--offload_optimizer",
        action="store_true",
        help="optimizer states in host memory (with --nvme_path on NVMe)",
    )
    add(
        "--offload_param",
        action="store_true",
        help="parameters in host memory, stage 3 (with --nvme_path on NVMe)",
    )
    add("--nvme_path", metavar="DIR", help="offload to this disk instead; stage 3")
    add("--bf16", action="store_true", help="train in bf16")
    add("--fp16", action="store_true", help="train in fp16 with a dynamic loss scale")
    add(
        "--batch_size",
        type=count,
        help="sequences per GPU in a micro-batch (default: the run's --batch_size)",
    )
    add(
        "--model",
        default="gpt2",
        help="bucket sizes follow this model: tiny-gpt2, a GPT-2, or a folder with config.json "
        f"{DEFAULT}",
    )


def add_fsdp_flags(add: Callable) -> None:
    """Add the flags of `fsdp`."""
    add("--sharding_strategy", choices=SHARDING, default="FULL_SHARD", help=DEFAULT)
    add(
        "--mixed_precision",
        choices=("BFLOAT16", "FLOAT16", "FLOAT32"),
        default="BFLOAT16",
        help=DEFAULT,
    )
    add(
        "--offload_params",
        action="store_true",
        help="parameters, gradients and optimizer states in host memory",
    )
    add(
        "--layer_class",
        metavar="NAME",
        help="class of the layers that are sharded one by one (default: the model's blocks)",
    )


def add_script_flags(add: Callable) -> None:
    """Add the flags that `launcher` and `slurm` share."""
    add("--config", required=True, metavar="FILE", help="the run file (YAML) that the script reads")
    add("--num_nodes", type=count, default=1, help=f"nodes {DEFAULT}")
    add(
        "--num_gpus_per_node",
        type=count,
        help="ranks per node (default: 1, or the slots in --hosts)",
    )
    add(
        "--use_deepspeed",
        action="store_true",
        help="start with DeepSpeed's launcher, on a single node only",
    )


def add_launcher_flags(add: Callable) -> None:
    """Add the flags of `launcher`."""
    add("--master_addr", default="127.0.0.1", help=f"address of the first node {DEFAULT}")
    add("--master_port", type=count, default=29500, help=DEFAULT)
    add(
        "--node_rank",
        type=int,
        default=0,
        help="index of this node (default: %(default)s; or NODE_RANK)",
    )
    add(
        "--hosts",
        metavar="FILE",
        help="start all nodes over ssh: one host name per line, the first is the master",
    )


def add_slurm_flags(add: Callable) -> None:
    """Add the flags of `slurm`."""
    add("--time_limit", default="02:00:00", metavar="HH:MM:SS", help=DEFAULT)
    add("--partition", help="partition of the job")
    add("--account", help="account that the job is charged to")
    add("--modules", metavar="NAMES", help="modules to load, separated by spaces or commas")
    add(
        "--venv",
        metavar="DIR",
        help="Python environment (default: the one active at sbatch, else .venv)",
    )
    add(
        "--requeue",
        action="store_true",
        help="save before the time limit or on preemption, requeue the job, and resume",
    )
    add(
        "--signal_seconds",
        type=kinds.whole(1, 65535),  # Slurm's limit
        metavar="S",
        help="send the signal to save S seconds before the limit (default: 120; needs --requeue)",
    )


def add_budget_flags(add: Callable) -> None:
    """Add the flags of the budget that `slurm` prints; see report.slurm_budget."""
    for name, kind, metavar, text in (
        ("results", kinds.name, "RUN", "print the jobs of the run, from a short one that saved"),
        ("hours", kinds.positive_float, "H", "length of the run: hours of training"),
        ("max_steps", kinds.max_steps, "N", "length of the run: optimizer steps"),
        ("save_seconds", kinds.positive_float, "S", "time of a save, instead of the measured one"),
        ("step_seconds", kinds.positive_float, "S", "time of a step, instead of the measured one"),
        ("mtbf", kinds.positive_float, "H", "hours between failures of a GPU (default: 50000)"),
    ):
        add(f"--{name}", type=kind, metavar=metavar, help=text)


def check_output(args) -> None:
    """Refuse to replace a file that was edited, is not from this script, or is an input.

    With --force any regular file except an input may be replaced.

    Raises:
        UserError: --output is such a file, or no regular file.
        OSError: the file cannot be read.
    """
    path = args.output
    for flag in ("config", "hosts"):
        source = getattr(args, flag, None)
        if source and path.exists() and Path(source).exists() and path.samefile(source):
            raise UserError(f"--output {path} is the file of --{flag}: name another one.")
    if path.exists() and not path.is_file():
        raise UserError(f"--output {path} is not a file: name another one.")
    if path.exists() and not args.force and not setup_files.is_unedited(path):
        raise UserError(
            f"{path} was edited, or was not written by this script: --force replaces it, "
            "--output names another file."
        )


def generate(args, made_by: str) -> str:
    """Return the text of the file.

    Args:
        args: the subcommand and its flags.
        made_by: the command line that generates the file, which the file quotes.
    Raises:
        UserError: a value or a combination of values cannot be used.
    """
    if args.command == "deepspeed":
        return setup_files.as_json(setup_files.deepspeed_config(args), made_by)
    if args.command == "fsdp":
        return setup_files.as_json(setup_files.fsdp_config(args), made_by)
    return {"launcher": setup_files.launch_script, "slurm": setup_files.slurm_job}[args.command](
        args, made_by
    )


def main() -> None:
    """Read the arguments, write the file, and print what to do next."""
    try:
        args = build_parser().parse_args()
        setup_files.check_values(args)
        check_output(args)
        made_by = shlex.join(["python", "scripts/distributed_setup.py", *sys.argv[1:]])
        text = setup_files.with_digest(generate(args, made_by))
        budget = slurm_budget.report(args) if args.command == "slurm" else ""
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.output.resolve(), text)
        if args.command in ("launcher", "slurm"):
            args.output.chmod(0o755)
    except UserError as error:
        print(f"❌ {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"❌ {args.output} cannot be written: {error.strerror}.", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    print(f"📁 {args.output}\n{setup_files.next_step(args)}")
    if budget:
        print(f"\n{budget}")


if __name__ == "__main__":
    process.run_command_line(main, printed=False)
