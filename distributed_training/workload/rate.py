"""The rate at which a GPU trains, as a run measured it, or as a share of its peak FLOP/s."""

from typing import NamedTuple

from distributed_training.errors import UserError
from distributed_training.workload.peak_flops import find_by_short_name, flops_per_token
from distributed_training.workload.workload import Workload

DEFAULT_MFU = 0.4


class Rate(NamedTuple):
    """The speed at which one GPU, or one CPU process, trains."""

    tokens_per_second: float  # of one rank
    source: str  # "measured" or "assumed"
    basis: str  # on what it was measured, or from what it follows
    warning: str  # why the planned run may have another rate, or ""
    length: float  # tokens of a sequence without padding, on average
    # Of a measured run: seconds of an update, and tokens of a rank in a step.
    update: float = 0.0
    step_tokens: float = 1.0


def assumed_rate(device: str, mfu: float | None, work: Workload) -> Rate:
    """Return the rate that follows from the peak FLOP/s of a device, MFU and FLOP per token.

    Args:
        device: --device, such as "A100".
        mfu: --mfu, a share of the peak FLOP/s; None: DEFAULT_MFU.
    Raises:
        UserError: the device is unknown, or does not compute in the precision of the run.
    """
    peak, mfu, model = find_by_short_name(device), mfu or DEFAULT_MFU, work.model
    flops = peak.flops(work.precision)
    if flops is None:
        raise UserError(f"--device {peak.title} has no {work.precision}: use --precision fp16.")
    # An embedding lookup is no matrix multiplication, unless the output layer shares the table.
    tables = model.embedding
    lookups = model.hidden * (tables.positions + (0 if tables.tied else tables.vocabulary))
    matmul, trained = sum(work.sizes) - lookups, sum(work.trained) - (0 if work.lora else lookups)
    per_token = flops_per_token(matmul, trained, model.layers, model.hidden, work.seq_length)
    of_peak = f"of the {flops / 1e12:,.0f} TFLOP/s in {work.precision} ({peak.source})"
    basis = f"MFU {100 * mfu:g} % {of_peak}, {per_token:.3g} FLOP per token"
    warning = "The rate is an assumption: --measure on such a GPU replaces it."
    return Rate(flops * mfu / per_token, "assumed", basis, warning, work.seq_length)
