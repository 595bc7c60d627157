"""Which modules stage 3 gathers at once."""

from collections import Counter

from deepspeed.utils import set_z3_leaf_module
from torch import nn

from distributed_training.model_parts import transformer_blocks
from distributed_training.strategies.deepspeed import patches


def gather_whole_blocks(model: nn.Module) -> None:
    """Let stage 3 gather, and later free, the parameters of a transformer block at once.

    DeepSpeed then calls its hooks for each block and not for each of its layers, which takes a
    third of the time on the host. A block that shares a parameter with another one is left out:
    DeepSpeed notes one block for each parameter.
    """
    blocks = transformer_blocks(model)
    uses = Counter(id(parameter) for block in blocks for parameter in {*block.parameters()})
    for block in blocks:
        if all(uses[id(parameter)] == 1 for parameter in block.parameters()):
            set_z3_leaf_module(block, True)
    patches.reduce_gradients_of_blocks()
