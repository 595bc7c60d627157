"""Sizes of the chunks in which large tensors are processed."""

from __future__ import annotations

# Elements of the logits in one chunk of the loss. Each chunk reads and writes the whole gradient of
# the output layer. A GPU gets larger chunks, because its kernels are fast only on large matrices.
LOGITS_CHUNK = {"cpu": 2**24, "cuda": 2**26}
MOST_CHUNKS = {"cuda": 8}  # a large batch leaves room for larger chunks: its activations need more
NORM_CHUNK = 2**16  # elements of a gradient whose squares are summed in fp32 for the norm


def number_of_chunks(tokens: int, vocabulary: int, device: str) -> int:
    """Return in how many chunks the loss of a micro-batch is computed on a type of device."""
    chunks = -(-tokens * vocabulary // LOGITS_CHUNK[device])
    return min(chunks, MOST_CHUNKS.get(device, chunks))
