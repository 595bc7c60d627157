"""--check: the memory estimate next to the memory of this machine."""

from collections.abc import Callable

from distributed_training.errors import UserError
from distributed_training.memory.estimate import predict
from distributed_training.memory.find_architecture import find_architecture
from distributed_training.memory.fit import remedies
from distributed_training.ranks.context import DistContext
from distributed_training.run.run_workload import memory_limits
from distributed_training.settings.data import choose_seq_length
from distributed_training.units import GB
from distributed_training.workload.architectures import Architecture
from distributed_training.workload.workload import Workload
from tools.check.check_line import PROBLEM, WARNING, Line, line_of


def memory(
    name: str,
    seq_length: int | None,
    strategy: str,
    ctx: DistContext,
    plan: Callable[[Architecture, int], Workload],
) -> Line:
    """Compare the estimate of the run with the memory of the device and of the host.

    Args:
        name: --model.
        seq_length: --seq_length.
        plan: describes the run for the estimate, from the model and the sequence length.
    """
    limits = memory_limits(ctx)
    owner = "GPU" if ctx.device.type == "cuda" else "process"
    capacity = f"{(limits.gpu or 0) / GB:.1f} GB for each {owner}"
    try:
        model = find_architecture(name)
        work = plan(model, choose_seq_length(seq_length, name, model.limit))
    except UserError as error:
        return Line(WARNING, "memory", f"{capacity}; not planned", str(error))
    estimate = predict(work, strategy)
    text = f"planned {estimate.total / GB:.1f} of {capacity}"
    if limits.host and estimate.host:
        host = estimate.host * limits.ranks_per_node
        text += f", {host / GB:.1f} of {limits.host / GB:.1f} GB of host memory"
    fits = limits.hold(estimate)
    ways = [] if fits else remedies(work, strategy, limits)
    remedy = f"it would fit with {' or '.join(ways)}" if ways else "see scripts/plan_memory.py"
    return line_of(fits, "memory", text, remedy, PROBLEM)
