"""Memory of activations and of the loss: the tensors that autograd saves for backward.

They were counted operation by operation in transformers' modelling files (the method of
Korthikanti et al., "Reducing Activation Recomputation", arXiv 2205.05198, section 4.1; their
numbers are for other kernels). Dropout is not counted. All results are in bytes of one rank.
"""

from typing import NamedTuple

from distributed_training.loss_chunks import number_of_chunks
from distributed_training.workload.workload import Workload

# Moments of an optimizer step at which its memory can be at its peak: while the loss is computed;
# at the start of backward, with all activations; at its end, with all gradients; in the update.
LOSS, BACKWARD, END, UPDATE = "loss", "backward", "end of backward", "update"
STEP = (LOSS, BACKWARD, END, UPDATE)
# Places of model states outside of the GPU.
HOST, NVME = ("host",), ("nvme",)
SAVING = ("saving",)  # host memory that saves need in addition; without it training waits for them

# Layers whose input is the norm before attention, and the norm before the MLP.
FIRST_OF_ATTENTION = ("c_attn", "query_key_value", "q_proj", "k_proj", "v_proj")
FIRST_OF_MLP = ("c_fc", "dense_h_to_4h", "gate_proj", "up_proj")


class Term(NamedTuple):
    """A part of the memory estimate."""

    name: str
    size: int  # bytes of one rank; negative if it reduces another term
    phases: tuple[str, ...]  # when it is in memory: of STEP; or where: HOST, NVME, SAVING


def activation_terms(work: Workload) -> list[Term]:
    """Return what autograd holds from forward until backward, without the loss.

    Under autocast the 16-bit copies of the weights are included. With gradient checkpointing,
    backward additionally holds the activations of one transformer block.
    """
    m, c, held = work.model, work.item, (LOSS, BACKWARD)
    stream, adapters = work.in_blocks.stream, work.lora
    of_block = saved_by_block(work.in_blocks)
    terms = []
    if work.gradient_checkpointing:
        # With frozen embeddings transformers makes their output a leaf that requires a gradient. It
        # stays in memory, because position embeddings are added to it in a new tensor.
        inputs = m.layers + (1 if adapters and m.embedding.positions else 0)
        size = inputs * work.tokens * stream * m.hidden
        terms.append(Term("activations: block inputs", size, held))
        terms.append(Term("activations: one block", sum(of_block.values()), (BACKWARD,)))
    else:
        for name, size in of_block.items():
            terms.append(Term(f"activations: {name}", m.layers * size, held))
        if adapters:
            # No gradient is needed before the first adapter: not for the first norm, nor for the
            # MLP if it is parallel to attention and has no adapters.
            norm = 4 if m.family == "llama" else work.layer_norm
            before = norm * m.hidden * work.tokens
            if m.parallel and not any(layer.startswith("mlp") for layer in adapters.layers):
                before += of_block["MLP"]
            terms.append(Term("activations: before adapters", -before, held))
        if work.dtypes.autocast:
            block = m.block() if work.has_bf16_blocks else filter(m.is_matrix, m.block())
            size = c * (sum(work.trained) if adapters else m.layers * sum(block))
            terms.append(Term("16-bit weight copies", size, held))
    if m.family == "llama":
        # Frozen, the final norm saves its fp32 input only.
        trained = 8 if work.casts_weights else 4 + c
        final_norm = 4 if adapters else trained
    else:
        final_norm = work.layer_norm
    terms.append(Term("activations: final norm", work.tokens * final_norm * m.hidden, held))
    if work.kernels.attention_mask:
        terms.append(Term("attention mask", work.tokens * work.seq_length, held))  # bools
    return terms


def saved_by_block(work: Workload) -> dict[str, int]:
    """Return the bytes that autograd saves of a transformer block, with fused attention (SDPA).

    Each number is a tensor that some operation saves. A tensor that two operations save is counted
    once. A frozen linear layer or norm saves its weight, which exists anyway, and not its input.
    """
    m, c = work.model, work.item
    h, frozen = m.hidden, work.lora is not None
    readers = [  # of the norm before attention, and of the norm before the MLP
        sum(layer.endswith(names) and work.saves(layer) for layer in m.linear_layers())
        for names in (FIRST_OF_ATTENTION, FIRST_OF_MLP)
    ]
    # Query, key, value and output; the kernel's log-sum-exp in fp32.
    attention = c * (2 * m.attention.query + 2 * work.stored_keys) + 4 * m.attention.heads
    if work.kernels.attention_mask:  # SDPA converts the mask of bools to numbers, and saves these
        attention += c * work.seq_length
    if m.family == "llama":
        # RMSNorm computes in fp32: its fp32 input, the normalized input, and its output (under
        # autocast a 16-bit copy for each linear layer that reads it).
        normalized = 0 if frozen else work.stream
        outputs = sum(readers) if work.casts_weights else sum(map(bool, readers))
        norms = 2 * (4 + normalized) * h + c * h * outputs
        if m.attention.qk_norm:
            norms += (4 + (0 if frozen else c)) * (m.attention.query + m.attention.key)
    else:
        inputs = 1 if m.parallel else 2  # parallel attention and MLP have the same input
        norms = work.layer_norm * h * inputs + c * h * sum(map(bool, readers))
    if m.family == "gpt_neox":
        # Query and key are rotated copies. The joint projection stays in memory because the value
        # is a view of it. The output is copied to the layout of the next layer.
        attention += c * h * (3 if work.saves("attention.dense") else 2)
    per_token = {"norms": norms, "attention": attention, "MLP": _saved_by_mlp(work)}
    if work.lora:  # the output of A, which is the input of B
        per_token["adapters"] = c * work.lora.r * len(work.lora.layers)
        # DoRA multiplies the outputs of W and of B by the magnitudes, and saves both.
        per_token["adapters"] += 2 * c * sum(work.lora.vectors(m))
    return {name: work.tokens * size for name, size in per_token.items()}


def _saved_by_mlp(work: Workload) -> int:
    """Return the bytes per token that the MLP saves after its first linear layers.

    Llama saves gate, its activation and up; the other families the activation's input, and what the
    activation saves in addition. The last layer's input is included if that layer saves it.
    """
    m, c = work.model, work.item
    product = c if work.saves(list(m.linear_layers())[-1]) else 0
    if m.family == "llama":
        return (3 * c + product) * m.mlp.intermediate
    in_activation = 0
    # transformers computes GPT-2's gelu_new in eight operations. On CUDA, autocast computes powers
    # in fp32, and so are the operations that follow.
    if m.mlp.activation == "gelu_new" and not work.kernels.fused_gelu:
        in_fp32 = work.dtypes.autocast and work.device.type == "cuda"
        in_activation = 3 * 4 + c if in_fp32 else 3 * c
    return (c + product + in_activation) * m.mlp.intermediate


def dora_terms(work: Workload) -> list[Term]:
    """Return the temporaries of peft's DoRA while a layer computes the norms of its new weight.

    peft multiplies A and B with an identity matrix of inputs × inputs, adds their product to a copy
    of the weight, and computes the norms of the sum.
    """
    if not work.lora or not work.lora.magnitudes:
        return []
    c, autocast = work.item, work.dtypes.autocast
    # A has the dtype of the adapters, of which autocast makes copies.
    identity = 4 + c if autocast and c < 4 else c
    # The sum has the dtype of the layer's input: a copy of both, their scaled product and the sum.
    inputs = c if work.model.family == "llama" else work.layer_norm
    copies = c + 2 * inputs + (2 * inputs if inputs > c else 0)
    largest = max(
        identity * shape.inputs**2 + copies * shape.inputs * shape.outputs
        for shape in work.lora.shapes(work.model)
    )
    of_loss = sum(term.size for term in loss_terms(work) if LOSS in term.phases)
    again = largest if work.gradient_checkpointing else 0
    return [  # in the forward pass, before the loss has its own temporaries
        Term("DoRA: norms of a weight less the loss", max(0, largest - of_loss), (LOSS,)),
        Term("DoRA: norms of a weight", again, (BACKWARD,)),
    ]


def loss_terms(work: Workload) -> list[Term]:
    """Return what model/loss.py, which computes in chunks, adds to the activations."""
    m, c, vocabulary = work.model, work.item, work.model.embedding.vocabulary
    chunks = number_of_chunks(work.tokens, vocabulary, work.device.type)
    # Of one chunk: the logits, a copy in fp32 and the logarithms of the probabilities.
    of_logit = 8 if c == 4 else c + 8
    if (work.kernels.compiled or work.kernels.compiled_loss) and work.precision != "fp16":
        # The logits, in fp32 on a GPU. The gradient replaces them if it has their dtype.
        of_logit = c if c == 4 or work.on_cpu else c + 4
    chunk = -(-work.tokens // chunks) * vocabulary * of_logit
    weight, inputs = vocabulary * m.hidden, work.tokens * m.hidden
    # The sum over the chunks in fp32, and in 16 bit the product that is added to it.
    of_weight = 0 if work.lora else weight * (4 if c == 4 else 4 + c)
    copies = c * (weight + inputs) if work.casts_weights else 0
    if work.loss_in_graph:
        logits, head = c * work.tokens * vocabulary, gradients_of_head(work)
        # On a CPU the logits' gradient replaces them. On a GPU it is a second tensor, next to the
        # 16-bit gradient of the input (measured: RESULTS.md); the head's gradients come later.
        second = logits + c * inputs if work.device.type == "cuda" else 0
        return [
            Term("loss: logits", logits, (LOSS, BACKWARD)),
            Term("loss: 16-bit copies", copies, (LOSS, BACKWARD)),
            Term("gradients of the head", head, (BACKWARD,)),
            Term("loss: logits' gradient less the head's", max(0, second - head), (BACKWARD,)),
        ]
    return [
        Term("loss: a chunk of logits", chunk, (LOSS,)),
        Term("loss: weight's gradient", of_weight, (LOSS,)),
        Term("loss: input's gradient", work.head_input * inputs, (LOSS,)),
        Term("loss: 16-bit copies", copies, (LOSS,)),
        Term("gradients of the head", gradients_of_head(work), (BACKWARD,)),
    ]


def kept_by_loss(work: Workload) -> int:
    """Return the bytes that the loss keeps from forward until backward."""
    if work.loss_in_graph:
        return work.item * work.tokens * work.model.embedding.vocabulary
    return gradients_of_head(work)


def gradients_of_head(work: Workload) -> int:
    """Return the bytes of the gradients of the head: of its input, and of its weight if trained."""
    of_weight = 0 if work.lora else work.stream * work.model.embedding.vocabulary
    return work.model.hidden * (work.head_input * work.tokens + of_weight)
