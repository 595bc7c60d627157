"""FSDP: which layers it shards one by one, and how the weights reach the shards."""

import torch
import torch.distributed as dist
from torch import nn

from distributed_training import console
from distributed_training.model_parts import transformer_blocks
from distributed_training.strategies.fsdp.options import FsdpOptions


def layers_to_shard(model: nn.Module, options: FsdpOptions) -> list[nn.Module]:
    """Return the layers that FSDP shards one by one: those of its configuration, or the blocks."""
    if not options.wrap_layers:
        return []
    blocks = transformer_blocks(model)
    named = [module for module in model.modules() if type(module).__name__ in options.layers]
    if named:
        return named
    if options.layers:
        kind = type(blocks[0]).__name__ if blocks else "none"
        console.warn(
            f"This model has no layer of class {', '.join(options.layers)}: "
            f"sharding its own blocks ({kind})."
        )
    return blocks


def fill_from_rank0(sharded: nn.Module, whole: nn.Module | None, device: torch.device) -> None:
    """Distribute a model's weights to the ranks as shards, and its buffers whole.

    Args:
        sharded: the model under FSDP2, with uninitialised memory.
        whole: the same model with its weights on rank 0; None on other ranks.
        device: of this rank.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(sharded, {} if whole is None else whole.state_dict(), options=options)
    # State dicts do not contain buffers such as rotary frequencies.
    for name, buffer in sharded.named_buffers():
        buffer.data = buffer.data.to(device)  # also if parameters stay on the CPU
        if whole is not None:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, src=0)
