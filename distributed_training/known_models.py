"""The embedded model and the GPT-2 models, whose shape is known without a file."""

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


# The name of each model above, and the parts of its config.json that determine memory.
CONFIGS = {
    EMBEDDED_MODEL: gpt2_config(*EMBEDDED_SHAPE, EMBEDDED_VOCABULARY, 512),
    **{name: gpt2_config(*shape) for name, shape in GPT2_SHAPES.items()},
}
