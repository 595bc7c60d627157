"""Forecast of the step time on more ranks, from two short runs and the speed of the network.

A collective takes a latency and a time that grows with its message (Hockney's model), and in a ring
of N ranks a rank sends times · (N - 1) / N of the message (see COLLECTIVES in
support/cluster/comm_volume.py). Between the measured sizes of messages the time is interpolated.
Computing and sending are added: no overlap is assumed. docs/MULTI_NODE.md has the errors of this
model next to measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from support.cluster.comm_volume import COLLECTIVES
from support.errors import UserError
from support.report.cost import read_run
from support.strategy import STRATEGIES

MEASURED = ("all_reduce", "all_gather", "reduce_scatter")  # by --check, in this order
TIMES_SENT = dict(COLLECTIVES.values())
# Collectives that are not measured, and the one whose speed is assumed.
LIKE = {"broadcast": "all_gather", "all_to_all": "all_gather"}
LIKE |= {"reduce": "all_reduce", "barrier": "all_reduce"}
SAME_WORK = ("model", "strategy", "precision", "batch_size", "seq_length", "trainable_parameters")


@dataclass(frozen=True)
class Network:
    """Speed of the network between the ranks."""

    # For all_reduce, all_gather and reduce_scatter, points (message bytes, seconds in addition
    # to the latency) in ascending order, in units of (N - 1) / N. An all-reduce transfers its
    # message twice. (Gloo's reduce-scatter sends twice as much as a ring, and takes twice as
    # long as the all-gather.)
    transfer: dict[str, list[tuple[float, float]]]
    hop_seconds: float  # the time of one of the 2 (N - 1) messages of a small all-reduce in a ring

    @classmethod
    def measured(
        cls, ranks: int, latency: float, bandwidth: Mapping[int, Sequence[float]]
    ) -> Network:
        """Return the network that --check has measured.

        Args:
            ranks: of that --check.
            latency: seconds of a small all-reduce.
            bandwidth: for a message's bytes the rates of the kinds in MEASURED, in bytes that a
                rank sends per second if the collective is a ring.
        """
        share = (ranks - 1) / ranks
        transfer: dict[str, list[tuple[float, float]]] = {kind: [] for kind in MEASURED}
        for message, rates in sorted(bandwidth.items()):
            for kind, rate in zip(MEASURED, rates, strict=True):
                seconds = message / rate - latency / TIMES_SENT[kind] / share
                transfer[kind].append((message, max(0, seconds)))
        return cls(transfer, latency / (2 * (ranks - 1)))

    def seconds(self, kind: str, ranks: int, calls: float, sent: float) -> float:
        """Return the time of collectives of one kind.

        Args:
            kind: such as "all_reduce".
            ranks: N.
            calls: their number.
            sent: the bytes that a rank sends in them, in units of (N - 1) / N.
        """
        points = self.transfer[LIKE.get(kind, kind)]
        transfers = calls * TIMES_SENT.get(kind, 0)
        message = sent / transfers if sent else 0  # a barrier sends nothing
        sizes, times = zip((0, 0), *points, strict=True)
        each = float(np.interp(message, sizes, times)) * max(1, message / sizes[-1])
        latency = calls * 2 * (ranks - 1) * self.hop_seconds
        return latency + transfers * each * (ranks - 1) / ranks


class Collectives(NamedTuple):
    """The collectives of one kind: (kind, calls, sent) as for Network.seconds.

    They are those of a micro-batch if `repeated` is true, else of an optimizer step.
    """

    kind: str
    calls: float
    sent: float
    repeated: bool


@dataclass(frozen=True)
class Step:
    """What an optimizer step consists of."""

    micro_batch_seconds: float  # data, forward and backward of a micro-batch on one rank
    # The optimizer's update on one rank, which is also assumed where the ranks share it
    update_seconds: float
    collectives: list[Collectives]

    def seconds(self, ranks: int, micro_batches: int, network: Network) -> tuple[float, float]:
        """Return the forecast of the seconds of a step, and of these in communication."""
        computing = micro_batches * self.micro_batch_seconds + self.update_seconds
        communicating = sum(
            network.seconds(kind, ranks, calls, sent) * (micro_batches if repeated else 1)
            for kind, calls, sent, repeated in self.collectives
        )
        return computing + communicating, communicating


def read_step(alone: Path, together: Path) -> Step:
    """Read a step from the results of two runs.

    Args:
        alone: the folder of a run on one rank, which shows the time of the computation.
        together: of the same run on several ranks on any network, which shows the collectives.
    """
    one, several = (read_run("The folder", str(folder))[1] for folder in (alone, together))
    if different := [key for key in SAME_WORK if one.get(key) != several.get(key)]:
        raise UserError(f"{alone} and {together} differ in {different[0]}: repeat one of them.")
    if one["world_size"] != 1 or several["world_size"] == 1:
        raise UserError("Name a run on one rank first, and then one on several ranks.")
    if not (one.get("step_phases_seconds") and several.get("step_phases_seconds")):
        raise UserError(f"{alone} or {together} has no measured steps: train 10 steps or more.")
    phases, micro_batches = one["step_phases_seconds"], one["gradient_accumulation_steps"]
    computing = phases["data"] + phases["forward"] + phases["backward"]
    return Step(computing / micro_batches, phases["update"], list(_collectives(several)))


def _collectives(results: dict) -> Iterator[Collectives]:
    strategy = STRATEGIES[results["strategy"]]
    for name, entry in results["communication_per_step"].items():
        kind = name.split(" ")[0]
        # Without whole gradients on each rank they are reduced after each micro-batch; without
        # whole parameters these are gathered in each. dp, zero1 and fsdp reduce once.
        gathers = kind in ("all_gather", "broadcast")
        repeated = strategy.shards_parameters if gathers else strategy.stage >= 2
        parts = results["gradient_accumulation_steps"] if repeated else 1
        sent = TIMES_SENT[kind] * entry["message_bytes"]
        yield Collectives(kind, entry["calls"] / parts, sent / parts, repeated)
