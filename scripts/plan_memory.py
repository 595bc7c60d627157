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

With an amount of work and a rate it also prints the cost: optimizer steps, hours, price, energy.

    python scripts/plan_memory.py --model gpt2-xl --gpus 4 --gpu_memory 80 --tokens 1000000000 \\
        --device A100 --price 2.5 --watts 400

The formulas and their sources are in support/memory/estimate.py; docs/MEMORY_COMPARISON.md compares
them with measurements. Exit codes: 0; 1 if nothing fits, or if --measure
fails; 2 for wrong usage.
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

from support.cli import argument_types as kinds
from support.cli.arguments import Arguments, choose_seq_length
from support.errors import EXIT_COMPLETED, EXIT_FAILED, UserError
from support.known_models import EMBEDDED_MODEL, name_on_hub
from support.memory import fit
from support.memory.architectures import find_architecture
from support.memory.estimate import CUDA_CONTEXT, GPU_SLACK, MemoryEstimate, predict_all
from support.memory.fit import PREFERENCE, Limits
from support.memory.workload import Workload, workload_of
from support.optimizers import OPTIMIZERS
from support.report import cost
from support.report.measure_rate import measure
from support.text_tables import text_table
from support.units import GB

# For each --solve: what it finds, and its key in --json.
SOLVED = {
    "batch": ("largest batch", "batch_size"),
    "model": ("largest model", "parameters"),
    "gpus": ("fewest GPUs", "gpus"),
}
# Flags with a value: name, type, default, metavar, help.
FLAGS = (
    (
        *("model", kinds.name, "gpt2", None),
        "gpt2, gpt2-medium, gpt2-large, gpt2-xl, tiny-gpt2, Llama-2-7B, Llama-3-8B, Qwen2.5-7B, "
        "Mistral-7B, another name on the hub, a model folder or a config.json (GPT-2, Llama, "
        "Mistral, Qwen, GPT-NeoX)",
    ),
    ("gpus", kinds.ranks, 1, None, "number of ranks, one per GPU"),
    ("gpus_per_node", kinds.ranks, None, None, "of one node (default: --gpus, at most 8)"),
    ("gpu_memory", kinds.positive_float, None, "GB", "of one GPU, as in nvidia-smi (2^30 bytes)"),
    ("host_memory", kinds.positive_float, None, "GB", "of a node, for offload and infinity"),
    ("nvme_free", kinds.positive_float, None, "GB", "of a node's disk, for infinity"),
    ("batch_size", kinds.batch, 4, None, "sequences per GPU in a micro-batch"),
    (
        *("seq_length", kinds.block_length, None, None),
        "tokens in a sequence (default: as in real_model_example.py)",
    ),
    ("gradient_accumulation_steps", kinds.batch, 1, None, "micro-batches per optimizer step"),
    ("lora_r", kinds.rank_of_adapters, None, "R", "train adapters of this rank, freeze the rest"),
    ("lora_targets", kinds.layer_names, None, "LIST", "the layers that get an adapter"),
)
# The cost: the amount of work, then the rate, then prices.
COST_FLAGS = (
    ("tokens", kinds.tokens, "N", "tokens to train on"),
    ("dataset_tokens", kinds.tokens, "N", "tokens of the training data, for --epochs passes"),
    ("epochs", kinds.epochs, None, "passes over --dataset_tokens (default: 1)"),
    ("max_steps", kinds.max_steps, None, "optimizer steps"),
    ("results", kinds.name, "RUN", "take the rate of this completed run (folder or results.json)"),
    ("device", kinds.word, None, "assume the rate of this GPU, A100 for example"),
    ("mfu", kinds.real(1), None, "assumed share of its peak FLOP/s (default: 0.4)"),
    ("price", kinds.positive_float, None, "dollars per GPU-hour"),
    ("watts", kinds.positive_float, None, "electric power of a GPU"),
)


def build_parser() -> kinds.Parser:
    """Build the parser; flags of a run have the same names as in real_model_example.py."""
    parser = kinds.Parser.of_script(__doc__)
    add = parser.add_argument
    for name, kind, default, metavar, text in FLAGS:
        text += "" if default is None else " (default: %(default)s)"
        required = name == "gpu_memory"
        add(f"--{name}", type=kind, default=default, metavar=metavar, help=text, required=required)
    group = parser.add_argument_group("cost (needs an amount of work and a rate)")
    for name, kind, metavar, text in COST_FLAGS:
        group.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    group.add_argument("--measure", action="store_true", help="measure the rate here, in 10 steps")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="bf16", help="(default: bf16)")
    add("--load_in_4bit", action="store_true", help="frozen weights in 4 bits; needs --lora_r")
    add("--optim", choices=tuple(OPTIMIZERS), default="adamw", help="(default: adamw)")
    add("--gradient_checkpointing", action="store_true", help="recompute activations in backward")
    add(
        "--no_fused_gelu",
        action="store_false",
        dest="fused_gelu",
        help="compute GPT-2's activation as transformers does",
    )
    add("--isolate_documents", action="store_true", help="as for --isolate_documents or --packing")
    add(
        "--solve",
        choices=tuple(SOLVED),
        help="find the largest batch, the largest model of GPT-2's shape, or the fewest GPUs, "
        "for each strategy",
    )
    add("--json", action="store_true", help="print JSON instead (bytes)")
    return parser


def main() -> int:
    """Read the arguments, and print the answer; return the exit code."""
    args, work, limits = read_workload(build_parser().parse_args())
    return (solve if args.solve else plan)(args, work, limits)


def read_workload(args: Arguments) -> tuple[Arguments, Workload, Limits]:
    """Return the arguments with the default --seq_length, the workload and the limits of memory."""
    model = find_architecture(args.model)
    args = args.replace(
        model=name_on_hub(args.model), seq_length=choose_seq_length(args, model.limit)
    )
    if args.gpus % ranks_per_node(args):
        default = "8, the default of --gpus_per_node: set --gpus_per_node"
        size = f"--gpus_per_node {args.gpus_per_node}" if args.gpus_per_node else default
        raise UserError(f"--gpus {args.gpus} is not a multiple of {size}.")
    for flag in ("lora_targets", "load_in_4bit"):
        if getattr(args, flag) and not args.lora_r:
            raise UserError(f"--{flag} needs --lora_r.")
    cost.is_planned(args)  # raises if its flags do not fit together
    work = workload_of(args, model, args.gpus, args.precision, args.isolate_documents)
    memory = (args.gpu_memory, args.host_memory, args.nvme_free)
    gpu, host, nvme = (None if size is None else int(size * GB) for size in memory)
    return args, work, Limits(gpu, host, nvme, ranks_per_node(args))


def ranks_per_node(args: Arguments) -> int:
    """Return the number of the run's ranks on each node."""
    return min(args.gpus_per_node or 8, args.gpus)


# ------------------------------------------------------------------------------ the memory estimate


def plan(args: Arguments, work: Workload, limits: Limits) -> int:
    """Print the memory estimate of every strategy, and a command; return the exit code."""
    needs = predict_all(work)
    chosen, changed = fit.recommend(work, limits)
    command = run_command(args, changed, chosen.strategy) if chosen else None
    if args.json:
        answer = {
            "model": args.model,
            "parameters": work.model.total,
            "gpus": args.gpus,
            "cuda_context_bytes": CUDA_CONTEXT,
            "strategies": [as_dict(work, need, limits) for need in needs],
            "recommended": chosen.strategy if chosen else None,
            "command": command,
        }
        if chosen and (spent := cost_of_plan(args, changed, chosen.strategy)):
            answer["cost"] = spent.as_dict()
        print(json.dumps(answer, indent=2))
        return EXIT_COMPLETED if chosen else EXIT_FAILED
    print(title(args, work) + "\n")
    print(table(needs, limits, {need.strategy: fits_how(work, need, limits) for need in needs}))
    print(
        f"\nGB (2^30 bytes) per GPU. The peak is the maximum over a step. To fit, a GPU needs "
        f"{100 * GPU_SLACK - 100:.0f} % and {CUDA_CONTEXT / GB:.0f} GB more,\n"
        "for fragmentation of the allocator, the CUDA context and NCCL. Dropout is not counted. "
        '"Sent" is the data that a rank\n'
        "sends in a step: what a strategy costs in speed if the network is slow."
    )
    if chosen is None:
        print(
            "❌ Nothing fits, not even one sequence at a time. Use more GPUs (--solve gpus), "
            "a smaller model\n"
            "   (--solve model), or a shorter --seq_length."
        )
        return EXIT_FAILED
    reason = "No command: adapters on random weights learn nothing. Name a model with weights."
    print(
        f"Use {chosen.strategy}, the simplest strategy that fits ({chosen.peak / GB:.1f} GB):\n\n"
        f"    {command or reason}"
    )
    if spent := cost_of_plan(args, changed, chosen.strategy):
        print(f"\n{spent}")
    return EXIT_COMPLETED


# Header and attribute of MemoryEstimate, of each column on the left of "fits".
ON_GPU = {
    "para-\nmeters": "parameters",
    "gradi-\nents": "gradients",
    "opti-\nmizer": "optimizer",
    "\nbuffers": "buffers",
    "activa-\ntions": "activations",
    "\nlogits": "logits",
    "\npeak": "peak",
}


def fits_how(work: Workload, need: MemoryEstimate, limits: Limits) -> str:
    """Describe whether a strategy fits, if necessary with a smaller batch and checkpointing."""
    if limits.hold(need):
        return "yes"
    if batch := fit.largest_batch(work, need.strategy, limits):
        return f"with batch {batch}"
    checkpointing = dataclasses.replace(work, gradient_checkpointing=True)
    if batch := fit.largest_batch(checkpointing, need.strategy, limits):
        return f"checkpointing, batch {min(batch, work.batch_size)}"
    return "no"


def table(needs: list[MemoryEstimate], limits: Limits, fits: dict[str, str]) -> str:
    """Return the table of all strategies.

    Args:
        needs: the memory estimates, of dp first.
        limits: the memory of a GPU and of a node.
        fits: see `fits_how`, by strategy.
    """
    rows = []
    for need in needs:
        ranks = limits.ranks_per_node
        sent = f"{need.sent / needs[0].sent:.2f}" if needs[0].sent else "—"
        on_gpu = [in_gb(getattr(need, name)) for name in ON_GPU.values()]
        elsewhere = map(in_gb, (need.host * ranks, need.nvme * ranks, need.sent))
        rows.append([need.strategy, *on_gpu, fits[need.strategy], *elsewhere, sent])
    headers = ["\nstrategy", *ON_GPU, "\nfits"]
    headers += ["host\n/node", "NVMe\n/node", "sent\n/step", "sent\nvs dp"]
    return text_table(rows, headers)


def in_gb(size: int) -> str:
    """Format bytes in GB (2^30 bytes) with two decimals; 0 as a dash."""
    return f"{size / GB:.2f}" if size else "—"


def title(args: Arguments, work: Workload) -> str:
    """Describe the workload in one line."""
    options = f" × {work.accumulation} micro-batches" if work.accumulation > 1 else ""
    if work.gradient_checkpointing:
        options += ", gradient checkpointing"
    if work.lora:
        options += f", LoRA of rank {work.lora.r} ({sum(work.trained):,} parameters trained)"
    return (
        f"{args.model} ({work.model.total / 1e6:,.1f}M parameters) on {args.gpus} "
        f"GPU{'s' * (args.gpus > 1)} of {args.gpu_memory:g} GB: {args.precision}, "
        f"{args.batch_size} sequences of {args.seq_length} tokens each{options}"
    )


def cost_of_plan(args: Arguments, work: Workload, strategy: str) -> cost.Cost | None:
    """Return the cost of the recommended run; None if no flag asks for it."""
    if not cost.is_planned(args):
        return None
    if args.device:
        return cost.cost_of(args, work, cost.assumed_rate(args, work))
    if args.measure:
        run = measure(run_flags(args, work, strategy), work)
    else:
        run = cost.read_run("--results", args.results)
    return cost.cost_of(args, work, cost.measured_rate(*run, work, args.model, strategy))


def run_command(args: Arguments, work: Workload, strategy: str) -> str | None:
    """Return the command line that trains the workload with a strategy.

    None if it would train adapters on random weights.
    """
    folder = model_folder(args)
    flags = run_flags(args, work, strategy)
    random = folder and not any(folder.glob("*.safetensors"))
    if work.lora and (random or args.model == EMBEDDED_MODEL):
        return None
    if random:
        flags.insert(2, "--from_scratch")
    per_node = ranks_per_node(args)
    launcher = "python" if args.gpus == 1 else f"torchrun --nproc_per_node={args.gpus}"
    if args.gpus > per_node:
        launcher = (
            f"srun --nodes={args.gpus // per_node} --ntasks-per-node={per_node} "
            f"--gpus-per-node={per_node} --kill-on-bad-exit=1 python"
        )
    return f"{launcher} real_model_example.py {shlex.join(flags)}"


def model_folder(args: Arguments) -> Path | None:
    """Return the model's folder, which real_model_example.py takes instead of its config.json."""
    path = Path(args.model)
    return path.parent if path.is_file() else path if path.is_dir() else None


def run_flags(args: Arguments, work: Workload, strategy: str) -> list[str]:
    """Return the flags of real_model_example.py for the workload, beginning with --model."""
    flags = ["--model", model_folder(args) or args.model]
    flags += ["--strategy", strategy, "--batch_size", work.batch_size]
    flags += ["--seq_length", args.seq_length, "--precision", args.precision]
    if work.accumulation > 1:
        flags += ["--gradient_accumulation_steps", work.accumulation]
    flags += ["--gradient_checkpointing"] if work.gradient_checkpointing else []
    flags += ["--optim", args.optim] if args.optim != "adamw" else []
    flags += [] if args.fused_gelu else ["--no_fused_gelu"]
    flags += ["--isolate_documents"] if args.isolate_documents else []
    flags += ["--lora_r", args.lora_r] if args.lora_r else []
    flags += ["--lora_targets", args.lora_targets] if args.lora_targets else []
    flags += ["--load_in_4bit"] if args.load_in_4bit else []
    return list(map(str, flags))


def as_dict(work: Workload, need: MemoryEstimate, limits: Limits) -> dict:
    """Return a strategy's entry for --json: bytes of one rank, and whether it fits."""
    checkpointing = dataclasses.replace(work, gradient_checkpointing=True)
    return {
        "strategy": need.strategy,
        **{f"{name}_bytes": size for name, size in need.sizes().items()},
        "fits": limits.hold(need),
        "largest_batch": fit.largest_batch(work, need.strategy, limits),
        "largest_batch_with_checkpointing": fit.largest_batch(checkpointing, need.strategy, limits),
    }


# ------------------------------------------------------------------------------------------ --solve


def solve(args: Arguments, work: Workload, limits: Limits) -> int:
    """Print the answer of each strategy to --solve; return the exit code."""
    found, key = SOLVED[args.solve]
    if not args.json:
        print(f"The {found} of each strategy for: {title(args, work)}\n")
    answers = {}
    for strategy in filter(work.strategies.__contains__, PREFERENCE):
        if args.solve == "batch":
            answer = fit.largest_batch(work, strategy, limits)
            text = f"--batch_size {answer}"
        elif args.solve == "gpus":
            nodes = dataclasses.replace(limits, ranks_per_node=args.gpus_per_node or 8)
            answer = fit.fewest_gpus(work, strategy, nodes)
            text = f"{answer} GPU{'s' * (answer != 1)}"
        else:
            model = fit.largest_gpt2(work, strategy, limits)
            answer = model.total if model else 0
            text = model and f"{answer / 1e6:,.0f}M: {model.layers} layers, width {model.hidden}"
        answers[strategy] = answer
        if not args.json:
            print(f"{strategy:9} {text if answer else 'nothing fits'}")
    if args.json:
        print(json.dumps({"solve": args.solve, key: answers}, indent=2))
    return EXIT_COMPLETED if any(answers.values()) else EXIT_FAILED


if __name__ == "__main__":
    process.run_command_line(main)
