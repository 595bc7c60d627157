"""The layers that --fsdp_config names, checked before a weight is loaded."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from distributed_training.errors import UserError
from distributed_training.strategies.fsdp.options import FsdpOptions
from distributed_training.strategies.fsdp.shards import check_layers, layers_to_shard

SIZES = {"vocab_size": 30, "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
CONFIGS = {
    "gpt2": GPT2Config(**SIZES),  # tied
    "llama": LlamaConfig(**SIZES, intermediate_size=8, tie_word_embeddings=False),
    "tied": LlamaConfig(**SIZES, intermediate_size=8, tie_word_embeddings=True),
}


def model_of(name):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIGS[name])


@pytest.mark.parametrize(
    "name, layers, reason",
    [
        ("gpt2", "GPT2Block,Embedding", "Embedding cannot be sharded on its own, because lm_head"),
        ("tied", "LlamaModel", "lm_head outside of it has the same weight"),
        ("tied", "LlamaDecoderLayer,Linear", "model.embed_tokens outside of it"),
        ("llama", "ModuleList", "has no forward pass"),
    ],
)
def test_a_layer_that_cannot_be_sharded_alone_is_refused(name, layers, reason):
    with pytest.raises(UserError, match=reason):
        check_layers(model_of(name), FsdpOptions(layers=tuple(layers.split(","))))


@pytest.mark.parametrize(
    "name, layers, number",
    [
        ("gpt2", "GPT2Block", 2),
        ("llama", "LlamaDecoderLayer,Embedding", 3),
        ("tied", "LlamaDecoderLayer,LlamaMLP", 4),
        ("tied", "LlamaForCausalLM", 0),  # the whole model is sharded in any case
    ],
)
def test_layers_that_can_be_sharded(name, layers, number):
    model, options = model_of(name), FsdpOptions(layers=tuple(layers.split(",")))
    check_layers(model, options)
    assert len(layers_to_shard(model, options)) == number
