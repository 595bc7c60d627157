"""--check: the memory estimate next to the memory of this machine."""

from collections.abc import Callable

from support.cluster.context import DistContext
from support.commands.check_line import PROBLEM, WARNING, Line, line_of
from support.errors import UserError
from support.memory.estimate import predict
from support.memory.find_architecture import find_architecture
from support.memory.fit import remedies
from support.report.run_plan import memory_limits
from support.settings.data import choose_seq_length
from support.units import GB
from support.workload.architectures import Architecture
from support.workload.workload import Workload


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
