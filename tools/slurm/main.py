"""Generate a DeepSpeed or FSDP configuration, a launch script or a Slurm job.

    python scripts/distributed_setup.py deepspeed --zero_stage 2 --offload_optimizer --bf16 \\
        --output config/ds_config.json
    python scripts/distributed_setup.py fsdp --sharding_strategy FULL_SHARD \\
        --mixed_precision BFLOAT16
    python scripts/distributed_setup.py launcher --config config.yaml --num_gpus_per_node 4 \\
        --use_deepspeed
    python scripts/distributed_setup.py slurm --config config.yaml --num_nodes 4 \\
        --num_gpus_per_node 8 --time_limit 48:00:00

Each file contains the command that generated it. An existing file is replaced only with --force.
`SUBCOMMAND --help` lists the flags. `plan_memory.py --time_limit` plans how many jobs a run needs,
and how often it should save.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from distributed_training.cli.parse import read_command_line
from distributed_training.cli.parser import Parser
from distributed_training.errors import TrainingError, UserError, redact
from distributed_training.files.atomic import write_text
from distributed_training.settings import flag_types
from distributed_training.strategies.fsdp.read_options import SHARDING
from tools.slurm import setup_files

COUNT = flag_types.whole(1, 100_000)
PORT = flag_types.whole(1024, 65535)


def word(text: str) -> str:
    """Return a name that a script may contain as it is: of a host, a partition or an account."""
    if not re.fullmatch(r"[\w.:%\[\]][\w.:%\[\],+@-]*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid name")
    return text


def build_parser() -> Parser:
    """Build the parser: each subcommand with its flags."""
    parser = Parser.of_script(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")

    def command(name: str, summary: str, output: str) -> Callable:
        added = commands.add_parser(name, help=summary, allow_abbrev=False)
        said = f"the file to write (default: {output})"
        added.add_argument("--output", type=Path, default=Path(output), help=said)
        switch = "store_true"
        added.add_argument("--force", action=switch, help="replace an existing file")
        return added.add_argument

    summary = "a DeepSpeed configuration, for --ds_config"
    add_deepspeed_flags(command("deepspeed", summary, "config/ds_config.json"))
    summary = "an FSDP configuration, for --fsdp_config"
    add_fsdp_flags(command("fsdp", summary, "config/fsdp_config.json"))
    summary = "a script that starts a run without a scheduler"
    launcher = command("launcher", summary, "scripts/run_training.sh")
    slurm = command("slurm", "a Slurm batch script", "scripts/slurm_job.sh")
    for add in (launcher, slurm):
        add("--config", metavar="FILE", required=True, help="the run file (YAML) to use")
        add("--num_nodes", type=COUNT, default=1, help="nodes (default: 1)")
        add("--num_gpus_per_node", type=COUNT, default=1, help="ranks per node (default: 1)")
        said = "start with DeepSpeed's launcher; torchrun on several nodes, srun with --requeue"
        add("--use_deepspeed", action="store_true", help=said)
    add_launcher_flags(launcher)
    add_slurm_flags(slurm)
    return parser


def add_deepspeed_flags(add: Callable) -> None:
    """Add the flags of the DeepSpeed configuration; `add` is a parser's add_argument."""
    add("--zero_stage", type=int, choices=(1, 2, 3), default=2, help="(default: 2)")
    on_host = "in host memory, or with --nvme_path on NVMe"
    add("--offload_optimizer", action="store_true", help=f"optimizer states {on_host}")
    add("--offload_param", action="store_true", help=f"parameters {on_host}; stage 3")
    add("--nvme_path", metavar="DIR", help="offload to this disk; stage 3")
    add("--bf16", action="store_true", help="train in bf16")
    add("--fp16", action="store_true", help="train in fp16 with a dynamic loss scale")
    add("--batch_size", type=COUNT, help="sequences per GPU in a micro-batch (the run's)")


def add_fsdp_flags(add: Callable) -> None:
    """Add the flags of the FSDP configuration."""
    add("--sharding_strategy", choices=tuple(SHARDING), default="FULL_SHARD")
    precisions = ("BFLOAT16", "FLOAT16", "FLOAT32")
    add("--mixed_precision", choices=precisions, default="BFLOAT16")
    said = "parameters, gradients and optimizer states in host memory"
    add("--offload_params", action="store_true", help=said)
    said = "class of the layers that are sharded one by one (default: the model's blocks)"
    add("--layer_class", metavar="NAME", help=said)


def add_launcher_flags(add: Callable) -> None:
    """Add the flags of a script without a scheduler."""
    add("--master_addr", type=word, default="127.0.0.1", help="address of the first node")
    said = "(default: 29500; torchrun on one node chooses a free one)"
    add("--master_port", type=PORT, help=said)
    add("--node_rank", type=int, default=0, help="index of this node (default: NODE_RANK)")


def add_slurm_flags(add: Callable) -> None:
    """Add the flags of a Slurm batch script."""
    add("--time_limit", metavar="HH:MM:SS", default="02:00:00", help="(default: 02:00:00)")
    add("--partition", type=word, help="partition of the job")
    add("--account", type=word, help="account that the job is charged to")
    add("--modules", metavar="NAMES", help="modules to load, separated by spaces or commas")
    add("--venv", metavar="DIR", help="environment (default: the active one, else .venv)")
    said = "save before the time limit or on preemption, requeue the job, and resume"
    add("--requeue", action="store_true", help=said)
    said = "time of the signal to save before the limit, with --requeue (default: 120)"
    add("--signal_seconds", type=flag_types.whole(1, 65535), default=120, metavar="S", help=said)


def main() -> None:
    """Read the arguments, write the file, and print what to do next."""
    args = build_parser().parse_args()
    made_by = shlex.join(["python", "scripts/distributed_setup.py", *sys.argv[1:]])
    if not made_by.isprintable():
        raise UserError("An argument has a line end, or is not UTF-8: a script cannot hold it.")
    output = shlex.quote(str(args.output))
    if args.output.exists() and not args.force:
        raise UserError(f"{output} exists: --force replaces it, --output names another file.")
    if args.command == "deepspeed":
        text = setup_files.deepspeed_config(args, made_by)
        following = f"python real_model_example.py --ds_config {output}"
    elif args.command == "fsdp":
        text = setup_files.fsdp_config(args, made_by)
        following = f"python real_model_example.py --strategy fsdp --fsdp_config {output}"
    else:
        # Parse the run file as the run will, so that an error in it is found before the queue. The
        # train_batch_size of DeepSpeed depends on the number of ranks.
        read_command_line(["--config", args.config], args.num_nodes * args.num_gpus_per_node)
    if args.command == "launcher":
        text = setup_files.launch_script(args, made_by)
        following = f"bash {output}"
        if args.num_nodes > 1:
            following += "    # on each machine, with NODE_RANK=0, 1, …"
    elif args.command == "slurm":
        text, following = setup_files.slurm_job(args, made_by), f"sbatch {output}"
    if text != (text := redact(text)):
        print("ℹ️  The file has *** in place of a secret: it should come from the environment.")
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.output.resolve(), text)
        if args.command in ("launcher", "slurm"):
            mode = args.output.stat().st_mode
            args.output.chmod(mode | (mode & 0o444) >> 2)  # who may read it may execute it
    except OSError as error:
        raise TrainingError(f"{args.output} cannot be written: {error.strerror}.") from error
    print(f"📁 {args.output}\n{following}")
    if args.command in ("launcher", "slurm") and (note := setup_files.launcher_note(args)):
        print(f"ℹ️  {note}")
