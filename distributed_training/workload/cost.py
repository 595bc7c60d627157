"""The cost of a run before it starts: optimizer steps, hours and GPU-hours.

hours = tokens / (tokens per second of a GPU × GPUs).
"""

import math
from dataclasses import asdict, dataclass

from distributed_training.errors import UserError
from distributed_training.files.json_types import JsonObject
from distributed_training.workload.rate import Rate
from distributed_training.workload.workload import Workload


@dataclass(frozen=True)
class Cost:
    """The cost of a run, without its start, evaluations, checkpoints and export.

    Attributes:
        tokens: trained on, over all GPUs and epochs.
        steps: optimizer steps.
        tokens_per_second_per_gpu: the rate.
        hours: of the training.
        gpu_hours: hours × GPUs.
        price: GPU-hours × price of a GPU-hour, in its currency; None without a price.
        basis: what the rate follows from, such as "assumed: MFU 40 % of the 312 TFLOP/s in bf16".
    """

    tokens: int
    steps: int
    tokens_per_second_per_gpu: float
    hours: float
    gpu_hours: float
    price: float | None
    basis: str

    def as_dict(self) -> JsonObject:
        """Return the attributes by name, as a row of a table."""
        return asdict(self)


def cost_of_work(
    work: Workload,
    rate: Rate,
    tokens: float | None = None,
    epochs: int = 1,
    max_steps: int | None = None,
    price: float | None = None,
) -> Cost:
    """Return the cost of a run with this workload at this rate.

    Args:
        tokens: of the training data. An epoch leaves out what does not fill a sequence.
        epochs: passes over `tokens`.
        max_steps: optimizer steps, instead of `tokens`.
        price: of a GPU-hour, in any currency.
    Raises:
        UserError: not exactly one of `tokens` and `max_steps` is given.
    """
    if bool(tokens) == bool(max_steps):
        raise UserError("The cost needs one amount of work: tokens or max_steps.")
    global_batch = work.batch_size * work.accumulation * work.world_size
    if max_steps:
        trained, steps = round(max_steps * global_batch * rate.length), max_steps
    else:
        sequences = max(1, int((tokens or 0) / rate.length))
        trained = round(epochs * sequences * rate.length)
        steps = epochs * math.ceil(sequences / global_batch)
    gpu_hours = trained / rate.tokens_per_second / 3600
    return Cost(
        trained,
        steps,
        rate.tokens_per_second,
        hours=gpu_hours / work.world_size,
        gpu_hours=gpu_hours,
        price=None if price is None else gpu_hours * price,
        basis=f"{rate.source}: {rate.basis}",
    )
