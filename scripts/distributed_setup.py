#!/usr/bin/env python3
"""Write the files that a distributed run needs: a DeepSpeed or FSDP configuration, a launch script, a Slurm job.

    python scripts/distributed_setup.py deepspeed --zero_stage 2 --offload_optimizer --bf16 --output config/ds_config.json
    python scripts/distributed_setup.py fsdp --sharding_strategy FULL_SHARD --mixed_precision BFLOAT16
    python scripts/distributed_setup.py launcher --config config.yaml --num_gpus_per_node 4 --use_deepspeed
    python scripts/distributed_setup.py slurm --config config.yaml --num_nodes 4 --num_gpus_per_node 8 --time_limit 48:00:00

Each file says which command made it. None is overwritten without --force. `SUBCOMMAND --help` lists the flags.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import generators
from support.config import Parser, positive_int
from support.errors import EXIT_FAILED, UserError
from support.fsdp import SHARDING


def build_parser() -> argparse.ArgumentParser:
    """Every subcommand with its flags."""
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False, epilog="\n".join(__doc__.splitlines()[2:]),
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")

    def subcommand(name: str, help: str, output: str):
        command = commands.add_parser(name, help=help, allow_abbrev=False)
        command.add_argument("--output", type=Path, default=Path(output), help="the file to write (default: %(default)s)")
        command.add_argument("--force", action="store_true", help="overwrite it")
        return command.add_argument

    add = subcommand("deepspeed", "a DeepSpeed configuration, for --ds_config", "config/ds_config.json")
    add("--zero_stage", type=int, choices=(1, 2, 3), default=2, help="what is sharded (default: %(default)s)")
    add("--offload_optimizer", action="store_true", help="optimizer states in host memory (with --nvme_path on NVMe)")
    add("--offload_param", action="store_true", help="parameters in host memory, stage 3 (with --nvme_path on NVMe)")
    add("--nvme_path", metavar="DIR", help="keep what is offloaded on this disk; stage 3")
    add("--bf16", action="store_true", help="train in bf16")
    add("--fp16", action="store_true", help="train in fp16 with a dynamic loss scale")
    add("--batch_size", type=positive_int, default=4, help="blocks per GPU in a micro-batch (default: %(default)s)")
    add("--model", default="gpt2",
        help="bucket sizes follow this model: tiny-gpt2, a GPT-2, or a folder with config.json (default: %(default)s)")

    add = subcommand("fsdp", "an FSDP configuration, for --fsdp_config", "config/fsdp_config.json")
    add("--sharding_strategy", choices=SHARDING, default="FULL_SHARD", help="(default: %(default)s)")
    add("--mixed_precision", choices=("BFLOAT16", "FLOAT16", "FLOAT32"), default="BFLOAT16", help="(default: %(default)s)")
    add("--offload_params", action="store_true", help="parameters, gradients and optimizer states in host memory")
    add("--layer_class", metavar="NAME", help="class of the layers that are sharded one by one (default: the model's blocks)")

    for name, what, output in (("launcher", "a script that starts a run without a scheduler", "scripts/run_training.sh"),
                               ("slurm", "a Slurm batch script", "scripts/slurm_job.sh")):  # fmt: skip
        add = subcommand(name, what, output)
        add("--config", required=True, metavar="FILE", help="the run file (YAML) that the script reads")
        add("--num_nodes", type=positive_int, default=1, help="machines (default: %(default)s)")
        add("--num_gpus_per_node", type=positive_int, default=1, help="ranks on each (default: %(default)s)")
        add("--use_deepspeed", action="store_true", help="start with DeepSpeed's launcher where that works: on one machine")
        if name == "launcher":
            add("--master_addr", default="127.0.0.1", help="first machine's address (default: %(default)s)")
            add("--master_port", type=positive_int, default=29500, help="(default: %(default)s)")
            add("--node_rank", type=int, default=0, help="number of the machine (default: %(default)s; or NODE_RANK)")
            add("--hosts", metavar="FILE", help="start all machines over ssh: a host name a line, the first is the master")
        else:
            add("--time_limit", default="02:00:00", metavar="HH:MM:SS", help="(default: %(default)s)")
            add("--partition", help="where the job runs")
            add("--account", help="who pays")
            add("--modules", metavar="NAMES", help="modules to load, with spaces or commas between them")
            add("--venv", metavar="DIR", help="Python environment (default: the one active at sbatch, else .venv)")
            add("--requeue", action="store_true", help="save before the time limit or on preemption, requeue, go on")
    return parser


def main() -> None:
    """Read the arguments, write one file."""
    try:
        args = build_parser().parse_args()
        if args.output.exists() and not args.force:
            raise UserError(f"{args.output} exists: --force overwrites it.")
        made_by = shlex.join(["python", "scripts/distributed_setup.py", *sys.argv[1:]])
        text = {"deepspeed": generators.deepspeed_config, "fsdp": generators.fsdp_config, "launcher": generators.launch_script,
                "slurm": generators.slurm_job}[args.command](args, made_by)  # fmt: skip
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text if isinstance(text, str) else json.dumps(text, indent=2) + "\n", encoding="utf-8")
        if args.output.suffix == ".sh":
            args.output.chmod(0o755)
    except UserError as error:
        print(f"❌ {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"❌ {error.filename} cannot be written: {error.strerror}.", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    print(f"📁 {args.output}\n{generators.next_step(args)}")


if __name__ == "__main__":
    main()
