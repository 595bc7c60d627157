#!/usr/bin/env python3
"""Estimate the memory of a run under every strategy, without weights, torch or a GPU.

    python scripts/plan_memory.py --model gpt2-xl --gpus 4 --gpu_memory 16
    python scripts/plan_memory.py --model path/to/config.json --gpus 8 --gpu_memory 80 \\
        --seq_length 4096

It prints which strategies fit, and the command to run the simplest of them. --solve answers another
question for each strategy: the largest batch, the largest model of GPT-2's shape, the fewest GPUs.

    python scripts/plan_memory.py --model gpt2-xl --gpus 4 --gpu_memory 16 --solve batch
    python scripts/plan_memory.py --gpus 4 --gpu_memory 24 --solve model
    python scripts/plan_memory.py --model gpt2-xl --gpu_memory 16 --solve gpus

The formulas and their sources are in support/memory/estimate.py; docs/MEMORY_COMPARISON.md compares
them with measurements. Exit codes: 0; 1 if nothing fits; 2 for wrong usage.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import process

if __name__ == "__main__":
    process.catch_signals()

from tabulate import tabulate

from support.cli import argument_types as kinds
from support.cli.arguments import choose_seq_length
from support.errors import EXIT_COMPLETED, EXIT_FAILED, UserError
from support.memory import architectures
from support.memory import estimate as planner
from support.memory.estimate import (
    CUDA_CONTEXT,
    GPU_SLACK,
    PREFERENCE,
    Limits,
    MemoryEstimate,
    Workload,
)
from support.units import GB


def build_parser() -> kinds.Parser:
    """Build the parser; flags of a run have the same names as in real_model_example.py."""
    about = "Predict the memory of a run under every strategy."
    parser = kinds.Parser(prog="plan_memory.py", description=about, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--model",
        type=kinds.name,
        default="gpt2",
        help="gpt2, gpt2-medium, gpt2-large, gpt2-xl, tiny-gpt2, a model folder or a config.json "
        "(GPT-2, Llama, Mistral, Qwen, GPT-NeoX; default: %(default)s)",
    )
    add(
        "--gpus", type=kinds.ranks, default=1, help="ranks in all, one a GPU (default: %(default)s)"
    )
    add("--gpus_per_node", type=kinds.ranks, help="of one node (default: --gpus, at most 8)")
    add(
        "--gpu_memory",
        type=kinds.positive_float,
        required=True,
        metavar="GB",
        help="of one GPU, as nvidia-smi counts (2^30 bytes)",
    )
    add(
        "--host_memory",
        type=kinds.positive_float,
        metavar="GB",
        help="of a node, for offload and infinity (default: no limit)",
    )
    add(
        "--nvme_free",
        type=kinds.positive_float,
        metavar="GB",
        help="of a node's disk, for infinity (default: no limit)",
    )
    add(
        "--batch_size",
        type=kinds.batch,
        default=4,
        help="blocks per GPU in a micro-batch (default: %(default)s)",
    )
    add(
        "--seq_length",
        type=kinds.block_length,
        help="tokens in a block (default: as real_model_example.py has it)",
    )
    add("--gradient_accumulation_steps", type=kinds.batch, default=1, help="(default: %(default)s)")
    add(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        default="bf16",
        help="(default: %(default)s)",
    )
    add(
        "--gradient_checkpointing",
        action="store_true",
        help="recompute activations in the backward pass",
    )
    add(
        "--no_fused_gelu",
        action="store_false",
        dest="fused_gelu",
        help="GPT-2's activation as transformers writes it",
    )
    add(
        "--lora_r",
        type=kinds.rank_of_adapters,
        metavar="R",
        help="train adapters of this rank on frozen weights",
    )
    add(
        "--lora_targets",
        type=kinds.layer_names,
        metavar="LIST",
        help="layers that get one, as in real_model_example.py",
    )
    add(
        "--solve",
        choices=("batch", "model", "gpus"),
        help="find the largest batch, the largest model of GPT-2's shape, or the fewest GPUs, "
        "for each strategy",
    )
    add("--json", action="store_true", help="print JSON instead (bytes)")
    return parser


def main() -> None:
    """Read the arguments, print the memory estimates, and exit with the exit code."""
    try:
        args = build_parser().parse_args()
        model = architectures.find_architecture(args.model)
        args = args.replace(seq_length=choose_seq_length(args, model.limit))
        if args.gpus_per_node and args.gpus > 1 and args.gpus % min(args.gpus_per_node, args.gpus):
            raise UserError(
                f"--gpus {args.gpus} is no multiple of --gpus_per_node {args.gpus_per_node}."
            )
        if args.gpus > 8 and not args.gpus_per_node and args.gpus % 8:
            raise UserError(
                f"--gpus {args.gpus} on nodes of 8: name another number with --gpus_per_node."
            )
        if args.lora_targets and not args.lora_r:
            raise UserError("--lora_targets needs --lora_r.")
        work = Workload(
            model,
            args.gpus,
            args.batch_size,
            args.seq_length,
            args.precision,
            args.gradient_checkpointing,
            args.gradient_accumulation_steps,
            lora=planner.adapters(model, args.lora_r, args.lora_targets),
            fused_gelu=args.fused_gelu,
        )
    except UserError as error:
        print(f"❌ {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    limits = Limits(
        *(
            None if size is None else int(size * GB)
            for size in (args.gpu_memory, args.host_memory, args.nvme_free)
        ),
        min(args.gpus_per_node or 8, args.gpus),
    )
    answer = solve if args.solve else plan
    sys.exit(answer(args, work, limits))


# ------------------------------------------------------------------------------ the memory estimate


def plan(args, work: Workload, limits: Limits) -> int:
    """Print the memory estimate of every strategy, and the command of the recommended one.

    Args:
        args: the command-line arguments.
        work: the workload: model, ranks, batch.
        limits: the memory of a GPU and of a node, in bytes.
    Returns:
        The exit code.
    """
    needs = planner.predict_all(work)
    batches = {need.strategy: planner.largest_batch(work, need.strategy, limits) for need in needs}
    chosen, work = choose(work, limits)
    command = run_command(args, work, chosen.strategy) if chosen else None
    if args.json:
        print(
            json.dumps(
                {
                    "model": args.model,
                    "parameters": work.model.total,
                    "gpus": args.gpus,
                    "cuda_context_bytes": CUDA_CONTEXT,
                    "strategies": [as_dict(need, limits, batches[need.strategy]) for need in needs],
                    "recommended": chosen.strategy if chosen else None,
                    "command": command,
                },
                indent=2,
            )
        )
        return EXIT_COMPLETED if chosen else EXIT_FAILED
    print(title(args, work) + "\n")
    headers = [
        "\nstrategy",
        "para-\nmeters",
        "gradi-\nents",
        "opti-\nmizer",
        "\nbuffers",
        "activa-\ntions",
        "\nlogits",
        "\npeak",
        "\nfits",
        "host\n/node",
        "NVMe\n/node",
        "sent\n/step",
        "sent\nvs dp",
    ]
    sent_by_dp = needs[0].sent
    rows = [row(need, limits, batches[need.strategy], sent_by_dp) for need in needs]
    print(tabulate(rows, headers, tablefmt="simple", disable_numparse=True))
    slack, context = 100 * GPU_SLACK - 100, CUDA_CONTEXT / GB
    print(
        f"\nGB (2^30 bytes) per GPU. A peak is the most at any moment; to fit, {slack:.0f} % and "
        f"{context:.0f} GB more are set aside for\n"
        "the allocator's holes, the CUDA context and NCCL. Dropout is not counted. "
        '"Sent" is by a rank in a step: what\n'
        "a strategy costs in speed where the network is slow."
    )
    if chosen is None:
        print(
            "❌ Nothing fits, not even one block at a time: more GPUs (--solve gpus), "
            "a smaller model (--solve model), a\n"
            "   shorter --seq_length, or --gradient_checkpointing."
        )
        return EXIT_FAILED
    print(
        f"Take {chosen.strategy}, the simplest that fits ({chosen.peak / GB:.1f} GB):\n\n"
        f"    {command}"
    )
    return EXIT_COMPLETED


def choose(work: Workload, limits: Limits) -> tuple[MemoryEstimate | None, Workload]:
    """Choose the first strategy of PREFERENCE that fits, if necessary with smaller micro-batches.

    Returns:
        The memory estimate, or None if nothing fits; and the workload, in which gradient
        accumulation makes up for smaller micro-batches.
    """
    if need := planner.recommend(work, limits):
        return need, work
    for strategy in PREFERENCE:
        if split := planner.fitting_split(work, strategy, limits):
            return planner.predict(split, strategy), split
    return None, work


def row(need: MemoryEstimate, limits: Limits, batch: int, plain: int) -> list[str]:
    """Return one row of the table.

    Args:
        need: the memory estimate of a strategy.
        limits: the memory of a GPU and of a node, in bytes.
        batch: the largest micro-batch that fits, in sequences; 0 if none does.
        plain: bytes that a rank sends in a step of dp.
    """
    if limits.hold(need):
        fits = "yes"
    else:
        fits = f"with batch {batch}" if batch else "no"
    on_node = [size * limits.ranks_per_node for size in (need.host, need.nvme)]
    sizes = (
        need.parameters,
        need.gradients,
        need.optimizer,
        need.buffers,
        need.activations,
        need.logits,
        need.peak,
    )
    return [
        need.strategy,
        *map(in_gb, sizes),
        fits,
        *map(in_gb, on_node),
        in_gb(need.sent),
        f"{need.sent / plain:.2f}" if plain else "—",
    ]


def in_gb(size: int) -> str:
    """Format bytes in GB (2^30 bytes) with two decimals; 0 as a dash."""
    return f"{size / GB:.2f}" if size else "—"


def title(args, work: Workload) -> str:
    """Describe the workload in one line."""
    options = ", gradient checkpointing" if work.gradient_checkpointing else ""
    if work.lora:
        options += f", LoRA of rank {work.lora.r} ({sum(work.trained):,} parameters trained)"
    accumulated = (
        f" × {args.gradient_accumulation_steps} micro-batches"
        if args.gradient_accumulation_steps > 1
        else ""
    )
    return (
        f"{args.model} ({work.model.total / 1e6:,.1f}M parameters) on {args.gpus} "
        f"GPU{'s' * (args.gpus > 1)} of {args.gpu_memory:g} GB: {args.precision}, "
        f"{args.batch_size} blocks of {args.seq_length} tokens each{accumulated}{options}"
    )


def run_command(args, work: Workload, strategy: str) -> str:
    """Return the command line that trains the workload with a strategy."""
    path = Path(args.model)
    # real_model_example.py takes a folder, not a config.json.
    folder = path.parent if path.is_file() else path if path.is_dir() else None
    flags = ["--model", folder or args.model]
    flags += ["--from_scratch"] if folder and not any(folder.glob("*.safetensors")) else []
    flags += [
        "--strategy",
        strategy,
        "--batch_size",
        work.batch_size,
        "--seq_length",
        args.seq_length,
        "--precision",
        args.precision,
    ]
    if work.accumulation > 1:
        flags += ["--gradient_accumulation_steps", work.accumulation]
    flags += ["--gradient_checkpointing"] * args.gradient_checkpointing + ["--no_fused_gelu"] * (
        not args.fused_gelu
    )
    flags += ["--lora_r", args.lora_r] if args.lora_r else []
    flags += ["--lora_targets", args.lora_targets] if args.lora_targets else []
    per_node = min(args.gpus_per_node or 8, args.gpus)
    nodes = -(-args.gpus // per_node)
    if args.gpus == 1:
        launcher = ["python"]
    elif nodes == 1:
        launcher = ["torchrun", f"--nproc_per_node={args.gpus}"]
    else:
        launcher = [
            "srun",
            f"--nodes={nodes}",
            f"--ntasks-per-node={per_node}",
            f"--gpus-per-node={per_node}",
            "--kill-on-bad-exit=1",
            "python",
        ]
    return shlex.join(map(str, [*launcher, "real_model_example.py", *flags]))


def as_dict(need: MemoryEstimate, limits: Limits, batch: int) -> dict:
    """Return a strategy's entry for --json: bytes of one rank, and whether it fits."""
    sizes = {
        f"{name}_bytes": value
        for name, value in dataclasses.asdict(need).items()
        if isinstance(value, int)
    }
    return {"strategy": need.strategy, **sizes, "fits": limits.hold(need), "largest_batch": batch}


# ------------------------------------------------------------------------------------------ --solve


WHAT_IS_SOLVED = {"batch": "largest batch", "model": "largest model", "gpus": "fewest GPUs"}


def solve(args, work: Workload, limits: Limits) -> int:
    """Print the largest batch, the largest model or the fewest GPUs of each strategy.

    Args:
        args: --solve, --json and the arguments of the run.
        work: the workload: model, ranks, batch.
        limits: the memory of a GPU and of a node, in bytes.
    Returns:
        The exit code.
    """
    if not args.json:
        print(
            f"The {WHAT_IS_SOLVED[args.solve]} of each strategy, else as asked for: "
            f"{title(args, work)}\n"
        )
    answers, name = {}, {"batch": "batch_size", "model": "parameters", "gpus": "gpus"}[args.solve]
    for strategy in PREFERENCE:
        if args.solve == "batch":
            answers[strategy] = planner.largest_batch(work, strategy, limits)
            text = f"--batch_size {answers[strategy]}"
        elif args.solve == "gpus":
            nodes = dataclasses.replace(limits, ranks_per_node=args.gpus_per_node or 8)
            answers[strategy] = planner.fewest_gpus(work, strategy, nodes)
            text = f"{answers[strategy]} GPU{'s' * (answers[strategy] != 1)}"
        else:
            model = planner.largest_gpt2(work, strategy, limits)
            answers[strategy] = model.total if model else 0
            text = (
                f"{model.total / 1e6:,.0f}M: {model.layers} layers, width {model.hidden}"
                if model
                else ""
            )
        if not args.json:
            print(f"{strategy:9} {text if answers[strategy] else 'nothing fits'}")
    if args.json:
        print(json.dumps({"solve": args.solve, name: answers}, indent=2))
    return EXIT_COMPLETED if any(answers.values()) else EXIT_FAILED


if __name__ == "__main__":
    process.run_command_line(main)
