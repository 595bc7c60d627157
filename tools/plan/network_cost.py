"""What a slow network adds to a step, and the accumulation with which that is little."""

import math
from dataclasses import replace

from distributed_training.memory.estimate import predict, supporting
from distributed_training.memory.fit import Devices
from distributed_training.strategies.table import PREFERENCE
from distributed_training.units import GB
from distributed_training.workload.rate import Rate
from distributed_training.workload.workload import Workload
from tools.plan.rate import Row, human_time

NETWORK_SHARE = 1 / 3  # of a step: with more, a larger accumulation is worth its global batch
MOST_MICRO_BATCHES = 2**20  # of --gradient_accumulation_steps


def on_network(rate: Rate, work: Workload, sent: int, bandwidth: float) -> Rate:
    """Return the rate with the time of communication added to each step, without any overlap.

    Args:
        rate: of one rank alone.
        sent: bytes that a rank sends per step.
        bandwidth: GB (2^30 bytes) that a rank sends per second.
    """
    tokens, sending = work.batch_size * work.accumulation * rate.length, sent / (bandwidth * GB)
    step = tokens / rate.tokens_per_second + sending
    part = f"sending takes {sending / step:.0%} of {human_time(step)}"
    return rate._replace(tokens_per_second=tokens / step, basis=f"{rate.basis}; {part}")


def network_rows(
    rate: Rate, work: Workload, strategy: str, bandwidth: float, devices: Devices
) -> list[Row]:
    """Return the rows about the accumulation with which the network takes less than a third.

    If a strategy reaches it at no accumulation, or does not fit with it, a row names another one
    that sends once per step and fits.

    Args:
        rate: without the network.
        bandwidth: GB (2^30 bytes) that a rank sends per second.
    """
    name, number = "accumulation_for_network", enough_accumulation(rate, work, strategy, bandwidth)
    if number:
        more = replace(work, accumulation=number)
        if devices.fits(more, strategy):
            part = sending_share(rate, more, strategy, bandwidth)
            batch, now = (w.batch_size * w.accumulation * w.world_size for w in (more, work))
            source = f"computed: {work.batch_size} x {work.world_size} ranks x {number:,}"
            return [
                Row(name, number, f"{number:,}", f"computed: sending takes {part:.0%} of a step"),
                Row("global_batch_for_network", batch, f"{batch:,}", f"{source}; now {now:,}"),
            ]
        size = devices.estimate(more, strategy).total / GB
        why = f"{number:,} would suffice, but need {size:.1f} GB"
    else:
        most = replace(work, accumulation=MOST_MICRO_BATCHES)
        part = sending_share(rate, most, strategy, bandwidth)
        why = f"{strategy} sends at least {part:.0%} of a step at any accumulation"
    other = once_per_step(rate, work, bandwidth, devices)
    advice = Row("strategy_for_network", None, "none", "none that sends once per step fits")
    if other:
        flags = f"--strategy {other[0]} --gradient_accumulation_steps {other[1]}"
        advice = Row("strategy_for_network", other[0], other[0], f"sends once per step: {flags}")
    return [Row(name, None, "none", why), advice]


def enough_accumulation(rate: Rate, work: Workload, strategy: str, bandwidth: float) -> int | None:
    """Return the fewest micro-batches of a step of which sending takes less than a third, or None.

    Sending takes a + b·n for n micro-batches, computing u + c·n. The share is below s if
    a + b·n < (u + c·n) · s / (1 - s).
    """
    once, each = sending_seconds(work, strategy, bandwidth)
    update, micro_batch = computing_seconds(rate, work)
    relative = NETWORK_SHARE / (1 - NETWORK_SHARE)
    needed, spare = once - update * relative, micro_batch * relative - each
    if needed < spare:
        return 1
    if spare * MOST_MICRO_BATCHES <= needed:
        return None
    return math.floor(needed / spare) + 1


def computing_seconds(rate: Rate, work: Workload) -> tuple[float, float]:
    """Return the seconds of an update, and of forward and backward of a micro-batch.

    Of an assumed rate, all time is that of micro-batches.
    """
    per_token = 1 / rate.tokens_per_second - rate.update / rate.step_tokens
    return rate.update, work.batch_size * rate.length * per_token


def once_per_step(
    rate: Rate, work: Workload, bandwidth: float, devices: Devices
) -> tuple[str, int] | None:
    """Return the first strategy that sends once per step, and its accumulation, if it fits."""
    for strategy in [name for name in PREFERENCE if name in supporting(work)]:
        _, each = sending_seconds(work, strategy, bandwidth)
        number = enough_accumulation(rate, work, strategy, bandwidth)
        if not each and number and devices.fits(replace(work, accumulation=number), strategy):
            return strategy, number
    return None


def sending_share(rate: Rate, work: Workload, strategy: str, bandwidth: float) -> float:
    """Return the share of sending in a step."""
    sending = predict(work, strategy).sent / (bandwidth * GB)
    update, micro_batch = computing_seconds(rate, work)
    return sending / (sending + update + work.accumulation * micro_batch)


def sending_seconds(work: Workload, strategy: str, bandwidth: float) -> tuple[float, float]:
    """Return the seconds in which a rank sends what it sends once per step, and per micro-batch."""
    first, second = (predict(replace(work, accumulation=n), strategy).sent for n in (1, 2))
    return (2 * first - second) / (bandwidth * GB), (second - first) / (bandwidth * GB)
