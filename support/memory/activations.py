"""Memory of activations and of the loss: the tensors that autograd saves for backward.

They were counted operation by operation in transformers' modelling files (the method of
Korthikanti et al., "Reducing Activation Recomputation", arXiv 2205.05198, section 4.1; their
numbers are for other kernels). Dropout is not counted. All results are in bytes of one rank.
"""

from __future__ import annotations

from support.chunks import LOGITS_CHUNK
from support.memory.workload import Workload

# Layers whose input is the norm before attention, and the norm before the MLP.
FIRST_OF_ATTENTION = ("c_attn", "query_key_value", "q_proj", "k_proj", "v_proj")
FIRST_OF_MLP = ("c_fc", "dense_h_to_4h", "gate_proj", "up_proj")


def activation_bytes(work: Workload, strategy: str) -> int:
    """Return the bytes that autograd holds at the end of forward, without the logits.

    Under autocast the 16-bit copies of the weights are included.
    """
    m, c = work.model, work.item
    stream, frozen = work.stream(strategy), work.lora is not None
    if work.gradient_checkpointing:
        # With frozen embeddings transformers makes their output a leaf that requires a gradient. It
        # stays in memory, because position embeddings are added to it in a new tensor.
        inputs = m.layers + (1 if frozen and m.positions else 0)
        blocks, copies = inputs * work.tokens * stream * m.hidden, 0
    else:
        blocks = m.layers * saved_by_block(work, strategy)
        in_blocks = sum(work.trained) if frozen else m.layers * sum(filter(m.is_matrix, m.block()))
        copies = c * in_blocks if work.autocast(strategy) else 0
    if frozen:
        final_norm = 4 if m.family == "llama" else work.layer_norm(strategy)
        blocks -= _before_adapters(work, strategy)
    elif m.family == "llama":
        final_norm = 8 if work.casts_weights(strategy) else 4 + c
    else:
        final_norm = work.layer_norm(strategy)
    if work.precision == "fp16":  # backward computes the logits again from the loss's input
        final_norm += stream
    mask = work.tokens * work.seq_length if work.attention_mask else 0  # of bools
    return blocks + work.tokens * final_norm * m.hidden + copies + mask


def saved_by_block(work: Workload, strategy: str) -> int:
    """Return the bytes that autograd saves of one transformer block, with fused attention (SDPA).

    Each term is a tensor that some operation saves. A tensor that two operations save is counted
    once. A frozen linear layer or norm saves its weight, which exists anyway, and not its input.
    """
    m, c = work.model, work.item
    h, frozen = m.hidden, work.lora is not None
    readers = [  # of the norm before attention, and of the norm before the MLP
        sum(layer.endswith(names) and work.saves(layer, strategy) for layer in m.linear_layers())
        for names in (FIRST_OF_ATTENTION, FIRST_OF_MLP)
    ]
    # Query, key, value and output; the kernel's log-sum-exp in fp32.
    attention = c * (2 * m.query + 2 * m.key) + 4 * m.heads
    if work.attention_mask:  # SDPA converts the mask of bools to numbers, and saves these
        attention += c * work.seq_length
    if m.family == "llama":
        # RMSNorm computes in fp32: its fp32 input, the normalized input, and its output (under
        # autocast a 16-bit copy for each linear layer that reads it).
        normalized = 0 if frozen else work.stream(strategy)
        outputs = sum(readers) if work.casts_weights(strategy) else sum(map(bool, readers))
        norms = 2 * (4 + normalized) * h + c * h * outputs
        if m.qk_norm:
            norms += (4 + (0 if frozen else c)) * (m.query + m.key)
    else:
        inputs = 1 if m.parallel else 2  # parallel attention and MLP have the same input
        norms = work.layer_norm(strategy) * h * inputs + c * h * sum(map(bool, readers))
    if m.family == "gpt_neox":
        # Query and key are rotated copies. The joint projection stays in memory because the value
        # is a view of it. The output is copied to the layout of the next layer.
        attention += c * h * (3 if work.saves("attention.dense", strategy) else 2)
    lora = c * work.lora.r * len(work.lora.layers) if frozen else 0  # output of A, input of B
    return work.tokens * (norms + attention + _saved_by_mlp(work, strategy) + lora)


def _saved_by_mlp(work: Workload, strategy: str) -> int:
    """Return the bytes per token that the MLP saves after its first linear layers.

    Llama saves gate, its activation and up. The other families save the activation's input, and
    what the activation saves in addition. The product, which the last layer reads, is included if
    that layer saves its input.
    """
    m, c = work.model, work.item
    product = c if work.saves(list(m.linear_layers())[-1], strategy) else 0
    if m.family == "llama":
        return (3 * c + product) * m.intermediate
    in_activation = 0
    # transformers computes GPT-2's gelu_new in eight operations. On CUDA, autocast computes powers
    # in fp32, and the operations that follow are in fp32, too.
    if m.activation == "gelu_new" and not work.fused_gelu:
        in_fp32 = work.autocast(strategy) and work.device == "cuda"
        in_activation = 3 * 4 + c if in_fp32 else 3 * c
    return (c + product + in_activation) * m.intermediate


def _before_adapters(work: Workload, strategy: str) -> int:
    """Return the bytes that the first transformer block does not save.

    No gradient is needed before the first adapter: not for the first norm, nor for the MLP if it is
    parallel to attention and has no adapters.
    """
    m = work.model
    if work.gradient_checkpointing:
        return 0
    norm = 4 if m.family == "llama" else work.layer_norm(strategy)
    saved = norm * m.hidden * work.tokens
    if m.parallel and not any(layer.startswith("mlp") for layer in work.lora.layers):
        saved += work.tokens * _saved_by_mlp(work, strategy)
    return saved


def gradients_of_head(work: Workload, strategy: str) -> int:
    """Return the bytes of the output layer's gradients: of its input, and of its weight if trained.

    They are in memory while backward runs.
    """
    rows = work.tokens + (0 if work.lora else work.model.vocabulary)
    return work.stream(strategy) * work.model.hidden * rows


def kept_by_loss(work: Workload, strategy: str) -> int:
    """Return the bytes that the loss keeps until backward: the output layer's gradients.

    In fp16 backward computes them.
    """
    return 0 if work.precision == "fp16" else gradients_of_head(work, strategy)


def peak_of_loss(work: Workload, strategy: str) -> int:
    """Return the peak bytes while model/loss.py computes loss and gradients in chunks.

    They include `kept_by_loss`.
    """
    m, c = work.model, work.item
    chunks = -(-work.tokens * m.vocabulary // LOGITS_CHUNK[work.device])
    tokens = -(-work.tokens // chunks)
    # Of one chunk: the logits, a copy in fp32 and the logarithms of the probabilities.
    chunk = tokens * m.vocabulary * (8 if c == 4 else c + 8)
    weight = m.vocabulary * m.hidden
    # The sum over the chunks in fp32, and in 16 bit the product that is added to it.
    trained = 0 if work.lora else weight * (4 if c == 4 else 4 + c)
    copies = c * (weight + work.tokens * m.hidden) if work.casts_weights(strategy) else 0
    return work.stream(strategy) * work.tokens * m.hidden + trained + copies + chunk
