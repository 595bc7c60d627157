"""Sizes of the chunks in which large tensors are processed."""

from __future__ import annotations

# Elements of the logits in one chunk of the loss. Each chunk reads and writes the whole gradient of
# the output layer. A GPU gets larger chunks, because its kernels are fast only on large matrices.
LOGITS_CHUNK = {"cpu": 2**24, "cuda": 2**26}
NORM_CHUNK = 2**16  # elements of a gradient whose squares are summed in fp32 for the norm
