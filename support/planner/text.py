"""The memory estimates of a plan as tables and as JSON."""

from dataclasses import replace

from support.cli.parser import Options
from support.memory import fit
from support.memory.estimate import CUDA_CONTEXT, GPU_SLACK, MemoryEstimate
from support.memory.fit import Limits
from support.text_tables import text_table
from support.units import GB
from support.workload.activations import STEP
from support.workload.workload import Workload

SPARE = f"{100 * GPU_SLACK - 100:.0f} % and {CUDA_CONTEXT / GB:.0f} GB"
ON_GPU = f"To fit, a GPU needs {SPARE} more: fragmentation, CUDA context and NCCL."
UNCONFIRMED = (
    "The output layer shares the embedding's weight, as config.json says. The weights are not on\n"
    "this machine: if they have an output layer that differs, a run trains it as well."
)
ON_CPU = "A process also holds Python, the libraries, and memory that it keeps for reuse."


def as_text(args: Options, work: Workload, limits: Limits, needs: list[MemoryEstimate]) -> str:
    """Return the memory estimates of all strategies as a table, with what it leaves out."""
    header, size = ("peak", "peak") if args.gpu_memory else ("process", "total")
    rows = [(n.strategy, in_gb(getattr(n, size)), fits_how(work, n, limits)) for n in needs]
    parts = [f"{title(args, work, limits)}\n\n{text_table(rows, ('strategy', header, 'fits'))}"]
    parts += [explain(need) for need in needs if args.explain]
    parts += [UNCONFIRMED] if work.model.embedding.unconfirmed else []
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
