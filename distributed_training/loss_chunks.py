"""How the loss is computed, in chunks of the logits: shared by training and the memory estimate."""

IGNORED = -100  # label of tokens without a loss: the default ignore_index of cross_entropy

# Elements of the logits in one chunk of the loss. Each chunk reads and writes the whole gradient of
# the output layer. A GPU gets larger chunks, because its kernels are fast only on large matrices.
LOGITS_CHUNK = {"cpu": 2**24, "cuda": 2**26}
MOST_CHUNKS = {"cuda": 8}  # a large batch leaves room for larger chunks: its activations need more
# Up to this number, a compiled output layer computes all logits at once. On a GPU it is what
# Inductor's kernels index in 32 bits, 4 GiB in 16 bits; 1.65e9 were run on an H200.
COMPILED_LOGITS = {"cpu": 2**29, "cuda": 2**31 - 1}


def fits_in_graph(tokens: int, vocabulary: int, device: str) -> bool:
    """Return whether a compiled output layer computes all logits of a micro-batch at once."""
    return tokens * vocabulary <= COMPILED_LOGITS[device]


def number_of_chunks(tokens: int, vocabulary: int, device: str) -> int:
    """Return in how many chunks the loss of a micro-batch is computed on a type of device."""
    chunks = -(-tokens * vocabulary // LOGITS_CHUNK[device])
    return min(chunks, MOST_CHUNKS.get(device, chunks))
