"""Configurations of models of two blocks, for tests that build a model in their own process."""

from transformers import Gemma3Config, GPT2Config, LlamaConfig

SIZES = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
CONFIGS = {
    # GPT-2's layers store transposed weights, and have biases.
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, **SIZES),
    "llama": LlamaConfig(
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, **SIZES},
    ),
}


def with_vision() -> Gemma3Config:
    """A model of one block for text, and one for images."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    return Gemma3Config(
        text_config={**sizes, **heads, "vocab_size": 310, "sliding_window": 16},
        vision_config={
            **{"model_type": "siglip_vision_model", **sizes, "num_attention_heads": 2},
            **{"image_size": 28, "patch_size": 14},
        },
        mm_tokens_per_image=4,
        image_token_index=309,
        bos_token_id=0,
        eos_token_id=0,
    )
