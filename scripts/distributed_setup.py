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

import os
import re
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import process

if __name__ == "__main__":
    process.catch_signals()

from support.cli import argument_types as kinds
from support.cli.fsdp_config import SHARDING
from support.cli.parse import parse_arguments
from support.cluster import setup_files
from support.errors import TrainingError, UserError
from support.files.atomic import write_text
from support.report.cost import slurm_budget

COUNT = kinds.whole(1, 100_000)


def flag(name: str, kind, text: str, **options) -> tuple[str, dict]:
    """Return a row for a flag with a value.

    Args:
        name: its name, and after a space the placeholder of its value in --help, if that is not
            the name in capitals.
        kind: a type, or a tuple with the allowed values.
    """
    name, _, metavar = name.partition(" ")
    if options.get("default") is not None and "(default:" not in text:
        text += " (default: %(default)s)"
    options |= {"metavar": metavar} if metavar else {}
    return name, {"choices" if isinstance(kind, tuple) else "type": kind, "help": text, **options}


def switch(name: str, text: str) -> tuple[str, dict]:
    """Return a row for a flag without a value."""
    return name, {"action": "store_true", "help": text}


DEEPSPEED_FLAGS = (
    flag("--zero_stage", int, "what is sharded", choices=(1, 2, 3), default=2),
    switch("--offload_optimizer", "optimizer states in host memory (with --nvme_path on NVMe)"),
    switch("--offload_param", "parameters in host memory, stage 3 (with --nvme_path on NVMe)"),
    flag("--nvme_path DIR", str, "offload to this disk instead; stage 3"),
    switch("--bf16", "train in bf16"),
    switch("--fp16", "train in fp16 with a dynamic loss scale"),
    flag("--batch_size", COUNT, "sequences per GPU in a micro-batch (default: that of the run)"),
    flag(
        "--model",
        str,
        "bucket sizes follow this model: tiny-gpt2, a GPT-2, or a folder with config.json",
        default="gpt2",
    ),
)
PRECISIONS = ("BFLOAT16", "FLOAT16", "FLOAT32")
FSDP_FLAGS = (
    flag("--sharding_strategy", tuple(SHARDING), "", default="FULL_SHARD"),
    flag("--mixed_precision", PRECISIONS, "", default="BFLOAT16"),
    switch("--offload_params", "parameters, gradients and optimizer states in host memory"),
    flag(
        "--layer_class NAME",
        str,
        "class of the layers that are sharded one by one (default: the model's blocks)",
    ),
)
SCRIPT_FLAGS = (
    flag("--config FILE", str, "the run file (YAML) to use", required=True),
    flag("--num_nodes", COUNT, "nodes", default=1),
    flag("--num_gpus_per_node", COUNT, "ranks per node (default: 1, or the slots in --hosts)"),
    switch("--use_deepspeed", "start with DeepSpeed's launcher, on a single node only"),
)
LAUNCHER_FLAGS = (
    *SCRIPT_FLAGS,
    flag("--master_addr", str, "address of the first node", default="127.0.0.1"),
    flag("--master_port", COUNT, "", default=29500),
    flag("--node_rank", int, "index of this node (default: %(default)s; or NODE_RANK)", default=0),
    flag(
        "--hosts FILE",
        str,
        "start all nodes over ssh: one host name per line, the first is the master",
    ),
)
SLURM_FLAGS = (
    *SCRIPT_FLAGS,
    flag("--time_limit HH:MM:SS", str, "", default="02:00:00"),
    flag("--partition", str, "partition of the job"),
    flag("--account", str, "account that the job is charged to"),
    flag("--modules NAMES", str, "modules to load, separated by spaces or commas"),
    flag("--venv DIR", str, "environment (default: that active at sbatch, else .venv)"),
    switch("--requeue", "save before the time limit or on preemption, requeue the job, and resume"),
    flag(
        "--signal_seconds S",
        kinds.whole(1, 65535),  # Slurm's limit
        "send the signal to save S seconds before the limit (default: 120; needs --requeue)",
    ),
    # Of the budget that is printed, see support/report/cost.py.
    flag("--results RUN", kinds.name, "print the jobs of the run, from a short one"),
    flag("--hours H", kinds.positive_float, "length of the run: hours of training"),
    flag("--max_steps N", kinds.max_steps, "length of the run: optimizer steps"),
    flag("--save_seconds S", kinds.positive_float, "time of a save, if not measured"),
    flag("--step_seconds S", kinds.positive_float, "time of a step, if not measured"),
    flag("--mtbf H", kinds.positive_float, "hours between failures of a GPU (default: 50000)"),
)
# Name of a subcommand: what it writes, the default of --output, its flags, and its function.
COMMANDS = {
    "deepspeed": (
        "a DeepSpeed configuration, for --ds_config",
        "config/ds_config.json",
        DEEPSPEED_FLAGS,
        setup_files.deepspeed_config,
    ),
    "fsdp": (
        "an FSDP configuration, for --fsdp_config",
        "config/fsdp_config.json",
        FSDP_FLAGS,
        setup_files.fsdp_config,
    ),
    "launcher": (
        "a script that starts a run without a scheduler",
        "scripts/run_training.sh",
        LAUNCHER_FLAGS,
        setup_files.launch_script,
    ),
    "slurm": ("a Slurm batch script", "scripts/slurm_job.sh", SLURM_FLAGS, setup_files.slurm_job),
}


def build_parser() -> kinds.Parser:
    """Build the parser: each subcommand with its flags."""
    parser = kinds.Parser.of_script(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")
    for name, (summary, output, flags, _) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, allow_abbrev=False)
        for row in (
            flag("--output", Path, "the file to write", default=Path(output)),
            switch("--force", "replace it even if it was edited"),
            *flags,
        ):
            command.add_argument(row[0], **row[1])
    return parser


def check_run_file(args: kinds.Options) -> None:
    """Parse the run file as the run will, so that an error in it is found before the queue.

    Raises:
        UserError: the run would not start with this file.
    """
    hosts, slots = setup_files.read_hosts(args.hosts) if getattr(args, "hosts", None) else ([], 0)
    ranks = (len(hosts) or args.num_nodes) * (slots or args.num_gpus_per_node or 1)
    os.environ["WORLD_SIZE"] = str(ranks)  # train_batch_size of a DeepSpeed file depends on it
    parse_arguments(["--config", args.config])


def check_output(args) -> None:
    """Refuse to replace a file that was edited, is not from this script, or is an input.

    With --force any regular file except an input may be replaced.
    """
    path = args.output
    for name in ("config", "hosts"):
        source = getattr(args, name, None)
        if source and path.exists() and Path(source).exists() and path.samefile(source):
            raise UserError(f"--output {path} is the file of --{name}: name another one.")
    if path.exists() and not path.is_file():
        raise UserError(f"--output {path} is not a file: name another one.")
    if path.exists() and not args.force and not setup_files.is_unedited(path):
        raise UserError(
            f"{path} was edited, or was not written by this script: --force replaces it, "
            "--output names another file."
        )


def main() -> None:
    """Read the arguments, write the file, and print what to do next."""
    args = build_parser().parse_args()
    setup_files.check_values(args)
    made_by = shlex.join(["python", "scripts/distributed_setup.py", *sys.argv[1:]])
    budget = ""
    try:
        check_output(args)
        text = setup_files.with_digest(COMMANDS[args.command][-1](args, made_by))
        if args.command in ("launcher", "slurm"):
            check_run_file(args)
        if args.command == "slurm":
            budget = slurm_budget(args)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.output.resolve(), text)
        if args.command in ("launcher", "slurm"):
            args.output.chmod(0o755)
    except OSError as error:
        raise TrainingError(f"{args.output} cannot be written: {error.strerror}.") from error
    print(f"📁 {args.output}\n{setup_files.next_step(args)}")
    if getattr(args, "use_deepspeed", False) and not re.search(
        r"^(exec )?deepspeed ", text, re.MULTILINE
    ):
        print(
            "ℹ️  --use_deepspeed is for a single node without --hosts and --requeue: this script "
            "starts the ranks with torchrun or srun. The strategy is that of the run file."
        )
    if budget:
        print(f"\n{budget}")


if __name__ == "__main__":
    process.run_command_line(main, printed=False)
