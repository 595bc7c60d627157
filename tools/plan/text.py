"""The memory estimates of a plan as tables and as JSON."""

from dataclasses import replace

from distributed_training.cli.parser import Options
from distributed_training.memory.estimate import CUDA_CONTEXT, GPU_SLACK, MemoryEstimate
from distributed_training.memory.fit import Devices
from distributed_training.text_tables import text_table
from distributed_training.units import GB
from distributed_training.workload.activations import STEP
from distributed_training.workload.workload import Workload
from tools.plan.unequal import UnequalGpus

SPARE = f"{100 * GPU_SLACK - 100:.0f} % and {CUDA_CONTEXT / GB:.0f} GB"
ON_GPU = f"To fit, a GPU needs {SPARE} more: fragmentation, CUDA context and NCCL."
UNCONFIRMED = (
    "The output layer shares the embedding's weight, as config.json says. The weights are not on\n"
    "this machine: if they have an output layer that differs, a run trains it as well."
)
UNEQUAL = (
    "Sequences: of each rank in a micro-batch. Memory: of the rank closest to its limit.\n"
    "The speed-up over equal shares does not include communication and the update."
)
ON_CPU = "A process also holds Python, the libraries, and memory that it keeps for reuse."


def as_text(args: Options, work: Workload, devices: Devices, needs: list[MemoryEstimate]) -> str:
    """Return the memory estimates of all strategies as a table, with what it leaves out."""
    header, size = ("peak", "peak") if args.gpu_memory else ("process", "total")
    rows, headers = [], ["strategy", header, "fits"]
    for need in needs:
        fits, fitting = fits_how(work, need.strategy, devices)
        rows.append([need.strategy, in_gb(getattr(need, size)), fits])
        if isinstance(devices, UnequalGpus):
            rows[-1] += of_ranks(fitting, need.strategy, devices)
    headers += ["sequences", "speed-up"] if isinstance(devices, UnequalGpus) else []
    parts = [f"{title(args, work, devices)}\n\n{text_table(rows, headers)}"]
    parts += [UNEQUAL] if isinstance(devices, UnequalGpus) else []
    parts += [explain(need) for need in needs if args.explain]
    parts += [UNCONFIRMED] if work.model.embedding.unconfirmed else []
    what = "GB (2^30 bytes) per rank. The peak is the maximum over a step, without dropout."
    return "\n\n".join([*parts, f"{what}\n{ON_GPU if args.gpu_memory else ON_CPU}"])


def title(args: Options, work: Workload, devices: Devices) -> str:
    """Describe the workload in two lines."""
    options = f" × {work.accumulation} micro-batches" if work.accumulation > 1 else ""
    options += ", gradient checkpointing" if work.gradient_checkpointing else ""
    if work.lora:
        kind = "DoRA" if work.lora.magnitudes else "LoRA"
        options += f", {kind} of rank {work.lora.r} ({sum(work.trained):,} parameters trained)"
    sizes = args.gpu_memory or [round((devices.gpu or 0) / GB, 1)]
    memory = ", ".join(f"{size:g}" for size in sizes)
    if args.gpu_speeds:
        options += "; speeds " + ", ".join(f"{speed:g}" for speed in args.gpu_speeds)
    return (
        f"{args.model} ({work.model.total / 1e6:,.1f}M parameters) on {args.gpus} x "
        f"{'GPU' if args.gpu_memory else 'CPU process'} of {memory} GB:\n"
        f"{args.precision}, {args.batch_size} sequences of {args.seq_length} tokens each{options}"
    )


def fits_how(work: Workload, strategy: str, devices: Devices) -> tuple[str, Workload | None]:
    """Describe whether a strategy fits, if necessary with a smaller batch and checkpointing.

    Returns:
        The description, and the workload that fits, or None.
    """
    if devices.fits(work, strategy):
        return "yes", work
    if batch := devices.largest_batch(work, strategy):
        return f"with batch {batch}", replace(work, batch_size=batch)
    if work.excludes_checkpointing:
        return "no", None
    checkpointing = replace(work, gradient_checkpointing=True)
    if batch := min(devices.largest_batch(checkpointing, strategy), work.batch_size):
        return f"checkpointing, batch {batch}", replace(checkpointing, batch_size=batch)
    return "no", None


def about_shares(work: Workload, strategy: str, devices: Devices) -> str:
    """Return a line about the sequences of unequal GPUs, and the speed-up; "" if all are equal."""
    if not isinstance(devices, UnequalGpus):
        return ""
    shares, speed_up = of_ranks(work, strategy, devices)
    rank, _ = devices.closest(work, strategy)
    gain = f"{speed_up} the speed of equal shares" if speed_up.endswith("x") else speed_up
    return f"\nSequences of the ranks: {shares} ({gain}). Rank {rank} is closest to its limit.\n"


def of_ranks(fitting: Workload | None, strategy: str, devices: UnequalGpus) -> list[str]:
    """Return the sequences of each rank, and the speed-up over equal shares, as text."""
    if fitting is None:
        return ["—", "—"]
    shares = ",".join(map(str, devices.rank_counts(fitting, strategy) or ()))
    speed_up = devices.speed_up(fitting, strategy)
    return [shares, f"{speed_up:.2f}x" if speed_up else "equal shares do not fit"]


def explain(need: MemoryEstimate) -> str:
    """Return the table of --explain: each term of a strategy's estimate in the phases of a step."""
    places = [place for place in ("host", "nvme", "saving") if need.at(place)]
    columns = [*STEP, *places]
    rows = [
        [term.name, *(in_gb(term.size if column in term.phases else 0) for column in columns)]
        for term in need.terms
    ]
    rows.append(["sum", *(in_gb(need.at(column)) for column in columns)])
    names = ["save" if place == "saving" else place for place in places]  # for 80 columns
    table = text_table(rows, [need.strategy, "loss", "backward", "end", "update", *names])
    sent = f"A rank sends {need.sent / GB:.2f} GB per step."
    return f"{table}\nThe peak is in: {need.phase_of_peak()}. {sent}"


def as_dict(work: Workload, need: MemoryEstimate, devices: Devices) -> dict:
    """Return a strategy's entry for --json: bytes of one rank, and whether it fits."""
    checkpointed = None  # the largest batch, unless a flag excludes checkpointing
    if not work.excludes_checkpointing:
        checkpointing = replace(work, gradient_checkpointing=True)
        checkpointed = devices.largest_batch(checkpointing, need.strategy)
    unequal = {}
    if isinstance(devices, UnequalGpus):
        shares, speed_up = (f(work, need.strategy) for f in (devices.rank_counts, devices.speed_up))
        unequal = {"rank_shares": shares, "speed_up": speed_up}
    return {
        "strategy": need.strategy,
        **{f"{name}_bytes": size for name, size in need.sizes().items()},
        "total_bytes": need.total,
        "fits": devices.fits(work, need.strategy),
        "largest_batch": devices.largest_batch(work, need.strategy),
        "largest_batch_with_checkpointing": checkpointed,
        **unequal,
        "terms": [term._asdict() for term in need.terms],
    }


def in_gb(size: int) -> str:
    """Format bytes in GB (2^30 bytes) with two decimals; 0 as a dash."""
    return f"{size / GB:.2f}" if size else "—"
