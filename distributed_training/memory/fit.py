"""What fits in a given memory: a strategy, the largest batch, the fewest GPUs.

Also advice for a run that ran out of memory.
"""

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from distributed_training.about import command_of
from distributed_training.errors import UserError
from distributed_training.hardware import HOPPER, TURING
from distributed_training.memory.estimate import MemoryEstimate, predict, supporting
from distributed_training.settings.settings import Settings
from distributed_training.strategies.strategy import Strategy
from distributed_training.strategies.table import OFFLOADING, ON_DEVICE, PREFERENCE
from distributed_training.units import GB
from distributed_training.workload.architectures import Architecture
from distributed_training.workload.workload import Device, Kernels, Workload, adapters

ADVISED_SHARE = 0.9  # share of a GPU that advice may fill: peaks are predicted within 10 %


class Devices(Protocol):
    """The memory of all ranks: `Limits` if they are equal, else `unequal.UnequalGpus`."""

    @property
    def gpu(self) -> int | None:
        """Bytes of the first GPU."""

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on one node."""

    def estimate(self, work: Workload, strategy: str) -> MemoryEstimate:
        """Return the memory estimate of the rank that is closest to its limit."""

    def fits(self, work: Workload, strategy: str) -> bool:
        """Return whether every rank fits."""

    def largest_batch(self, work: Workload, strategy: str) -> int:
        """Return the largest --batch_size up to 65,536 that fits; 0 if none does."""

    def rank_counts(self, work: Workload, strategy: str) -> tuple[int, ...] | None:
        """Return the sequences of each rank in a micro-batch; None: as many for each rank."""

    def pace(self, work: Workload, strategy: str) -> float:
        """Return the speed of a step, relative to equal shares on GPUs as the fastest one."""


@dataclass(frozen=True)
class Limits:
    """Available memory in bytes; None if it is not known, which sets no limit."""

    gpu: int | None  # memory of one GPU
    # Of one node, shared by its ranks.
    host: int | None = None
    nvme: int | None = None
    ranks_per_node: int = 1  # number of these ranks

    @classmethod
    def in_gb(
        cls, gpu: float | None, host: float | None, nvme: float | None, ranks_per_node: int
    ) -> "Limits":
        """Return the limits from sizes in GB (2^30 bytes)."""
        gpu, host, nvme = (None if size is None else int(size * GB) for size in (gpu, host, nvme))
        return cls(gpu, host, nvme, ranks_per_node)

    @classmethod
    def of_cpu(cls, host: float | None, nvme: float | None, ranks_per_node: int) -> "Limits":
        """Return the limits of the processes on the CPUs of a node, which share its memory.

        It includes what offload keeps in it.

        Args:
            host: memory of the node in GB (2^30 bytes); None: that of this machine.
        """
        limits = cls.in_gb(None, host, nvme, ranks_per_node)
        return replace(limits, gpu=(limits.host or host_memory()) // ranks_per_node, host=None)

    def hold(self, need: MemoryEstimate, share: float = 1.0) -> bool:
        """Return whether a strategy's memory estimate fits, in this share of the GPU."""
        return (
            (self.gpu is None or need.total <= int(share * self.gpu))
            and (self.host is None or need.host * self.ranks_per_node <= self.host)
            and (self.nvme is None or need.nvme * self.ranks_per_node <= self.nvme)
        )

    def estimate(self, work: Workload, strategy: str) -> MemoryEstimate:
        """Return the memory estimate of a rank."""
        return predict(work, strategy)

    def fits(self, work: Workload, strategy: str) -> bool:
        """Return whether a rank fits."""
        return self.hold(predict(work, strategy))

    def largest_batch(self, work: Workload, strategy: str) -> int:
        """Return the sequences of the largest micro-batch up to 65,536 that fits; 0 if none."""
        return most_sequences(work, strategy, self.hold)

    def rank_counts(self, work: Workload, strategy: str) -> None:
        """Return None: as many sequences for each rank."""

    def pace(self, work: Workload, strategy: str) -> float:
        """Return 1: the ranks are equal."""
        return 1.0


def ranks_of_node(gpus: int, gpus_per_node: int | None) -> int:
    """Return the number of ranks on one node.

    Args:
        gpus_per_node: None: up to 8.
    Raises:
        UserError: the nodes would have different numbers.
    """
    per_node = min(gpus_per_node or 8, gpus)
    if gpus % per_node:
        raise UserError(f"--gpus {gpus} is not a multiple of --gpus_per_node {per_node}: set it.")
    return per_node


def planned_device(precision: str) -> Device:
    """Return a GPU that usually computes in a precision: only older ones use fp16."""
    return Device("cuda", TURING if precision == "fp16" else HOPPER)


def recommend(work: Workload, devices: Devices) -> tuple[MemoryEstimate | None, Workload]:
    """Choose the first strategy that fits, if necessary with changes of the workload.

    The changes are smaller micro-batches, then gradient checkpointing, then both. Strategies that
    offload are tried last.

    Returns:
        The memory estimate, or None if nothing fits; and the workload, in which gradient
        accumulation makes up for smaller micro-batches.
    """
    checkpointing = replace(work, gradient_checkpointing=True)
    is_fixed = work.gradient_checkpointing or work.excludes_checkpointing
    all_supported = supporting(work)
    for strategies in (ON_DEVICE, OFFLOADING):
        supported = [strategy for strategy in strategies if strategy in all_supported]
        for changed in (work,) if is_fixed else (work, checkpointing):
            for strategy in supported:
                if devices.fits(changed, strategy):
                    return devices.estimate(changed, strategy), changed
            for strategy in supported:
                for split in splits(changed):
                    if devices.fits(split, strategy):
                        return devices.estimate(split, strategy), split
    return None, work


def most_sequences(
    work: Workload, strategy: str, holds: Callable[[MemoryEstimate], bool], most: int = 2**16
) -> int:
    """Return the sequences, at most `most`, of the largest micro-batch of a rank that fits."""

    def exceeds(size: int) -> bool:
        return not holds(predict(replace(work, batch_size=size), strategy))

    return bisect_left(range(1, most + 1), True, key=exceeds)


def fewest_gpus(work: Workload, strategy: str, limits: Limits) -> int | None:
    """Return the number of GPUs that the model needs at this batch per GPU.

    Tried are all numbers up to 64, then powers of two. None if 4,096 are not enough.
    """
    for number in (*range(1, 65), *(2**power for power in range(7, 13))):
        on_nodes = replace(limits, ranks_per_node=min(limits.ranks_per_node, number))
        if on_nodes.hold(predict(replace(work, world_size=number), strategy)):
            return number
    return None


def fitting_split(
    work: Workload, strategy: str, holds: Callable[[MemoryEstimate], bool]
) -> Workload | None:
    """Return the same step in the largest micro-batches that fit, or None."""
    return next((split for split in splits(work) if holds(predict(split, strategy))), None)


def splits(work: Workload) -> Iterator[Workload]:
    """Yield the same step in equal micro-batches, the largest first."""
    batch = work.batch_size
    small = [n for n in range(1, math.isqrt(batch) + 1) if batch % n == 0]
    for size in sorted({*small, *(batch // n for n in small)}, reverse=True):
        yield replace(work, batch_size=size, accumulation=work.accumulation * batch // size)


def host_memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_is_planned(strategy: Strategy, eval_only: bool) -> None:
    """Check that the memory estimate supports a run.

    Raises:
        UserError: it uses the user's own DeepSpeed file or options of FSDP, or only evaluates.
    """
    if eval_only or not strategy.is_standard:
        raise UserError(
            "The memory estimate supports training with this project's DeepSpeed files and FSDP's "
            "defaults only."
        )


def workload_of(
    settings: Settings,
    model: Architecture,
    world_size: int,
    precision: str,
    seq_length: int,
    device: Device,
) -> Workload:
    """Return the workload of a run with these settings, on equal ranks.

    Args:
        precision, seq_length: those that the run uses; in the settings they may be open.
    Raises:
        UserError: see `adapters`.
    """
    chosen, training = settings.model, settings.training
    if (attention := chosen.attn_implementation) in ("eager", "flex_attention"):
        raise UserError(f"The memory estimate does not support --attn_implementation {attention}.")
    return Workload(
        model,
        world_size,
        training.batch_size,
        seq_length,
        precision,
        chosen.gradient_checkpointing,
        training.gradient_accumulation_steps,
        device=device,
        lora=adapters(
            model, chosen.lora_r, chosen.lora_targets, chosen.load_in_4bit, chosen.lora_dora
        ),
        kernels=Kernels(
            fused_gelu=chosen.fused_gelu,
            attention_mask=settings.data.isolates_documents,
            compiled=chosen.compile,
            compiled_loss=chosen.compile_loss,
            recorded=training.cuda_graph,
            bf16_blocks=training.bf16_blocks,
        ),
        optimizer=training.optim,
        reduce_dtype=settings.strategy.reduce_dtype,
    )


def remedies(work: Workload, strategy: str, limits: Limits) -> dict[str, MemoryEstimate]:
    """Return the changes of flags that make a run fit with a margin, and then its estimate.

    The candidates, smallest change first: another strategy with the same batch; a smaller
    micro-batch with more accumulation; gradient checkpointing; sequences of half the length.
    """
    holds, present = partial(limits.hold, share=ADVISED_SHARE), predict(work, strategy).total
    supported = supporting(work)
    others = {other: predict(work, other) for other in PREFERENCE if other in supported}
    needs = {f"--strategy {o}": need for o, need in others.items() if need.total < 0.98 * present}
    split = fitting_split(work, strategy, holds)
    if split and split.batch_size < work.batch_size:
        accumulation = f"--gradient_accumulation_steps {split.accumulation}"
        needs[f"--batch_size {split.batch_size} {accumulation}"] = predict(split, strategy)
    checkpointing = replace(work, gradient_checkpointing=True)
    if not work.excludes_checkpointing:
        needs["--gradient_checkpointing"] = predict(checkpointing, strategy)
    half = replace(work, seq_length=work.seq_length // 2)
    needs[f"--seq_length {half.seq_length}"] = predict(half, strategy)
    return {flags: need for flags, need in needs.items() if holds(need)}


def describe_remedies(work: Workload, strategy: str, limits: Limits) -> list[str]:
    """Return lines of advice with memory estimates, for a run that ran out of memory."""
    need, capacity = predict(work, strategy), f" of {limits.gpu / GB:.1f}" if limits.gpu else ""
    lines = [f"Memory estimate for {strategy}: {need.total / GB:.1f}{capacity} GB"]
    if limits.hold(need, ADVISED_SHARE):
        lines[0] += ", which should fit. Check whether another process uses this memory. "
        lines[0] += "The estimate does not include dropout or a long prompt."
    elif fitting := remedies(work, strategy, limits):
        lines[0] += ". It would fit with one of:"
        lines += [f"  {flags}: {n.total / GB:.1f}{capacity} GB" for flags, n in fitting.items()]
    else:
        planner = command_of("scripts/plan_memory.py")
        lines[0] += f". No single change makes it fit: see {planner} --solve gpus."
    return lines
