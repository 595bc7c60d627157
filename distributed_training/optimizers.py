"""The optimizers of --optim, and the settings of loss scaling.

To add one, add a row to OPTIMIZERS, its constructor to create_optimizer in the script, the reading
and writing of its states to strategies/optimizer_shards.py, and to the engines in strategies/ why
they do not support it.
"""

from dataclasses import dataclass

# Loss scaling in fp16, the same for torch's GradScaler and DeepSpeed: an overflow skips the update
# and halves the scale; GROWTH_INTERVAL steps without an overflow double it.
INITIAL_SCALE_POWER, GROWTH_INTERVAL = 16, 2000


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, whose states are in addition to the fp32 weight."""

    name: str
    # Bytes of its states per trained parameter; the memory estimate also counts small parameters
    # and blocks (workload/workload.py).
    state_bytes: float
    family: str  # optimizers of one family can resume each other's checkpoints
    package: str | None = None  # the Python package that it needs, besides the required ones
    lr: float | None = None  # default learning rate; None: the default of --lr


OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (
        # Two fp32 moments (Loshchilov and Hutter, arXiv 1711.05101).
        Optimizer("adamw", 8, "adamw"),
        # The same moments in 8 bits, with an fp32 scale for each block of 256 (Dettmers et al.,
        # arXiv 2110.02861).
        Optimizer("adamw_8bit", 2 + 2 * 4 / 256, "adamw", package="bitsandbytes"),
        # The mean squares of the rows and columns of each matrix (Shazeer and Stern, arXiv
        # 1804.04235).
        Optimizer("adafactor", 0, "adafactor"),
        # One fp32 average of the gradients for the matrices of the blocks, AdamW's two moments for
        # other parameters (Liu et al., arXiv 2502.16982). AdamW's rate, see strategies/muon.py.
        Optimizer("muon", 4, "muon"),
        # Without momentum.
        Optimizer("sgd", 0, "sgd", lr=0.1),
    )
}
