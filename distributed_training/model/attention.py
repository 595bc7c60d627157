"""--attn_implementation: which of transformers' attention functions a model uses."""

import torch
from transformers import PretrainedConfig

from distributed_training.errors import UserError, refused_as
from distributed_training.hardware import AMPERE
from distributed_training.model.weights import from_config
from distributed_training.ranks.context import DistContext


def set_attention(
    config: PretrainedConfig, name: str, isolates_documents: bool, ctx: DistContext
) -> None:
    """Let the models that are built from a configuration use an attention function.

    Call it after the checks that run the model on a CPU, where some of the functions fail.

    Args:
        name: --attn_implementation.
        isolates_documents: --isolate_documents or --packing.
    Raises:
        UserError: the model, this machine or the precision does not support the function.
    """
    flag = f"--attn_implementation {name}"
    if isolates_documents and name != "sdpa":
        # The mask of the documents is tested with sdpa. Flash ignores positions in larger batches.
        raise UserError(
            f"{flag}: --isolate_documents and --packing need sdpa, which is the default."
        )
    if name.startswith("flash") and (ctx.capability < AMPERE or ctx.precision == "fp32"):
        raise UserError(
            f"{flag} needs an Ampere GPU or newer, and --precision bf16 or fp16: use sdpa."
        )
    config._attn_implementation = name
    with torch.device("meta"), refused_as(f"{flag} cannot be used", longest=160):
        from_config(config)
