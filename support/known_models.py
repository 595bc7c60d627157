"""Models whose shape is known without a file: the embedded model, and the sizes of GPT-2."""

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
