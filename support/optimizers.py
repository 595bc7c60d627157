"""The optimizers of --optim: their states in memory, and the strategies that support them.

To add an optimizer, add a row to OPTIMIZERS, its constructor to create_optimizer in the script, and
the reading and writing of its states to strategies/optimizer_shards.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.strategy import Strategy


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, whose states are in addition to the fp32 weight."""

    # Bytes of its states per trained parameter, for the documentation; the memory estimate also
    # counts small parameters and blocks (memory/workload.py).
    state_bytes: float
    family: str  # optimizers of one family can resume each other's checkpoints
    package: str | None = None  # the Python package that it needs, besides the required ones
    lr: float | None = None  # default learning rate; None: the default of --lr
    # An engine, or a place of the optimizer's states (see Strategy), and why the optimizer does not
    # support it.
    unsupported: dict[str, str] = field(default_factory=dict)

    def problem(self, strategy: Strategy) -> str | None:
        """Return why a strategy does not support the optimizer, or None if it does."""
        of_place = self.unsupported.get(strategy.optimizer_on)
        return self.unsupported.get(strategy.engine, of_place)


CPU_ADAM = "the states are updated on the CPU, where DeepSpeed has its own AdamW"
OPTIMIZERS = {
    # Two fp32 moments (Loshchilov and Hutter, arXiv 1711.05101).
    "adamw": Optimizer(8, "adamw"),
    # The same moments in 8 bits, with an fp32 scale for each block of 256 (Dettmers et al., arXiv
    # 2110.02861).
    "adamw_8bit": Optimizer(
        2 + 2 * 4 / 256,
        "adamw",
        package="bitsandbytes",
        unsupported={
            "fsdp": "bitsandbytes does not support FSDP2's sharded tensors",
            "host": CPU_ADAM,
            "nvme": CPU_ADAM,
        },
    ),
    # The mean squares of the rows and columns of each matrix (Shazeer and Stern, arXiv 1804.04235).
    "adafactor": Optimizer(
        0,
        "adafactor",
        unsupported={
            "deepspeed": "DeepSpeed flattens the weights, and Adafactor needs rows and columns",
            "fsdp": "FSDP shards the rows, and Adafactor needs whole columns",
        },
    ),
    # Without momentum.
    "sgd": Optimizer(
        0, "sgd", lr=0.1, unsupported={"nvme": "DeepSpeed reads Adam's moments from NVMe"}
    ),
}
