"""--check: tests what a run needs of this machine and its network, without training.

Each result is one line: ok, a warning, or a problem that prevents the chosen strategy from running,
with a remedy.
"""

import socket
import tempfile
from collections.abc import Iterable
from functools import partial

from distributed_training import console
from distributed_training.errors import EXIT_COMPLETED, EXIT_FAILED, EXIT_USAGE
from distributed_training.ranks.context import DistContext
from distributed_training.run.run_workload import workload_of_run
from distributed_training.settings.settings import Settings
from tools.check import check_disks, check_machine, check_network
from tools.check.check_line import OK, PROBLEM, Line
from tools.check.check_memory import memory


def check(settings: Settings, ctx: DistContext) -> int:
    """Run all checks and print their results; all ranks must call it.

    Rank 0 prints all of its own results, and of the other ranks those that are not ok.

    Returns:
        The exit code: 0 if the chosen strategy can run on every rank, 2 if a GPU cannot be used, as
        in a run, or 1.
    """
    strategy, output, training = settings.strategy, settings.output, settings.training
    # Only one rank per node: several would share the bandwidth.
    measures_nvme = strategy.needs_nvme and ctx.launch.is_node_leader
    plan, name = partial(workload_of_run, settings, ctx), settings.parallelism.strategy
    nvme_folder = settings.parallelism.nvme_path or tempfile.gettempdir()
    results = [
        check_machine.software(strategy),
        check_machine.gpu(training.device, ctx),
        check_machine.compiler(ctx.device.type, settings.model.compiler_flag),
        check_machine.requirements(
            strategy, training.gradient_accumulation_steps, settings.model.load_in_4bit
        ),
        check_disks.nvme(nvme_folder) if measures_nvme else None,
        check_disks.disk(output, training.eval_only, settings.model.model, settings.data),
        check_machine.limits(),
        memory(settings.model.model, settings.data.seq_length, name, ctx, plan),
        check_machine.hub(settings.hub),
    ]
    own_lines = [line for line in results if line]
    # Printed before the ranks communicate, because the communication may fail.
    _print(own_lines, ctx)
    communication = [check_network.communication(ctx), check_network.rendezvous(ctx)]
    others = _problems_of(ctx.all_gather((socket.gethostname(), own_lines)))
    _print([*communication, *others], ctx)
    lines = ctx.broadcast_from_rank0([*own_lines, *communication, *others])
    problems = sum(line.status == PROBLEM for line in lines)
    ranks = f"{ctx.world_size} {'GPU' if ctx.device.type == 'cuda' else 'CPU rank'}"
    ranks += "s" * (ctx.world_size > 1)
    mark, verdict = (PROBLEM, f"{problems} to solve first") if problems else (OK, "it can run")
    _print([f"{mark} --strategy {name} on {ranks}: {verdict}"], ctx)
    if any(line.status == PROBLEM and line.name == check_machine.GPU for line in lines):
        return EXIT_USAGE
    return EXIT_FAILED if problems else EXIT_COMPLETED


def _print(lines: Iterable[Line | str], ctx: DistContext) -> None:
    for line in lines if ctx.is_main else ():
        console.write(str(line))


def _problems_of(ranks: list[tuple[str, list[Line]]]) -> list[Line]:
    """Return the results of other ranks that are not ok, once per host."""
    seen, found = set(), []
    for rank, (host, lines) in enumerate(ranks):
        for line in lines:
            if rank > 0 and line.status != OK and (host, line) not in seen:
                found.append(line._replace(text=f"{host}, rank {rank}: {line.text}"))
            seen.add((host, line))
    return found
