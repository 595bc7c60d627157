"""LongRoPE (Ding et al., arXiv 2402.13753) with the same factors in every batch.

transformers chooses the factors of the frequencies for each batch: those for long texts if its
longest sequence has more positions than the model before its extension. The loss of a sequence
would depend on the others in its batch, and on how a global batch is divided.
"""

from __future__ import annotations

import copy

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from distributed_training import console
from distributed_training.files.json_types import JsonObject

LIMIT = "original_max_position_embeddings"
NOTICE = (
    "LongRoPE: --seq_length {} is more than the {} positions before the model's extension, so "
    "every batch uses the factors for long texts. transformers uses others for short batches."
)


def fix_factors(config: PretrainedConfig, length: int) -> JsonObject:
    """Let a model use its factors for long texts in every batch if its sequences may be long.

    Shorter sequences always have those for short texts.

    Args:
        config: of the language model; it is changed.
        length: tokens of a sequence.
    Returns:
        Its own values of what is replaced.
    """
    name = "rope_parameters" if hasattr(config, "rope_parameters") else "rope_scaling"
    settings = getattr(config, name)
    own = {name: copy.deepcopy(settings)}
    # Some architectures have settings for each kind of layer.
    kinds = {kind: part for kind, part in settings.items() if isinstance(part, dict)} or {
        "": settings
    }
    for kind, part in kinds.items():
        limit = getattr(config, LIMIT, part.get(LIMIT))
        if part.get("rope_type", part.get("type")) != "longrope" or not limit or length <= limit:
            continue
        compute, options = ROPE_INIT_FUNCTIONS["longrope"], {"layer_type": kind} if kind else {}
        # The scale of the attention depends on the limit as well.
        _, scale = compute(config, torch.device("cpu"), seq_len=length, **options)
        part |= {"attention_factor": scale, LIMIT: 1}
        if hasattr(config, LIMIT):
            own[LIMIT] = limit
        console.warn(NOTICE.format(length, limit))
    if LIMIT in own:
        setattr(config, LIMIT, 1)
    return own
