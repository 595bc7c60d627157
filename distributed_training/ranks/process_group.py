"""The process group: its stores, the software of its ranks, and the settings of torch."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist

from distributed_training.errors import MissingRequirement, TrainingError, UserError
from distributed_training.files.atomic import remove_temporary_folders
from distributed_training.process import code_digest, versions
from distributed_training.ranks.context import DistContext, Nodes, all_gather
from distributed_training.ranks.failures import FailureMonitor
from distributed_training.ranks.launch import START_SKEW_SECONDS, Launch
from distributed_training.ranks.stop import StopSignal
from distributed_training.ranks.tuning import choose_device, choose_precision
from distributed_training.settings.model import ModelSettings
from distributed_training.settings.training import TrainingSettings
from distributed_training.strategies.strategy import Strategy

SAME_ON_ALL = ("python", "torch", "transformers", "deepspeed", "cuda")


def meet_ranks(
    timeout_seconds: int, launch: Launch, device: torch.device, backend: str
) -> tuple[dist.Store, dist.Store]:
    """Wait in the store until all ranks have started: a collective would hang if one were missing.

    Args:
        timeout_seconds: the limit of a collective; the wait has another limit, if that is shorter.
    Returns:
        The stores of this start: for messages of the ranks, and for the process group.
    Raises:
        TrainingError: a rank did not arrive in time.
        UserError: two ranks have the same GPU, or the ranks have devices of different types.
    """
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

        return dist.HashStore(), FakeStore()
    if launch.world_size == 1:
        return dist.HashStore(), dist.HashStore()  # they need no port
    from distributed_training.ranks import meeting  # a single process meets no one

    seconds = min(timeout_seconds, meeting.ARRIVAL_SECONDS)
    store = meeting.connect(launch, seconds)
    start = meeting.meet(store, launch, seconds, meeting.RankDevice.of(device))
    # Another connection than the watchdog's: the calls of a connection wait for each other.
    group = dist.PrefixStore(f"{start}/group", meeting.open_store(launch, hosts_it=False))
    return dist.PrefixStore(start, store), group


def device_of_rank(launch: Launch, may_fail: bool) -> torch.device:
    """Return this rank's device. If there is none, report it to rank 0, which names this rank.

    Args:
        may_fail: return the CPU if torch cannot use the GPU; --check reports it later.
    Raises:
        UserError: see `choose_device`.
    """
    try:
        return choose_device(launch)
    except UserError as error:
        if may_fail and isinstance(error, MissingRequirement):
            return torch.device("cpu")
        if not launch.is_main:  # rank 0 may have ended with the same error
            from distributed_training.ranks import meeting

            with contextlib.suppress(TrainingError):
                store = meeting.connect(launch, START_SKEW_SECONDS)
                own = meeting.RankDevice("cpu", problem=str(error))
                meeting.meet(store, launch, START_SKEW_SECONDS, own)
        raise


@contextlib.contextmanager
def single_process(launch: Launch) -> Iterator[DistContext]:
    """Yield the context of one process on the CPU without a process group; an error ends it."""
    monitor = FailureMonitor(StopSignal())
    monitor.stop.install()
    try:
        yield DistContext(launch, torch.device("cpu"), "fake", monitor)
        remove_temporary_folders()
    except BaseException as error:
        monitor.end_failed(error)


def compare_software(launch: Launch, simulated: bool) -> Nodes:
    """Check that all ranks have the same code and libraries; return the nodes of the ranks.

    Raises:
        TrainingError: a rank has other code or other libraries than rank 0.
    """
    software = {name: text for name, text in versions().items() if name in SAME_ON_ALL}
    place = (launch.node, launch.is_node_leader)
    own = (socket.gethostname(), {**software, "code": code_digest()}, place)
    ranks = all_gather(own, 1 if simulated else launch.world_size)
    for rank, (host, found, _) in enumerate(ranks):
        if differing := {name for name, _ in found.items() ^ ranks[0][1].items()}:
            raise TrainingError(
                f"Rank {rank} on {host} has another version of {', '.join(sorted(differing))} than "
                f"rank 0 on {ranks[0][0]}: use the same code and environment on all hosts."
            )
    if simulated:
        return Nodes(1, (0,) * launch.world_size)
    number = sum(is_leader for _, _, (_, is_leader) in ranks)
    return Nodes(number, tuple(node for _, _, (node, _) in ranks))


def configure_torch(
    device: torch.device, strategy: Strategy, training: TrainingSettings, model: ModelSettings
) -> str:
    """Choose the precision, set TF32, and what --deterministic and the compiler need.

    Returns:
        The precision of the computation: "fp32", "bf16" or "fp16".
    Raises:
        UserError: the device does not have the one that --precision names or that --bf16_blocks
            needs, or no CUDA graphs.
    """
    if training.cuda_graph and device.type != "cuda":
        raise UserError("--cuda_graph needs a GPU: leave it out.")
    if training.cuda_graph and dist.get_world_size() > 1:
        raise UserError("--cuda_graph needs one rank: leave it out, or start one process.")
    # Use TF32 tensor cores for fp32 where available. NVIDIA's variable disables them in its
    # libraries; on a CPU it has no effect of its own, and PyTorch would use the CPU's TF32.
    tf32 = os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # Not warn_only: the backward pass of attention on a GPU would not be deterministic then.
    torch.use_deterministic_algorithms(training.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # no result depends on it
    if model.compiler_flag:
        from distributed_training.ranks.compiler import configure_compiler  # only with --compile

        configure_compiler(device, model.compile and strategy.gathers_single_layers)
    precision = choose_precision(training.precision, device)
    # A strategy without autocast ignores --bf16_blocks, and has said so.
    if training.bf16_blocks and "bf16" in strategy.autocast_precisions and precision != "bf16":
        raise UserError(f"--bf16_blocks needs bf16, and the run uses {precision}: leave it out.")
    return precision
