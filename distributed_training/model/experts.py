"""Mixtures of experts: what a run does not do with them. Only runs of such models import it."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING

from torch import nn

from distributed_training import console
from distributed_training.errors import UserError

if TYPE_CHECKING:
    from peft import LoraConfig

BALANCING = "the load-balancing loss of the experts (output_router_logits in config.json)"

# A product of sums over the tokens of one micro-batch: unlike a sum of the tokens' losses, it would
# differ by the number of ranks and by the accumulation.
WITHOUT_BALANCING = (
    f"Training and evaluation leave out {BALANCING}, so the experts may be used less evenly. "
    "--lora_r with layers of attention trains no router."
)


def fused_experts(model: nn.Module) -> list[str]:
    """Return the names of the parameters that have the weights of all experts of a layer."""
    return [name for name, p in model.named_parameters() if "expert" in name and p.ndim > 2]


def without_fused_experts(model: nn.Module, config: LoraConfig, by_user: bool) -> str | list[str]:
    """Say that fused experts get no adapters; return targets by which peft does not adapt them.

    Args:
        config: of the adapters; if peft would adapt experts, layers of attention are the targets.
        by_user: the user has named the targets.
    Raises:
        UserError: one of the named targets is also a name of experts.
    """
    targets = config.target_modules
    targets = targets if isinstance(targets, str) else sorted(targets or ())
    if _adapts_experts(model, config):
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        attention = sorted(
            {name.rpartition(".")[2] for name in linear if re.search("attn|attention", name)}
        )
        if by_user:
            raise UserError(
                "--lora_targets: peft gives these names to the fused experts as well, whose "
                f"adapters are not supported: name others, such as {','.join(attention)}."
            )
        if not attention:
            raise UserError(
                "The experts of this model are fused and get no adapters, and it has no linear "
                "layers of attention: train it without --lora_r."
            )
        targets = attention
    shown = targets if isinstance(targets, str) else ", ".join(targets)
    console.warn(
        f"The experts of this model are fused ({fused_experts(model)[0]}) and get no adapters, "
        f"only linear layers do ({shown})."
    )
    return targets


def _adapts_experts(model: nn.Module, config: LoraConfig) -> bool:
    """Return whether peft gives adapters to parameters, and not only to layers with a weight."""
    import peft
    from peft.tuners.lora import LoraLayer

    trial = copy.deepcopy(model)
    try:
        peft.inject_adapter_in_model(copy.deepcopy(config), trial)
    except ValueError:  # the targets are some of the weights that are fused, and not all
        return True
    adapted = [module for module in trial.modules() if isinstance(module, LoraLayer)]
    return not all(hasattr(layer.get_base_layer(), "weight") for layer in adapted)
