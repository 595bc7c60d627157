"""A model with LongRoPE has the same rotary factors in every batch."""

import copy

import pytest
import torch
from small_models import SIZES
from transformers import LlamaConfig, Phi3Config, PhimoeConfig

from distributed_training.model.long_rope import fix_factors
from distributed_training.model.weights import from_config

LIMIT = "original_max_position_embeddings"
BLOCKS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **SIZES}
BLOCKS |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
BLOCKS["initializer_range"] = 0.2
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0, 5.0, 8.0, 11.0]}
MSCALES = {"short_mscale": 1.1, "long_mscale": 1.3, LIMIT: 8}
NAME = "rope_parameters" if hasattr(LlamaConfig(), "rope_parameters") else "rope_scaling"
KINDS = {
    "phi3": (Phi3Config, {}, {LIMIT: 8, "pad_token_id": 0}),
    "phimoe": (PhimoeConfig, MSCALES, {LIMIT: 8, "num_local_experts": 2}),
    "llama": (LlamaConfig, {LIMIT: 8, "factor": 8.0}, {LIMIT: 8}),
}


def config_of(name):
    kind, more, options = KINDS[name]
    settings = {"type": "longrope", **copy.deepcopy(FACTORS), **more}
    if name != "phi3":
        settings["rope_type"] = "longrope"
    return kind(**BLOCKS, **options, rope_scaling=settings)


def logits_of(config, length):
    torch.manual_seed(0)
    model = from_config(config).eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 1 + length)[None], use_cache=False).logits[0]


@pytest.mark.parametrize("name", KINDS)
def test_a_short_batch_has_the_factors_of_a_long_one(name, capsys):
    own, fixed = config_of(name), config_of(name)
    before = copy.deepcopy(getattr(own, NAME))
    replaced = fix_factors(fixed, 16)
    whole, short, usual = logits_of(fixed, 16), logits_of(fixed, 6), logits_of(own, 6)
    assert torch.allclose(whole[:6], short, atol=1e-5)
    assert not torch.allclose(usual, short, atol=1e-3)
    # Long batches are computed as before, and so is the model that is exported.
    assert torch.allclose(whole, logits_of(own, 16), atol=1e-6)
    assert "--seq_length 16" in capsys.readouterr().out
    fixed.update(replaced)
    assert getattr(fixed, NAME) == before and getattr(fixed, LIMIT) == 8


@pytest.mark.parametrize("name", KINDS)
def test_sequences_within_the_limit_change_nothing(name, capsys):
    config = config_of(name)
    before = config.to_dict()
    config.update(fix_factors(config, 8))
    assert config.to_dict() == before and not capsys.readouterr().out
