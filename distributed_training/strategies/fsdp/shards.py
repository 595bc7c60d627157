"""FSDP: which layers it shards one by one, and how the weights reach the shards."""

import torch
import torch.distributed as dist
from torch import nn

from distributed_training import console
from distributed_training.errors import UserError
from distributed_training.model_parts import transformer_blocks
from distributed_training.strategies.fsdp.options import FsdpOptions


def layers_to_shard(model: nn.Module, options: FsdpOptions) -> list[nn.Module]:
    """Return the layers that FSDP shards one by one: those of its configuration, or the blocks."""
    if not options.wrap_layers:
        return []
    blocks = transformer_blocks(model)
    if named := _named_layers(model, options):
        return [layer for layer in named if layer is not model]  # which is sharded in any case
    if options.layers:
        kind = type(blocks[0]).__name__ if blocks else "none"
        console.warn(
            f"This model has no layer of class {', '.join(options.layers)}: "
            f"sharding its own blocks ({kind})."
        )
    return blocks


def _named_layers(model: nn.Module, options: FsdpOptions) -> list[nn.Module]:
    """Return the layers of the configuration's classes, outer ones first."""
    return [module for module in model.modules() if type(module).__name__ in options.layers]


def check_layers(model: nn.Module, options: FsdpOptions) -> None:
    """Check that the layers that the configuration names can be sharded one by one.

    Raises:
        UserError: such a layer has no forward pass, or a parameter of it is used outside as well.
            FSDP2 reports both only when it wraps or runs the model.
    """
    if not options.wrap_layers:
        return
    for layer in _named_layers(model, options):
        kind, inside = type(layer).__name__, set(layer.modules())
        if type(layer).forward is nn.Module.forward:
            raise UserError(
                f"--fsdp_config: {kind} cannot be sharded, because it has no forward pass. Name "
                "the class of the layers in it."
            )
        own = set(layer.parameters())
        for name, module in model.named_modules():
            if module not in inside and own.intersection(module._parameters.values()):
                raise UserError(
                    f"--fsdp_config: {kind} cannot be sharded on its own, because {name} outside "
                    "of it has the same weight (tied embeddings). Leave it out of "
                    "fsdp_transformer_layer_cls_to_wrap: what is not named is sharded as well, "
                    "together with the rest of the model."
                )


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
