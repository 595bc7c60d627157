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
# The parts of a config.json that determine memory.
_KEYS = """
    model_type hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads vocab_size max_position_embeddings
    """.split()
# Short name, name on the hub, and the values of these keys.
_ROWS = (
    ("Llama-2-7B", "meta-llama/Llama-2-7b-hf", "llama", 4096, 11008, 32, 32, 32, 32000, 4096),
    ("Llama-3-8B", "meta-llama/Meta-Llama-3-8B", "llama", 4096, 14336, 32, 32, 8, 128256, 8192),
    ("Qwen2.5-7B", "Qwen/Qwen2.5-7B", "qwen2", 3584, 18944, 28, 28, 4, 152064, 131072),
    ("Mistral-7B", "mistralai/Mistral-7B-v0.1", "mistral", 4096, 14336, 32, 32, 8, 32000, 32768),
)
# Name on the hub -> short name, and these parts of its config.json.
LARGE_MODELS = {
    name: (short, dict(zip(_KEYS, config, strict=True))) for short, name, *config in _ROWS
}


def gpt2_config(
    layers: int, heads: int, hidden: int, vocabulary: int = 50257, positions: int = 1024
) -> dict:
    """Return the parts of a GPT-2's config.json that determine memory."""
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_head": heads,
        "n_embd": hidden,
        "vocab_size": vocabulary,
        "n_positions": positions,
    }


# Every model above: its name (on the hub), and the parts of its config.json.
CONFIGS = {
    EMBEDDED_MODEL: gpt2_config(*EMBEDDED_SHAPE, EMBEDDED_VOCABULARY, 512),
    **{name: gpt2_config(*shape) for name, shape in GPT2_SHAPES.items()},
    **{name: config for name, (_, config) in LARGE_MODELS.items()},
}


def name_on_hub(model: str) -> str:
    """Return the full name of a model that is given by its short name; other names unchanged."""
    for name, (short, _) in LARGE_MODELS.items():
        if model.lower() in (name.lower(), name.lower().partition("/")[2], short.lower()):
            return name
    return model
