#!/usr/bin/env python3
"""Estimate the memory of a run under every strategy, without weights, torch or a GPU.

    python scripts/plan_memory.py --model gpt2-xl --gpus 4 --gpu_memory 16
    python scripts/plan_memory.py --model path/to/config.json --gpus 8 --gpu_memory 80 \\
        --seq_length 4096

It prints which strategies fit, and the command to run the simplest of them; with --details what
each kind of memory takes, and with --explain every term of the estimate. Without --gpu_memory it
plans processes on CPUs. --solve answers another question for each strategy: the largest batch, the
largest model of GPT-2's shape, the fewest GPUs.

    python scripts/plan_memory.py --model gpt2-xl --gpus 4 --gpu_memory 16 --solve batch
    python scripts/plan_memory.py --gpus 4 --gpu_memory 24 --solve model
    python scripts/plan_memory.py --model gpt2-xl --gpu_memory 16 --solve gpus

With an amount of work and a rate it also prints the cost: optimizer steps, hours, price, energy;
with --time_limit also the number of Slurm jobs.

    python scripts/plan_memory.py --model gpt2-xl --gpus 4 --gpu_memory 80 --tokens 1000000000 \\
        --device A100 --price 2.5 --watts 400

The formulas and their sources are in support/memory/estimate.py; docs/PLAN.md compares
them with measurements. Exit codes: 0; 1 if nothing fits, or if --measure
fails; 2 for wrong usage.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import process

if __name__ == "__main__":
    process.catch_signals()

from support.cli import argument_types as kinds
from support.cli.argument_types import Options
from support.cli.arguments import choose_seq_length
from support.console import text_table
from support.errors import EXIT_COMPLETED, EXIT_FAILED, UserError
from support.memory import fit
from support.memory.activations import STEP
from support.memory.architectures import find_architecture
from support.memory.estimate import CUDA_CONTEXT, GPU_SLACK, MemoryEstimate, predict_all
from support.memory.fit import PREFERENCE, Limits
from support.memory.workload import Workload, workload_of
from support.report import cost
from support.tables import EMBEDDED_MODEL, OPTIMIZERS, name_on_hub
from support.units import GB

# The answers of --solve: what it finds, and its key in --json.
SOLVED = {
    "batch": ("largest batch", "batch_size"),
    "model": ("largest model", "parameters"),
    "gpus": ("fewest GPUs", "gpus"),
}
MODELS = """gpt2, gpt2-medium, gpt2-large, gpt2-xl, tiny-gpt2, Llama-2-7B, Llama-3-8B, Qwen2.5-7B,
    Mistral-7B, another name on the hub, a model folder or a config.json (GPT-2, Llama, Mistral,
    Qwen, GPT-NeoX) (default: gpt2)"""
GELU = "compute GPT-2's activation as transformers does"
SWITCHES = {
    "--load_in_4bit": "frozen weights in 4 bits; needs --lora_r",
    "--gradient_checkpointing": "recompute activations in backward",
    "--isolate_documents": "as for --isolate_documents or --packing",
    "--details": "print memory by kind, host memory, NVMe and traffic",
    "--explain": "print each term of the estimate, by phase of a step",
    "--json": "print JSON instead (bytes)",
}


def build_parser() -> kinds.Parser:
    """Build the parser; flags of a run have the same names as in real_model_example.py."""
    parser = kinds.Parser.of_script(__doc__)
    add, positive = parser.add_argument, kinds.positive_float
    add("--model", type=kinds.name, default="gpt2", help=MODELS)
    add("--gpus", type=kinds.ranks, help="number of ranks, one per GPU (default: 1)")
    add("--gpus_per_node", type=kinds.ranks, help="of one node (default: --gpus, at most 8)")
    add("--nodes", type=kinds.ranks, help="nodes of --gpus_per_node GPUs, instead of --gpus")
    text = "of one GPU, as in nvidia-smi (2^30 bytes); without it CPU processes are planned"
    add("--gpu_memory", type=positive, metavar="GB", help=text)
    text = "of a node, for offload, infinity and CPU processes (default for these: this machine's)"
    add("--host_memory", type=positive, metavar="GB", help=text)
    add("--nvme_free", type=positive, metavar="GB", help="of a node's disk, for infinity")
    text = "sequences per GPU in a micro-batch (default: 4)"
    add("--batch_size", type=kinds.batch, default=4, help=text)
    text = "tokens in a sequence (default: as in real_model_example.py)"
    add("--seq_length", type=kinds.block_length, help=text)
    text = "micro-batches per optimizer step (default: 1)"
    add("--gradient_accumulation_steps", type=kinds.batch, default=1, help=text)
    text = "train adapters of this rank, freeze the rest"
    add("--lora_r", type=kinds.rank_of_adapters, metavar="R", help=text)
    text = "the layers that get an adapter"
    add("--lora_targets", type=kinds.word, metavar="LIST", help=text)
    add("--precision", choices=("fp32", "bf16", "fp16"), default="bf16", help="(default: bf16)")
    add("--optim", choices=tuple(OPTIMIZERS), default="adamw", help="(default: adamw)")
    add("--no_fused_gelu", action="store_false", dest="fused_gelu", help=GELU)
    for flag, text in SWITCHES.items():
        add(flag, action="store_true", help=text)
    text = "find the largest batch, the largest model of GPT-2's shape, or the fewest GPUs, for "
    add("--solve", choices=tuple(SOLVED), help=f"{text} each strategy")
    group = parser.add_argument_group("cost (needs an amount of work and a rate)")
    add = group.add_mutually_exclusive_group().add_argument
    add("--tokens", type=kinds.tokens, metavar="N", help="tokens to train on")
    text = "tokens of the training data, for --epochs passes"
    add("--dataset_tokens", type=kinds.tokens, metavar="N", help=text)
    add("--max_steps", type=kinds.max_steps, help="optimizer steps")
    add = group.add_mutually_exclusive_group().add_argument
    text = "take the rate of this completed run (folder or results.json)"
    add("--results", type=kinds.name, metavar="RUN", help=text)
    add("--device", type=kinds.word, help="assume the rate of this GPU, A100 for example")
    add("--measure", action="store_true", help="measure the rate here, in 10 steps")
    add = group.add_argument
    add("--epochs", type=kinds.epochs, help="passes over --dataset_tokens (default: 1)")
    add("--mfu", type=kinds.real(1), help="assumed share of its peak FLOP/s (default: 0.4)")
    add("--price", type=positive, help="dollars per GPU-hour")
    add("--watts", type=positive, help="electric power of a GPU")
    add("--time_limit", metavar="HH:MM:SS", help="of a Slurm job: print the number of jobs")
    text = "time of a save, for --time_limit (default: that of --results)"
    add("--save_seconds", type=positive, metavar="S", help=text)
    return parser


def main() -> int:
    """Read the arguments, and print the answer; return the exit code."""
    args, work, limits = read_workload(build_parser().parse_args())
    return (solve if args.solve else plan)(args, work, limits)


def read_workload(args: Options) -> tuple[Options, Workload, Limits]:
    """Return the arguments with the defaults of --gpus and --seq_length, the workload and limits.

    Raises:
        UserError: flags do not fit together, or the model cannot be planned.
    """
    if args.nodes and args.gpus:
        raise UserError("--nodes and --gpus set the same number: leave one out.")
    gpus = args.nodes * (args.gpus_per_node or 8) if args.nodes else args.gpus or 1
    model = find_architecture(args.model)
    length = choose_seq_length(args, model.limit)
    args = args.replace(model=name_on_hub(args.model), gpus=gpus, seq_length=length)
    if gpus % ranks_per_node(args):
        size = args.gpus_per_node or "8, the default: set it"
        raise UserError(f"--gpus {gpus} is not a multiple of --gpus_per_node {size}.")
    for flag in ("lora_targets", "load_in_4bit"):
        if getattr(args, flag) and not args.lora_r:
            raise UserError(f"--{flag} needs --lora_r.")
    if args.solve == "gpus" and not args.gpu_memory:
        raise UserError("--solve gpus needs --gpu_memory: processes on a CPU share its memory.")
    cost.is_planned(args)  # raises if its flags do not fit together
    work = workload_of(args, model, gpus, args.precision, args.isolate_documents)
    memory = (args.gpu_memory, args.host_memory, args.nvme_free)
    gpu, host, nvme = (None if size is None else int(size * GB) for size in memory)
    if gpu is None:
        # The processes of a node share its memory; it includes what offload keeps in it.
        host = host or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        gpu, host, work = host // ranks_per_node(args), None, replace(work, device="cpu")
    return args, work, Limits(gpu, host, nvme, ranks_per_node(args))


def ranks_per_node(args: Options) -> int:
    """Return the number of the run's ranks on each node."""
    return min(args.gpus_per_node or 8, args.gpus)


# ------------------------------------------------------------------------------ the memory estimate


def plan(args: Options, work: Workload, limits: Limits) -> int:
    """Print the memory estimate of every strategy, and a command; return the exit code."""
    needs = predict_all(work)
    chosen, changed = fit.recommend(work, limits)
    command = run_command(args, changed, chosen.strategy) if chosen else None
    spent = cost_of_plan(args, changed, chosen.strategy) if chosen else None
    exit_code = EXIT_COMPLETED if chosen else EXIT_FAILED
    if args.json:
        answer = {
            "model": args.model,
            "parameters": work.model.total,
            "gpus": args.gpus,
            "cuda_context_bytes": CUDA_CONTEXT,
            "strategies": [as_dict(args, work, need, limits) for need in needs],
            "recommended": chosen.strategy if chosen else None,
            "command": command,
        }
        if spent:
            entry = {"summary": spent.summary, **spent.values, "sources": spent.sources}
            answer["cost"] = {**entry, "warnings": spent.warnings}
        print(json.dumps(answer, indent=2))
        return exit_code
    print(f"{title(args, work, limits)}\n\n{estimates(args, work, needs, limits)}")
    for need in needs if args.explain else ():
        print(f"\n{explain(need)}")
    print("\nGB (2^30 bytes) per rank. The peak is the maximum over a step, without dropout.")
    if work.device == "cuda":
        print(
            f"To fit, a GPU needs {100 * GPU_SLACK - 100:.0f} % and {CUDA_CONTEXT / GB:.0f} GB "
            "more: fragmentation, CUDA context and NCCL."
        )
    else:
        print("A process also holds Python, the libraries, and memory that it keeps for reuse.")
    if chosen is None:
        print(
            "❌ Nothing fits, not even one sequence at a time. Use more GPUs (--solve gpus),\n"
            "   a smaller model (--solve model), or a shorter --seq_length."
        )
        return exit_code
    reason = "No command: adapters on random weights learn nothing. Name a model with weights."
    size = chosen.peak if args.gpu_memory else chosen.total
    print(
        f"Use {chosen.strategy}, the simplest strategy that fits ({size / GB:.1f} GB):\n\n"
        f"    {command or reason}"
    )
    if spent:
        print(f"\n{spent}" + (f"\n\n{jobs(args, spent)}" if args.time_limit else ""))
    return exit_code


def title(args: Options, work: Workload, limits: Limits) -> str:
    """Describe the workload in two lines."""
    options = f" × {work.accumulation} micro-batches" if work.accumulation > 1 else ""
    options += ", gradient checkpointing" if work.gradient_checkpointing else ""
    if work.lora:
        options += f", LoRA of rank {work.lora.r} ({sum(work.trained):,} parameters trained)"
    processor = "GPU" if args.gpu_memory else "CPU process"
    plural = "" if args.gpus == 1 else "s" if args.gpu_memory else "es"
    memory = args.gpu_memory or round((limits.gpu or 0) / GB, 1)
    return (
        f"{args.model} ({work.model.total / 1e6:,.1f}M parameters) on "
        f"{args.gpus} {processor}{plural} of {memory:g} GB:\n"
        f"{args.precision}, {args.batch_size} sequences of {args.seq_length} tokens each{options}"
    )


def fits_how(work: Workload, need: MemoryEstimate, limits: Limits) -> str:
    """Describe whether a strategy fits, if necessary with a smaller batch and checkpointing."""
    if limits.hold(need):
        return "yes"
    if batch := fit.largest_batch(work, need.strategy, limits):
        return f"with batch {batch}"
    checkpointing = replace(work, gradient_checkpointing=True)
    if batch := fit.largest_batch(checkpointing, need.strategy, limits):
        return f"checkpointing, batch {min(batch, work.batch_size)}"
    return "no"


def estimates(args: Options, work: Workload, needs: list[MemoryEstimate], limits: Limits) -> str:
    """Return the table of all strategies, of dp first; with --details what each kind takes."""
    on_gpu, ranks = work.device == "cuda", limits.ranks_per_node
    columns = KINDS if args.details else {"peak": "peak"} if on_gpu else {"process": "total"}
    headers, rows = ["strategy", *columns, "fits"], []
    for need in needs:
        sizes = [in_gb(getattr(need, name)) for name in columns.values()]
        rows.append([need.strategy, *sizes, fits_how(work, need, limits)])
        if args.details:
            elsewhere = map(in_gb, (need.host * ranks, need.nvme * ranks, need.sent))
            rows[-1] += [*elsewhere, f"{need.sent / needs[0].sent:.2f}" if needs[0].sent else "—"]
    if args.details:
        headers += ["host\n/node", "NVMe\n/node", "sent\n/step", "sent\nvs dp"]
    return text_table(rows, headers)


# Header and attribute of MemoryEstimate, of each column of --details.
KINDS = {
    "para-\nmeters": "parameters",
    "gradi-\nents": "gradients",
    "opti-\nmizer": "optimizer",
    "buffers": "buffers",
    "activa-\ntions": "activations",
    "logits": "logits",
    "peak": "peak",
}


def explain(need: MemoryEstimate) -> str:
    """Return the table of --explain: each term of a strategy's estimate in the phases of a step."""
    places = [place for place in ("host", "nvme") if need.at(place)]
    columns = [*STEP, *places]
    rows = [
        [term.name, *(in_gb(term.size if column in term.phases else 0) for column in columns)]
        for term in need.terms
    ]
    rows.append(["sum", *(in_gb(need.at(column)) for column in columns)])
    table = text_table(rows, [need.strategy, "loss", "backward", "end", "update", *places])
    return f"{table}\nThe peak is in: {need.phase_of_peak()}."


def in_gb(size: int) -> str:
    """Format bytes in GB (2^30 bytes) with two decimals; 0 as a dash."""
    return f"{size / GB:.2f}" if size else "—"


def as_dict(args: Options, work: Workload, need: MemoryEstimate, limits: Limits) -> dict:
    """Return a strategy's entry for --json: bytes of one rank, and whether it fits."""
    checkpointing = replace(work, gradient_checkpointing=True)
    entry = {
        "strategy": need.strategy,
        **{f"{name}_bytes": size for name, size in need.sizes().items()},
        "total_bytes": need.total,
        "fits": limits.hold(need),
        "largest_batch": fit.largest_batch(work, need.strategy, limits),
        "largest_batch_with_checkpointing": fit.largest_batch(checkpointing, need.strategy, limits),
    }
    return entry | ({"terms": [term._asdict() for term in need.terms]} if args.explain else {})


# ------------------------------------------------------------------------- the command and its cost


def cost_of_plan(args: Options, work: Workload, strategy: str) -> cost.Cost | None:
    """Return the cost of the recommended run; None if no flag asks for it."""
    if not cost.is_planned(args):
        return None
    if args.device:
        return cost.cost_of(args, work, cost.assumed_rate(args, work))
    if args.measure:
        run = cost.measure(run_flags(args, work, strategy), work)
    else:
        run = cost.read_run("--results", args.results)
    return cost.cost_of(args, work, cost.measured_rate(*run, work, args.model, strategy))


def jobs(args: Options, spent: cost.Cost) -> str:
    """Return the Slurm jobs of the run, each saved before its limit and requeued."""
    hours = spent.values["hours"]
    step = None if args.results else 3600 * hours / spent.values["steps"]
    flags = {"hours": hours, "max_steps": None, "step_seconds": step, "mtbf": None}
    flags |= {"requeue": True, "signal_seconds": None}
    flags |= {"num_nodes": 1, "num_gpus_per_node": args.gpus}
    return cost.slurm_budget(Options(**(vars(args) | flags)))


def run_command(args: Options, work: Workload, strategy: str) -> str | None:
    """Return the command line that trains the workload with a strategy.

    None if it would train adapters on random weights.
    """
    folder, flags = model_folder(args), run_flags(args, work, strategy)
    random = folder and not any(folder.glob("*.safetensors"))
    if work.lora and (random or args.model == EMBEDDED_MODEL):
        return None
    flags[2:2] = ["--from_scratch"] if random else []
    per_node = ranks_per_node(args)
    launcher = "python" if args.gpus == 1 else f"torchrun --nproc_per_node={args.gpus}"
    if args.gpus > per_node:
        launcher = (
            f"srun --nodes={args.gpus // per_node} --ntasks-per-node={per_node} "
            f"--gpus-per-node={per_node} --kill-on-bad-exit=1 python"
        )
    return f"{launcher} real_model_example.py {shlex.join(flags)}"


def model_folder(args: Options) -> Path | None:
    """Return the model's folder, which real_model_example.py takes instead of its config.json."""
    path = Path(args.model)
    return path.parent if path.is_file() else path if path.is_dir() else None


def run_flags(args: Options, work: Workload, strategy: str) -> list[str]:
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


# ------------------------------------------------------------------------------------------ --solve


def solve(args: Options, work: Workload, limits: Limits) -> int:
    """Print the answer of each strategy to --solve; return the exit code."""
    found, key = SOLVED[args.solve]
    answers, lines = {}, [f"The {found} of each strategy for: {title(args, work, limits)}\n"]
    for strategy in filter(work.strategies.__contains__, PREFERENCE):
        answer: int | None = 0
        if args.solve == "batch":
            answer = fit.largest_batch(work, strategy, limits)
            text = f"--batch_size {answer}"
        elif args.solve == "gpus":
            nodes = replace(limits, ranks_per_node=args.gpus_per_node or 8)
            answer = fit.fewest_gpus(work, strategy, nodes)
            text = f"{answer} GPU{'s' * (answer != 1)}"
        elif model := fit.largest_gpt2(work, strategy, limits):
            answer = model.total
            text = f"{answer / 1e6:,.0f}M: {model.layers} layers, width {model.hidden}"
        answers[strategy] = answer
        lines.append(f"{strategy:9} {text if answer else 'nothing fits'}")
    answer_as_json = json.dumps({"solve": args.solve, key: answers}, indent=2)
    print(answer_as_json if args.json else "\n".join(lines))
    return EXIT_COMPLETED if any(answers.values()) else EXIT_FAILED


if __name__ == "__main__":
    process.run_command_line(main)
