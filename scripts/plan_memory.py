#!/usr/bin/env python3
"""Estimate the memory of a run under every strategy, without weights, torch or a GPU.

    python scripts/plan_memory.py --model gpt2-xl --gpus 4 --gpu_memory 16
    python scripts/plan_memory.py --model path/to/config.json --gpus 8 --seq_length 4096
    python scripts/plan_memory.py --config recipes/gpt2_xl_zero3.yaml --gpus 4 --gpu_memory 16

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
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import process, programs

if __name__ == "__main__":
    process.catch_signals()

from support.cli.parse import parse_arguments
from support.cli.parser import Options, Parser
from support.errors import EXIT_COMPLETED, EXIT_FAILED, UserError
from support.files.weight_files import NAMES as WEIGHTS
from support.gpu_generations import HOPPER, TURING
from support.memory import fit
from support.memory.estimate import CUDA_CONTEXT, GPU_SLACK, MemoryEstimate, predict_all, supporting
from support.memory.find_architecture import find_architecture
from support.memory.fit import PREFERENCE, Limits
from support.optimizers import OPTIMIZERS
from support.report import cost
from support.settings import flag_types
from support.settings.data import choose_seq_length
from support.strategies.strategy import FlagValues
from support.text_tables import text_table
from support.units import GB
from support.workload.activations import STEP
from support.workload.architectures import name_on_hub
from support.workload.workload import Workload, adapters

SIZE = flag_types.positive_float
MODELS = """gpt2, gpt2-medium, gpt2-large, gpt2-xl, tiny-gpt2, Llama-2-7B, Llama-3-8B, Qwen2.5-7B,
    Qwen2.5-0.5B, Mistral-7B, another name on the hub, a model folder or a config.json (GPT-2,
    Llama, Mistral, Qwen, GPT-NeoX) (default: gpt2)"""
# Name, type, placeholder and help of flags; those of a run are named as in real_model_example.py.
FLAGS = (
    ("gpus", flag_types.ranks, "N", "number of ranks, one per GPU (default: 1)"),
    ("gpus_per_node", flag_types.ranks, "N", "of one node (default: --gpus, at most 8)"),
    ("nodes", flag_types.ranks, "N", "nodes of --gpus_per_node GPUs, instead of --gpus"),
    ("gpu_memory", SIZE, "GB", "of one GPU, as in nvidia-smi (2^30 bytes) (default: plan CPUs)"),
    ("host_memory", SIZE, "GB", "of a node, for offload, infinity and CPU processes"),
    ("nvme_free", SIZE, "GB", "of a node's disk, for infinity"),
    ("batch_size", flag_types.batch, "N", "sequences per GPU in a micro-batch (default: 4)"),
    ("seq_length", flag_types.block_length, "N", "tokens in a sequence (default: as for a run)"),
    ("gradient_accumulation_steps", flag_types.batch, "N", "micro-batches per step (default: 1)"),
    ("lora_r", flag_types.rank_of_adapters, "R", "train adapters of this rank, freeze the rest"),
    ("lora_targets", flag_types.word, "LIST", "the layers that get an adapter"),
)
SWITCHES = {
    "--no_fused_gelu": "compute GPT-2's activation as transformers does",
    "--load_in_4bit": "frozen weights in 4 bits; needs --lora_r",
    "--compile": "compile blocks and loss: all logits are computed at once, on a GPU up to 2^31",
    "--gradient_checkpointing": "recompute activations in backward",
    "--isolate_documents": "as for --isolate_documents or --packing",
    "--explain": "print each term of the estimate, by phase of a step",
    "--json": "print JSON instead (bytes)",
    "--measure": "cost: measure the rate here, in 10 steps",
}
SAME_SWITCHES = ("no_fused_gelu", "isolate_documents", "load_in_4bit", "compile")  # as a run's
# Flags of a run that a run file sets here, too; --no_fused_gelu and others have another name there.
SAME_FLAGS = """
    model batch_size seq_length gradient_accumulation_steps gradient_checkpointing lora_r
    lora_targets load_in_4bit compile optim strategy
    """.split()
DEFAULTS = {"gradient_accumulation_steps": 1, "optim": "adamw"}  # a run has them without flags
COST_FLAGS = (
    ("tokens", flag_types.tokens, "N", "tokens of the training data"),
    ("epochs", flag_types.epochs, "N", "passes over --tokens (default: 1)"),
    ("max_steps", flag_types.max_steps, "N", "optimizer steps, instead of --tokens"),
    (
        "results",
        flag_types.name,
        "RUN",
        "take the rate of this completed run (folder or results.json)",
    ),
    ("device", flag_types.word, "GPU", "assume the rate of this GPU, A100 for example"),
    ("mfu", flag_types.real(1), "SHARE", "assumed share of its peak FLOP/s (default: 0.4)"),
    ("bandwidth", SIZE, "GB/S", "add the time of sending, at the all-reduce rate of --check"),
    ("price", SIZE, "DOLLARS", "of a GPU-hour"),
    ("watts", SIZE, "W", "electric power of a GPU"),
    ("time_limit", flag_types.word, "HH:MM:SS", "of a Slurm job: plan the jobs"),
    ("save_seconds", SIZE, "S", "time of a save, for --time_limit (default: that of --results)"),
    ("mtbf", SIZE, "H", "hours between failures of a GPU, for --time_limit (default: 50000)"),
)
SPARE = f"{100 * GPU_SLACK - 100:.0f} % and {CUDA_CONTEXT / GB:.0f} GB"
ON_GPU = f"To fit, a GPU needs {SPARE} more: fragmentation, CUDA context and NCCL."
UNCONFIRMED = (
    "The output layer shares the embedding's weight, as config.json says. The weights are not on\n"
    "this machine: if they have an output layer that differs, a run trains it as well."
)
ON_CPU = "A process also holds Python, the libraries, and memory that it keeps for reuse."


def build_parser() -> Parser:
    """Build the parser."""
    parser = Parser.of_script(__doc__)
    parser.add_argument("--model", type=flag_types.name, default="gpt2", help=MODELS)
    text = "YAML with flags of a run, whose model and workload are planned; the others override it"
    parser.add_argument("--config", type=flag_types.name, metavar="FILE", help=text)
    costs = parser.add_argument_group("cost (needs an amount of work and a rate)")
    for group, flags in ((parser, FLAGS), (costs, COST_FLAGS)):
        for name, kind, placeholder, text in flags:
            group.add_argument(f"--{name}", type=kind, metavar=placeholder, help=text)
    for flag, text in SWITCHES.items():
        parser.add_argument(flag, action="store_true", help=text)
    add = parser.add_argument
    add("--precision", choices=("fp32", "bf16", "fp16"), default="bf16", help="(default: bf16)")
    add("--optim", choices=tuple(OPTIMIZERS), default="adamw", help="(default: adamw)")
    text = "find the largest batch or the fewest GPUs for each strategy"
    add("--solve", choices=("batch", "gpus"), help=text)
    parser.set_defaults(batch_size=4, gradient_accumulation_steps=1, strategy=None, in_file={})
    return parser


def main() -> int:
    """Read the arguments, and print the answer; return the exit code."""
    args, work, limits = read_workload(read_flags(build_parser()))
    return (solve if args.solve else plan)(args, work, limits)


def read_flags(parser: Parser) -> Options:
    """Return the flags, with the values of --config as defaults and as `in_file`."""
    args = parser.parse_args()
    if args.config is None:
        return args
    run = parse_arguments(["--config", args.config])
    fit.check_is_planned(run.parallelism.configured, run.training.eval_only)
    flags, isolates = run.flags(), run.data.isolates_documents
    values = {name: flags[name] for name in SAME_FLAGS} | {
        "precision": parser.get_default("precision")
        if flags["precision"] == "auto"
        else flags["precision"],
        "no_fused_gelu": not flags["fused_gelu"],
        "isolate_documents": isolates,
    }
    parser.set_defaults(in_file=values, **values)
    if args.tokens:
        parser.set_defaults(epochs=run.training.epochs)
    elif any(getattr(args, flag) for flag in cost.RATE):
        parser.set_defaults(max_steps=run.training.max_steps)
    return parser.parse_args()


def read_workload(args: Options) -> tuple[Options, Workload, Limits]:
    """Return the arguments with the defaults of --gpus and --seq_length, the workload and limits.

    Raises:
        UserError: flags do not fit together, or the model cannot be planned.
    """
    if args.nodes and args.gpus:
        raise UserError("--nodes and --gpus set the same number: leave one out.")
    gpus = args.nodes * (args.gpus_per_node or 8) if args.nodes else args.gpus or 1
    per_node = min(args.gpus_per_node or 8, gpus)
    if gpus % per_node:
        raise UserError(f"--gpus {gpus} is not a multiple of --gpus_per_node {per_node}: set it.")
    for flag in ("lora_targets", "load_in_4bit"):
        if getattr(args, flag) and not args.lora_r:
            raise UserError(f"--{flag} needs --lora_r.")
    if args.solve == "gpus" and not args.gpu_memory:
        raise UserError("--solve gpus needs --gpu_memory: processes on a CPU share its memory.")
    cost.is_planned(args)  # raises if its flags do not fit together
    model = find_architecture(args.model)
    length = choose_seq_length(args.seq_length, args.model, model.limit)
    args = args.replace(model=name_on_hub(args.model), gpus=gpus, seq_length=length)
    work = Workload(
        model,
        gpus,
        args.batch_size,
        length,
        args.precision,
        args.gradient_checkpointing,
        args.gradient_accumulation_steps,
        lora=adapters(model, args.lora_r, args.lora_targets),
        fused_gelu=not args.no_fused_gelu,
        attention_mask=args.isolate_documents,
        optimizer=args.optim,
        compiled=args.compile,
        load_in_4bit=args.load_in_4bit,
        # Newer GPUs than those of this capability usually use bf16.
        capability=TURING if args.precision == "fp16" else HOPPER,
    )
    memory = (args.gpu_memory, args.host_memory, args.nvme_free)
    gpu, host, nvme = (None if size is None else int(size * GB) for size in memory)
    if gpu is None:
        # The processes of a node share its memory; it includes what offload keeps in it.
        gpu, host = (host or fit.host_memory()) // per_node, None
        work = replace(work, device="cpu")
    return args, work, Limits(gpu, host, nvme, per_node)


def plan(args: Options, work: Workload, limits: Limits) -> int:
    """Print the memory estimate of every strategy, and a command; return the exit code."""
    needs = predict_all(work)
    fits = {need.strategy: limits.hold(need) for need in needs}
    chosen, changed = fit.recommend(work, limits)
    if of_file := fits.get(args.strategy):
        chosen, changed = next(n for n in needs if n.strategy == args.strategy), work
    command = spent = None
    if chosen:
        command = command_of(args, changed, chosen.strategy, limits)
        flags = as_flags(run_values(args, changed, chosen.strategy), DEFAULTS)
        spent = cost.cost_of(args, changed, chosen, flags) if cost.is_planned(args) else None
    code = EXIT_COMPLETED if chosen and (of_file or not args.config) else EXIT_FAILED
    if args.json:
        own = {"file": args.config, "strategy": args.strategy, "fits": bool(of_file)}
        answer = {
            "model": args.model,
            "parameters": work.model.total,
            "gpus": args.gpus,
            "cuda_context_bytes": CUDA_CONTEXT,
            "strategies": [as_dict(work, need, limits) for need in needs],
            **({"config": own} if args.config else {}),
            "recommended": chosen.strategy if chosen else None,
            "command": command,
            **({"cost": cost.as_dict(*spent)} if spent else {}),
        }
        print(json.dumps(answer, indent=2))
        return code
    print(as_text(args, work, limits, needs))
    if args.config and not of_file:
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
    print(f"\n    {command}" + (f"\n\n{cost.as_text(*spent)}" if spent else ""))
    return code


def as_text(args: Options, work: Workload, limits: Limits, needs: list[MemoryEstimate]) -> str:
    """Return the memory estimates of all strategies as a table, with what it leaves out."""
    header, size = ("peak", "peak") if args.gpu_memory else ("process", "total")
    rows = [(n.strategy, in_gb(getattr(n, size)), fits_how(work, n, limits)) for n in needs]
    parts = [f"{title(args, work, limits)}\n\n{text_table(rows, ('strategy', header, 'fits'))}"]
    parts += [explain(need) for need in needs if args.explain]
    parts += [UNCONFIRMED] if work.model.unconfirmed else []
    what = "GB (2^30 bytes) per rank. The peak is the maximum over a step, without dropout."
    return "\n\n".join([*parts, f"{what}\n{ON_GPU if args.gpu_memory else ON_CPU}"])


def title(args: Options, work: Workload, limits: Limits) -> str:
    """Describe the workload in two lines."""
    options = f" × {work.accumulation} micro-batches" if work.accumulation > 1 else ""
    options += ", gradient checkpointing" if work.gradient_checkpointing else ""
    if work.lora:
        options += f", LoRA of rank {work.lora.r} ({sum(work.trained):,} parameters trained)"
    memory = args.gpu_memory or round((limits.gpu or 0) / GB, 1)
    return (
        f"{args.model} ({work.model.total / 1e6:,.1f}M parameters) on {args.gpus} x "
        f"{'GPU' if args.gpu_memory else 'CPU process'} of {memory:g} GB:\n"
        f"{args.precision}, {args.batch_size} sequences of {args.seq_length} tokens each{options}"
    )


def fits_how(work: Workload, need: MemoryEstimate, limits: Limits) -> str:
    """Describe whether a strategy fits, if necessary with a smaller batch and checkpointing."""
    if limits.hold(need):
        return "yes"
    if batch := fit.largest_batch(work, need.strategy, limits):
        return f"with batch {batch}"
    checkpointing = replace(work, gradient_checkpointing=True)
    batch = fit.largest_batch(checkpointing, need.strategy, limits)
    return f"checkpointing, batch {min(batch, work.batch_size)}" if batch else "no"


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
    sent = f"A rank sends {need.sent / GB:.2f} GB per step."
    return f"{table}\nThe peak is in: {need.phase_of_peak()}. {sent}"


def as_dict(work: Workload, need: MemoryEstimate, limits: Limits) -> dict:
    """Return a strategy's entry for --json: bytes of one rank, and whether it fits."""
    checkpointing = replace(work, gradient_checkpointing=True)
    return {
        "strategy": need.strategy,
        **{f"{name}_bytes": size for name, size in need.sizes().items()},
        "total_bytes": need.total,
        "fits": limits.hold(need),
        "largest_batch": fit.largest_batch(work, need.strategy, limits),
        "largest_batch_with_checkpointing": fit.largest_batch(checkpointing, need.strategy, limits),
        "terms": [term._asdict() for term in need.terms],
    }


def in_gb(size: int) -> str:
    """Format bytes in GB (2^30 bytes) with two decimals; 0 as a dash."""
    return f"{size / GB:.2f}" if size else "—"


def launcher(gpus: int, limits: Limits) -> str:
    """Return the command that starts Python on each rank."""
    per_node = limits.ranks_per_node
    if gpus > per_node:
        return (
            f"srun --nodes={gpus // per_node} --ntasks-per-node={per_node} "
            f"--gpus-per-node={per_node} --kill-on-bad-exit=1 python"
        )
    return "python" if gpus == 1 else f"torchrun --nproc_per_node={gpus}"


def command_of(args: Options, work: Workload, strategy: str, limits: Limits) -> str:
    """Return the command that runs the workload: with --config, and what differs from its file."""
    flags, own = [], DEFAULTS
    if args.config:
        flags = ["--config", args.config]
        own = {**args.in_file, "model": name_on_hub(args.in_file["model"])}
    flags += as_flags(run_values(args, work, strategy), own)
    return f"{launcher(args.gpus, limits)} real_model_example.py {shlex.join(flags)}"


def run_values(args: Options, work: Workload, strategy: str) -> FlagValues:
    """Return the values of real_model_example.py's flags for the workload, by name."""
    path = Path(args.model)  # a model folder, a file in it, or a name
    folder = path.parent if path.is_file() else path if path.is_dir() else None
    return {
        "model": folder or args.model,
        "strategy": strategy,
        "batch_size": work.batch_size,
        "seq_length": args.seq_length,
        "precision": args.precision,
        "gradient_accumulation_steps": work.accumulation,
        "optim": args.optim,
        "lora_r": args.lora_r,
        "lora_targets": args.lora_targets,
        "from_scratch": folder is not None and not any((folder / f).exists() for f in WEIGHTS),
        "gradient_checkpointing": work.gradient_checkpointing,
        **{name: getattr(args, name) for name in SAME_SWITCHES},
    }


def as_flags(values: FlagValues, own: FlagValues) -> list[str]:
    """Return the flags of a run that set these values, without those that it has already."""
    flags = []
    for name, value in values.items():
        if value and str(value) != str(own.get(name)):
            flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return flags


def solve(args: Options, work: Workload, limits: Limits) -> int:
    """Print the answer of each strategy to --solve; return the exit code."""
    search: Callable[..., int | None] = fit.largest_batch
    header = "largest batch"
    if args.solve == "gpus":
        search, header = fit.fewest_gpus, "fewest GPUs"
        limits = replace(limits, ranks_per_node=args.gpus_per_node or 8)
    supported = supporting(work)
    answers = {name: search(work, name, limits) for name in PREFERENCE if name in supported}
    if args.json:
        print(json.dumps({"solve": args.solve, "answers": answers}, indent=2))
    else:
        rows = [(strategy, str(answer or "nothing fits")) for strategy, answer in answers.items()]
        print(f"{title(args, work, limits)}\n\n{text_table(rows, ('strategy', header))}")
    return EXIT_COMPLETED if any(answers.values()) else EXIT_FAILED


if __name__ == "__main__":
    programs.run_command_line(main)
