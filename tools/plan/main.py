"""Estimate the memory of a run under every strategy, without weights, torch or a GPU.

    python scripts/plan_memory.py --model gpt2-xl --gpus 4 --gpu_memory 16
    python scripts/plan_memory.py --model path/to/config.json --gpus 8 --seq_length 4096
    python scripts/plan_memory.py --config recipes/gpt2_xl_zero3.yaml --gpus 4 --gpu_memory 16
    python scripts/plan_memory.py --model gpt2 --gpu_memory 16,12,8 --gpu_speeds 1,0.7,0.5

It prints which strategies fit, and the command to run the simplest of them; with --explain every
term of the estimate. --config plans a run file, and answers for its strategy. Without --gpu_memory
it plans processes on CPUs. --solve finds for each strategy the largest batch or the fewest GPUs.
With an amount of work and a rate it also prints the cost: optimizer steps, hours, price, energy;
with --time_limit the Slurm jobs, and with --bandwidth the speed on more GPUs or nodes.

    python scripts/plan_memory.py --model gpt2-xl --nodes 2 --gpu_memory 80 --tokens 1000000000 \\
        --device A100 --bandwidth 10 --price 2.5 --watts 400 --time_limit 24:00:00 --save_seconds 60

docs/PLAN.md explains the estimate and compares it with measurements. Exit codes: 0; 1 if nothing
fits, if the run file of --config does not fit, or if --measure fails; 2 for wrong usage.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from distributed_training.cli.parser import Options
from distributed_training.errors import EXIT_COMPLETED, EXIT_FAILED
from distributed_training.memory import fit
from distributed_training.memory.estimate import CUDA_CONTEXT, supporting
from distributed_training.memory.fit import Devices, Limits
from distributed_training.strategies.table import PREFERENCE
from distributed_training.text_tables import text_table
from distributed_training.units import GB
from distributed_training.workload.workload import Workload
from tools.plan import command, cost, flags, text
from tools.plan.workload import read_workload


def main() -> int:
    """Read the arguments, and print the answer; return the exit code."""
    args, work, devices = read_workload(flags.read_flags(flags.build_parser(__doc__)))
    return (solve if args.solve else plan)(args, work, devices)


def plan(args: Options, work: Workload, devices: Devices) -> int:
    """Print the memory estimate of every strategy, and a command; return the exit code."""
    needs = [devices.estimate(work, strategy) for strategy in supporting(work)]
    fits = {need.strategy: devices.fits(work, need.strategy) for need in needs}
    chosen, changed = fit.recommend(work, devices)
    if of_file := fits.get(args.strategy):
        chosen, changed = next(n for n in needs if n.strategy == args.strategy), work
    command_line = spent = None
    if chosen:
        command_line = command.command_of(args, changed, chosen.strategy, devices)
        if cost.is_planned(args):
            own_flags = command.flags_of(args, changed, chosen.strategy)
            spent = cost.cost_of(args, changed, chosen, own_flags, devices)
    code = EXIT_COMPLETED if chosen and (of_file or not args.strategy) else EXIT_FAILED
    if args.json:
        own = {"file": args.config, "strategy": args.strategy, "fits": bool(of_file)}
        answer = {
            "model": args.model,
            "parameters": work.model.total,
            "gpus": args.gpus,
            "cuda_context_bytes": CUDA_CONTEXT,
            "strategies": [text.as_dict(work, need, devices) for need in needs],
            **({"config": own} if args.config else {}),
            "recommended": chosen.strategy if chosen else None,
            "command": command_line,
            **({"cost": cost.as_dict(*spent)} if spent else {}),
        }
        print(json.dumps(answer, indent=2))
        return code
    print(text.as_text(args, work, devices, needs))
    if args.strategy and not of_file:
        print(f"❌ {args.config}: {args.strategy} does not fit.")
    if chosen is None:
        print(
            "❌ Nothing fits, not even one sequence at a time. Use more GPUs (--solve gpus),\n"
            "   a smaller model, or a shorter --seq_length."
        )
        return code
    used = getattr(chosen, "peak" if args.gpu_memory else "total") / GB
    use = f"Use {chosen.strategy}, the simplest strategy that fits"
    print(f"{f'{args.config}: {chosen.strategy} fits' if of_file else use} ({used:.1f} GB):")
    print(f"\n    {command_line}\n{text.about_shares(changed, chosen.strategy, devices)}", end="")
    print(f"\n{cost.as_text(*spent)}\n" if spent else "", end="")
    return code


def solve(args: Options, work: Workload, devices: Devices) -> int:
    """Print the answer of each strategy to --solve; return the exit code."""
    search: Callable[[Workload, str], int | None] = devices.largest_batch
    header = "largest batch"
    if args.solve == "gpus" and isinstance(devices, Limits):
        limits = replace(devices, ranks_per_node=args.gpus_per_node or 8)
        search, header = partial(fit.fewest_gpus, limits=limits), "fewest GPUs"
    supported = supporting(work)
    answers = {name: search(work, name) for name in PREFERENCE if name in supported}
    if args.json:
        print(json.dumps({"solve": args.solve, "answers": answers}, indent=2))
    else:
        rows = [(strategy, str(answer or "nothing fits")) for strategy, answer in answers.items()]
        print(f"{text.title(args, work, devices)}\n\n{text_table(rows, ('strategy', header))}")
    return EXIT_COMPLETED if any(answers.values()) else EXIT_FAILED
