"""Models whose shape is known without a file: the embedded model, GPT-2's sizes, 7B models."""

from __future__ import annotations

EMBEDDED_MODEL = "tiny-gpt2"
# Layers, heads, hidden size.
EMBEDDED_SHAPE, EMBEDDED_VOCABULARY = (4, 4, 256), 4096
# Radford et al. 2019, table 2; the smallest model as released, with 124M parameters.
GPT2_SHAPES = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
# Names on the hub -> a short name, and the parts of their config.json that determine memory.
LARGE_MODELS = {
    "meta-llama/Llama-2-7b-hf": (
        "Llama-2-7B",
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
        },
    ),
    "meta-llama/Meta-Llama-3-8B": (
        "Llama-3-8B",
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
        },
    ),
    "Qwen/Qwen2.5-7B": (
        "Qwen2.5-7B",
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_position_embeddings": 131072,
        },
    ),
    "mistralai/Mistral-7B-v0.1": (
        "Mistral-7B",
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
        },
    ),
}


def name_on_hub(model: str) -> str:
    """Return the full name of a model that is given by its short name; other names unchanged."""
    for name, (short, _) in LARGE_MODELS.items():
        if model.lower() in (name.lower(), name.lower().partition("/")[2], short.lower()):
            return name
    return model
