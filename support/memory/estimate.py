"""How much memory a run needs, computed before it starts: bytes on each GPU, in host memory and on
NVMe, by strategy.

Pure arithmetic on the numbers in a model's config.json; no torch, no weights, no GPU. What is
computed is what the tests measure: live tensors by kind (support/memory/measure.py) in a real run
and in a simulated one (--simulate_gpus).

Sources. Model states: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 3, with the types that
PyTorch and DeepSpeed 0.19 really use. Buffers: DeepSpeed's runtime/zero/stage_1_and_2.py and
stage3.py. Activations: what autograd saves for the operations of transformers' modelling files,
counted operation by operation (the method of Korthikanti et al., "Reducing Activation
Recomputation", arXiv 2205.05198, section 4.1; their numbers are for other kernels).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from support.cli.flags import LOGITS_CHUNK, NORM_CHUNK, STRATEGIES, bucket_sizes
from support.errors import UserError
from support.memory.architectures import Architecture, gpt2

GB = 2**30
MASTER_AND_MOMENTS = 12  # bytes a parameter: fp32 weight, exp_avg, exp_avg_sq (ZeRO's K)
# Allowances, not measured: the CUDA context, cuBLAS workspaces and NCCL, which no tensor shows;
# holes between the tensors.
CUDA_CONTEXT, GPU_SLACK = 1 * GB, 1.05

# On a CPU: resident memory of Python and the libraries, and what glibc's heap holds beyond the live
# tensors (tiny-gpt2, fp32, 64 blocks of 512 tokens, torch 2.13: 6.7 GB resident where 5.1 GB of
# tensors were live).
CPU_LIBRARIES, CPU_SLACK = GB // 2, 1.3


# ----------------------------------------------------------------------------------------- the work


# What gets adapters when nothing is said, as in peft's
# TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.
USUAL_TARGETS = {"gpt2": "c_attn", "gpt_neox": "query_key_value", "llama": "q_proj,v_proj"}


@dataclass(frozen=True)
class Adapters:
    """LoRA on some linear layers of each block.

    Attributes:
        r: their rank.
        layers: the layers, as in Architecture.linear_layers.
    """

    r: int
    layers: tuple[str, ...]

    def of_block(self, model: Architecture) -> list[int]:
        """Elements of A and B of each layer of a block."""
        shapes = model.linear_layers()
        return [self.r * width for layer in self.layers for width in shapes[layer]]


def adapters(model: Architecture, r: int | None, targets: str | None) -> Adapters | None:
    """The adapters that --lora_r and --lora_targets mean.

    Raises:
        UserError: a target that is none of the linear layers of a block.
    """
    if r is None:
        return None
    layers = model.linear_layers()
    if targets == "all-linear":
        return Adapters(r, tuple(layers))
    names = [
        name.strip() for name in (targets or USUAL_TARGETS[model.family]).split(",") if name.strip()
    ]
    for name in names:
        if not any(f".{layer}".endswith(f".{name}") for layer in layers):
            raise UserError(
                f"--lora_targets {name}: this planner knows {', '.join(layers)}, and all-linear."
            )
    return Adapters(
        r,
        tuple(layer for layer in layers if any(f".{layer}".endswith(f".{name}") for name in names)),
    )


@dataclass(frozen=True)
class Work:
    """What is trained, and on what.

    Attributes:
        model: its architecture.
        world_size: ranks, one a GPU.
        batch_size, seq_length: of one micro-batch.
        precision: "fp32", "bf16" or "fp16".
        gradient_checkpointing: keep only the inputs of the blocks for the backward pass.
        accumulation: micro-batches in a step.
        device: "cuda", or "cpu" for what a simulation on a CPU measures (autocast's rules differ).
        rank: whose memory; None: the one that holds most.
        lora: adapters on frozen weights; None: everything is trained.
        fused_gelu: GPT-2's activation is computed by one kernel.
    """

    model: Architecture
    world_size: int
    batch_size: int = 4
    seq_length: int = 512
    precision: str = "bf16"
    gradient_checkpointing: bool = False
    accumulation: int = 1
    device: str = "cuda"
    rank: int | None = None
    lora: Adapters | None = None
    fused_gelu: bool = True

    @property
    def trained(self) -> list[int]:
        """Elements of each parameter that is trained, in the model's order."""
        return (
            self.model.parameters()
            if self.lora is None
            else self.model.layers * self.lora.of_block(self.model)
        )

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter."""
        return self.model.parameters() + ([] if self.lora is None else self.trained)

    def saves(self, layer: str, strategy: str) -> bool:
        """Whether a linear layer's input is kept, which only the gradient of its own weights needs.

        DeepSpeed's stage 3 has its own torch.nn.Linear, which keeps the input always; GPT-2 has
        none but its output layer.
        """
        own_linear = strategy in ("zero3", "infinity") and (
            self.model.family != "gpt2" or layer == "head"
        )
        return self.lora is None or layer in self.lora.layers or own_linear

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return self.batch_size * self.seq_length

    @property
    def item(self) -> int:
        """Bytes of a number that is computed with."""
        return 4 if self.precision == "fp32" else 2

    def autocast(self, strategy: str) -> bool:
        """Whether weights are fp32 and arithmetic 16 bit: dp always, fsdp for fp16; DeepSpeed and
        FSDP2 convert the weights.
        """
        return self.precision != "fp32" and (
            strategy == "dp" or (strategy == "fsdp" and self.precision == "fp16")
        )


def saved_by_block(work: Work, strategy: str) -> int:
    """Bytes that autograd keeps of one transformer block for its backward pass, attention by a
    fused kernel (SDPA).

    Each term is a tensor that some operation saves; what two operations save is counted once. A
    frozen linear layer or norm saves its weight, which is there anyway, and not its input.
    """
    m, c = work.model, work.item
    h, autocast, frozen = m.hidden, work.autocast(strategy), work.lora is not None
    stream = 4 if autocast else c  # the residual stream, fp32 under autocast
    reads = [
        [
            layer
            for layer in m.linear_layers()
            if layer.endswith(ends) and work.saves(layer, strategy)
        ]
        for ends in (FIRST_OF_ATTENTION, FIRST_OF_MLP)
    ]
    attention = (
        c * (2 * m.query + 2 * m.key) + 4 * m.heads
    )  # query, key, value, output; the kernel's log-sum-exp in fp32
    if m.family == "llama":
        # RMSNorm computes in fp32: its input there, the normalised one, its output (under autocast
        # a 16-bit copy for each linear layer that reads it).
        normalised = 0 if frozen else 4 if autocast else c
        norms = 2 * (4 + normalised) * h + c * h * sum(
            len(group) if autocast else bool(group) for group in reads
        )
        if m.qk_norm:
            norms += (4 + (0 if frozen else c)) * (m.query + m.key)
    else:
        inputs = 1 if m.parallel else 2  # one for both
        norms = stream * h * inputs + c * h * sum(map(bool, reads))
        if m.family == "gpt_neox":
            # Query and key are rotated copies, the joint projection stays because the value is a
            # part of it, and the output is copied into the layout of the next layer.
            attention += c * h * (3 if work.saves("attention.dense", strategy) else 2)
    lora = c * work.lora.r * len(work.lora.layers) if frozen else 0  # what A gives, which B reads
    return work.tokens * (norms + attention + _saved_by_mlp(work, strategy) + lora)


# Layers that read the norm before attention, and the one before the MLP.
FIRST_OF_ATTENTION = ("c_attn", "query_key_value", "q_proj", "k_proj", "v_proj")
FIRST_OF_MLP = ("c_fc", "dense_h_to_4h", "gate_proj", "up_proj")


def _saved_by_mlp(work: Work, strategy: str) -> int:
    """Bytes a token between the first linear layer of an MLP and its last: gate, its activation and
    up, or the activation's input; and the product, which the last layer reads.
    """
    m, c = work.model, work.item
    product = c * m.intermediate if work.saves(list(m.linear_layers())[-1], strategy) else 0
    if m.family == "llama":
        return 3 * c * m.intermediate + product
    return c * m.intermediate + product + _saved_by_activation(work, work.autocast(strategy))


def _saved_by_activation(work: Work, autocast: bool) -> int:
    """Bytes a token beyond the activation's input and output; transformers computes GPT-2's
    gelu_new in eight operations.
    """
    if work.model.activation != "gelu_new" or work.fused_gelu:
        return 0
    if (
        autocast and work.device == "cuda"
    ):  # there autocast takes powers in fp32, and what follows is fp32, too
        return (3 * 4 + work.item) * work.model.intermediate
    return 3 * work.item * work.model.intermediate


def activation_bytes(work: Work, strategy: str) -> int:
    """Bytes that autograd holds at the end of a forward pass, without the logits; dropout is not
    counted.

    Under autocast the 16-bit copies of the weights are among them.
    """
    m, c, autocast = work.model, work.item, work.autocast(strategy)
    stream, frozen = 4 if autocast else c, work.lora is not None
    if work.gradient_checkpointing:
        # With frozen embeddings transformers makes their output a leaf, which stays; position
        # embeddings are added to it.
        inputs = m.layers + (1 if frozen and m.positions else 0)
        blocks = inputs * work.tokens * stream * m.hidden
    else:
        blocks = m.layers * saved_by_block(work, strategy)
    if frozen:
        final_norm = 4 if m.family == "llama" else stream
        blocks -= _before_adapters(work, strategy)
    elif m.family == "llama":
        final_norm = 8 if autocast else 4 + c
    else:
        final_norm = stream
    if work.precision == "fp16":  # the loss computes the logits again in backward, from its input
        final_norm += stream
    in_blocks = (
        0 if work.gradient_checkpointing else m.layers * sum(n for n in m.block() if m.is_matrix(n))
    )
    copies = c * in_blocks if autocast else 0
    return blocks + work.tokens * final_norm * m.hidden + copies


def _before_adapters(work: Work, strategy: str) -> int:
    """Bytes that the first block does not save, because nothing is derived before the first
    adapter: its first norm, and the MLP where it stands beside attention.
    """
    m, c = work.model, work.item
    if work.gradient_checkpointing:
        return 0
    saved = (4 if m.family == "llama" or work.autocast(strategy) else c) * m.hidden * work.tokens
    if m.parallel and not any(layer.startswith("mlp") for layer in work.lora.layers):
        saved += work.tokens * _saved_by_mlp(work, strategy)
        saved += c * 2 * m.hidden * m.intermediate if work.autocast(strategy) else 0
    return saved


def kept_by_loss(work: Work, strategy: str) -> int:
    """Bytes from the loss to backward: gradients of the output layer's input, and of its weight if
    it is trained.
    """
    return (
        0 if work.precision == "fp16" else gradients_of_head(work, strategy)
    )  # fp16: they are computed in backward


def gradients_of_head(work: Work, strategy: str) -> int:
    """Bytes of the gradients of the output layer's input, and of its weight if it is trained; there
    while backward runs.
    """
    item = 4 if work.autocast(strategy) else work.item
    return item * work.model.hidden * (work.tokens + (0 if work.lora else work.model.vocabulary))


def peak_of_loss(work: Work, strategy: str) -> int:
    """Bytes at most while model/loss.py computes loss and gradients, in parts of the logits;
    kept_by_loss among them.
    """
    m, c = work.model, work.item
    parts = -(-work.tokens * m.vocabulary // LOGITS_CHUNK[work.device])
    rows = -(-work.tokens // parts)
    # Of a part the logits, a copy in fp32 and the logarithms of the probabilities.
    part = rows * m.vocabulary * (8 if c == 4 else c + 8)
    weight = m.vocabulary * m.hidden
    trained = (
        0 if work.lora else 4 * weight + (0 if c == 4 else c * weight)
    )  # the sum, and the product that is added to it
    copies = c * (weight + work.tokens * m.hidden) if work.autocast(strategy) else 0
    item = 4 if work.autocast(strategy) else c
    return item * work.tokens * m.hidden + trained + copies + part


# --------------------------------------------------------------------------------------- a strategy


@dataclass(frozen=True)
class Need:
    """What one strategy needs; bytes of one rank.

    Attributes:
        parameters, gradients, optimizer: model states on the GPU at the end of backward.
        buffers: communication buckets and staging buffers that stay.
        activations, logits: held at the end of forward; of the logits what the loss keeps, which
            are gradients.
        peak: the most at any moment of a step, temporary tensors included.
        host: in host memory, for this rank.
        nvme: on disk, for this rank.
        sent: bytes that this rank sends in a step.
        device: "cuda" or "cpu".
    """

    strategy: str
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    logits: int
    peak: int
    host: int
    nvme: int
    sent: int
    device: str

    @property
    def total(self) -> int:
        """What must fit the memory of the device: on a CPU the host's, with what a GPU would not
        hold.
        """
        if self.device == "cuda":
            return int(GPU_SLACK * self.peak) + CUDA_CONTEXT
        return int(CPU_SLACK * (self.peak + self.host)) + CPU_LIBRARIES


@dataclass(frozen=True)
class _Held:
    """What a strategy holds besides activations and logits, in bytes of one rank.

    Attributes:
        parameters, gradients, optimizer, buffers: as in Need.
        steady: all through the forward pass.
        gathered, in_backward: on top of it, from the forward pass on, and while backward runs.
        at_end: in all, at the end of backward, where activations have gone and the embedding's
            gradients come.
        update: on top of steady, while weights are updated.
        host, nvme, sent: as in Need.
    """

    parameters: int
    gradients: int
    optimizer: int
    steady: int
    at_end: int
    update: int
    sent: int
    buffers: int = 0
    gathered: int = 0
    in_backward: int = 0
    host: int = 0
    nvme: int = 0


def predict(work: Work, strategy: str) -> Need:
    """Bytes of each kind for one strategy."""
    families = {"dp": _dp, "fsdp": _fsdp, "zero3": _stage3, "infinity": _stage3}
    held = families.get(strategy, _stages12)(work, strategy)
    active, kept = activation_bytes(work, strategy), kept_by_loss(work, strategy)
    block = saved_by_block(work, strategy) if work.gradient_checkpointing else 0
    working = active + max(
        peak_of_loss(work, strategy), gradients_of_head(work, strategy) + held.in_backward + block
    )
    peak = max(held.steady + held.gathered + working, held.at_end, held.steady + held.update)
    sent = held.sent * (work.world_size - 1) // work.world_size
    return Need(
        strategy,
        held.parameters,
        held.gradients,
        held.optimizer,
        held.buffers,
        active,
        kept,
        peak,
        held.host,
        held.nvme,
        sent,
        work.device,
    )


def _dp(work: Work, _strategy: str) -> _Held:
    """DDP: everything whole, in fp32; its gradient buckets stay from step to step."""
    trained, parameters = sum(work.trained), 4 * sum(work.sizes)
    largest = max(work.trained)
    states = parameters + 12 * trained
    stay = work.world_size > 1 or work.accumulation > 1
    # A tied embedding's gradient comes from each of its uses, and their sum is a third tensor;
    # without buckets it stays.
    uses = 2 + stay if work.model.tied and not work.lora else 1
    return _Held(
        parameters,
        4 * trained,
        8 * trained,
        steady=states if stay else states - 4 * trained,
        at_end=states + uses * 4 * largest,
        update=_norm(work, largest) + (0 if stay else 4 * trained),
        sent=2 * 4 * trained,
    )


def _stages12(work: Work, strategy: str) -> _Held:
    """zero1, zero2, offload: a flat working copy, and this rank's part of masters and moments."""
    m, c = work.model, work.item
    total, trained = sum(work.sizes), sum(work.trained)
    largest, share = max(work.trained), _partition(work)
    offload = strategy == "offload"
    parameters, optimizer = c * total, 0 if offload else MASTER_AND_MOMENTS * share
    gradients = 0 if offload else c * _kept_gradients(work)
    before = (
        0  # gradients of the micro-batches before: stage 1 reduces them, whole, with the last one's
    )
    if work.accumulation > 1:
        before = c * trained if strategy == "zero1" else gradients
    buffers = (
        c * largest if offload else 0
    )  # staging for the largest gradient; in host memory there is another
    buckets = (
        2 if offload or work.world_size > 1 else 1
    )  # two where reductions overlap (overlap_comm)
    in_backward = buckets * c * bucket_sizes(m.hidden, total, False)["reduce_bucket_size"]
    states = parameters + optimizer + buffers
    reductions = 1 if strategy == "zero1" else work.accumulation
    uses = (3 if m.tied else 2) + (c == 4)  # the last gradient's parts (see _dp) and copies
    copies = (
        4 + c if c < 4 else 4
    )  # fp32 gradients, and in 16 bit the new working copy; or one gradient's norm, in fp64
    update = (0 if before else gradients) + max(8 * min(largest, share), copies * share)
    return _Held(
        parameters,
        gradients,
        optimizer,
        steady=states + before,
        at_end=states + before + in_backward + max(0, gradients - c * largest) + uses * c * largest,
        update=0 if offload else update,
        sent=(2 * reductions + 1) * c * trained,
        buffers=buffers,
        in_backward=in_backward,
        host=_host_of_offload(work) if offload else 0,
    )


def _host_of_offload(work: Work) -> int:
    """Bytes that DeepSpeed's stage 2 keeps in host memory for its CPU optimizer (stage_1_and_2.py,
    cpu_offload).

    With "pin_memory", as in ds_config_offload.json, all of it is page-locked but the moments, which
    CPU Adam allocates.
    """
    c, host = work.item, 0
    for group in _groups(work):
        share = _share(group, work.world_size)
        # Masters, fp32 gradients, and a 16-bit copy of the weights for the way back; two moments.
        host += _page_locked(work, [4 * share, 4 * share, c * share]) + 8 * share
    host += _page_locked(work, [c * max(work.trained)])  # staging for the largest gradient
    if work.accumulation > 1:  # one tensor a parameter
        host += _page_locked(work, [c * size for size in work.trained])
    return host


def _page_locked(work: Work, sizes: list[int]) -> int:
    """Bytes of host memory that page-locked tensors of these sizes take.

    With CUDA torch rounds each of them up to a power of two and returns none to the system
    (ATen/core/CachingHostAllocator.h, allocate); on a CPU nothing is page-locked.
    """
    if work.device != "cuda":
        return sum(sizes)
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def _stage3(work: Work, strategy: str) -> _Held:
    """zero3 and infinity: a part of every parameter, whole for the time of its use."""
    c, n, sizes = work.item, work.world_size, work.sizes
    total, largest = sum(sizes), max(sizes)
    parts, trained = _parts(sizes, n), _parts(work.trained, n)
    buckets = bucket_sizes(work.model.hidden, total, False)
    bucket, persistent = buckets["reduce_bucket_size"], _persistent(sizes, buckets)
    swaps = strategy == "infinity"
    # Infinity keeps on the GPU only what every rank has whole. A single rank has it once, as its
    # part.
    parameters = c * (_parts(persistent, n) if swaps else parts) + (
        c * sum(persistent) if n > 1 else 0
    )
    gradients, optimizer = (0, 0) if swaps else (c * trained, MASTER_AND_MOMENTS * trained)
    gathered = 0 if n == 1 and not swaps else c * (largest + min(2 * bucket, total - largest))
    steady = parameters + gradients + optimizer + c * bucket
    # ds_config_infinity.json: 5 buffers for parameters, 4 for a sub-group's states, which DeepSpeed
    # page-locks without rounding (csrc/pin_memory/deepspeed_pin_tensor.cpp); and the gradients, in
    # one tensor that torch locks.
    in_host = c * 5 * (largest // n + 4096) + 4 * 4 * min(trained, buckets["sub_group_size"])
    in_host += _page_locked(work, [c * trained])
    # At the end the embedding is whole, with its gradient's parts (see _dp), and the last block's
    # largest matrix.
    uses = 2 if work.model.tied else 1
    at_end = c * ((largest if gathered else 0) + uses * max(work.trained) + max(work.model.block()))
    # The norm of one gradient, in fp64; or the fp32 copies of a sub-group.
    update = max(
        8 * max(work.trained) // n,
        (4 + (c if c < 4 else 0)) * min(trained, buckets["sub_group_size"]),
    )
    return _Held(
        parameters,
        gradients,
        optimizer,
        steady=steady,
        at_end=steady + at_end,
        update=0 if swaps else update,
        sent=c * (2 * total + sum(work.trained)) * work.accumulation,
        buffers=c * bucket,
        gathered=gathered,
        host=in_host if swaps else 0,
        nvme=(MASTER_AND_MOMENTS + 4) * trained + c * parts if swaps else 0,
    )


def _fsdp(work: Work, strategy: str) -> _Held:
    """FSDP2: fp32 shards of everything; blocks are gathered one by one, what is outside of them for
    a whole pass.
    """
    m, n, sizes = work.model, work.world_size, work.sizes
    c = (
        4 if work.autocast(strategy) else work.item
    )  # gathered as they are used; fp16 computes under autocast
    parts, trained, block = _parts(sizes, n), _parts(work.trained, n), sum(m.block())
    total, outside = sum(sizes), m.total - m.layers * block
    with_adapters = block + (sum(work.lora.of_block(m)) if work.lora else 0)
    before = (
        4 * sum(work.trained) if work.accumulation > 1 else 0
    )  # gradients are whole until the last micro-batch
    steady = 4 * parts + 8 * trained + before
    in_backward = (c if work.lora else 2 * c) * with_adapters
    # At the end what is outside of the blocks: whole, with its gradient (of a tied embedding three
    # parts, see _dp), and in 16 bit an fp32 copy of that, to be reduced.
    gathered = 0 if n == 1 and c == 4 else c * outside
    derived = 0 if work.lora else max(3 * c if m.tied else 0, c + (4 if c < 4 else 0)) * outside
    return _Held(
        4 * parts,
        4 * trained,
        8 * trained,
        steady=steady,
        at_end=steady
        + 4 * (trained if work.lora else trained - outside // n)
        + in_backward
        + gathered
        + derived,
        update=4 * trained + _norm(work, max(work.trained) // n),
        sent=2 * c * work.accumulation * total + 4 * sum(work.trained),
        gathered=gathered,
        in_backward=in_backward,
    )


def _norm(work: Work, largest: int) -> int:
    """Bytes for the norm of the gradients, `largest` being the elements of one: on a CPU copies in
    fp64, a part at a time.
    """
    return 8 * min(largest, NORM_CHUNK) if work.device == "cpu" else 0


def _parts(sizes: list[int], n: int) -> int:
    """Elements of one rank's parts of parameters that are each divided by n, and filled up to whole
    elements.
    """
    return sum(-(-size // n) for size in sizes)


def _persistent(sizes: list[int], buckets: dict[str, int]) -> list[int]:
    """Parameters that stage 3 leaves whole on every rank."""
    return [size for size in sizes if size <= buckets["stage3_param_persistence_threshold"]]


def _groups(work: Work) -> list[list[int]]:
    """Matrices and the rest, of what is trained: DeepSpeed flattens each parameter group by itself.
    Adapters are matrices.
    """
    if work.lora:
        return [work.trained]
    return [
        [s for s in work.trained if work.model.is_matrix(s)],
        [s for s in work.trained if not work.model.is_matrix(s)],
    ]


def _share(group: list[int], n: int) -> int:
    """Elements of a rank's part of a group, which is filled up to a multiple of 2N."""
    return math.ceil(sum(group) / (2 * n)) * 2


def _partition(work: Work) -> int:
    """Elements of a rank's part of all groups."""
    return sum(_share(group, work.world_size) for group in _groups(work))


def _kept_gradients(work: Work) -> int:
    """Elements of the gradients that a rank keeps under stages 1 and 2: of all parameters that its
    part touches, whole.
    """
    ranks = range(work.world_size) if work.rank is None else [work.rank]
    kept = dict.fromkeys(ranks, 0)
    for group in _groups(work):
        share, start = _share(group, work.world_size), 0
        for size in group:
            for rank in range(
                start // share, min((start + size - 1) // share, work.world_size - 1) + 1
            ):
                if rank in kept:
                    kept[rank] += size
            start += size
    return max(kept.values())


def predict_all(work: Work) -> list[Need]:
    """All strategies."""
    return [predict(work, strategy) for strategy in STRATEGIES]


# ---------------------------------------------------------------------------------------- what fits


ADVISED_SHARE = 0.9  # of a GPU's memory that advice may fill: peaks are predicted within 10 %


@dataclass(frozen=True)
class Limits:
    """What there is, in bytes; None where it is not known and limits nothing.

    Attributes:
        gpu: memory of one GPU.
        host, nvme: of one node, which all its ranks share.
        ranks_per_node: how many do.
    """

    gpu: int | None
    host: int | None = None
    nvme: int | None = None
    ranks_per_node: int = 1

    def with_room(self) -> Limits:
        """What advice may count on."""
        return replace(self, gpu=None if self.gpu is None else int(ADVISED_SHARE * self.gpu))

    def hold(self, need: Need) -> bool:
        """Whether a strategy's need fits."""
        share = {"host": need.host * self.ranks_per_node, "nvme": need.nvme * self.ranks_per_node}
        on_gpu = self.gpu is None or need.total <= self.gpu
        return on_gpu and all(
            getattr(self, name) is None or size <= getattr(self, name)
            for name, size in share.items()
        )


# The order in which to try: the first that fits is the simplest and, as a rule, the fastest.
PREFERENCE = ("dp", "zero1", "zero2", "fsdp", "zero3", "offload", "infinity")


def recommend(work: Work, limits: Limits) -> Need | None:
    """The first strategy of PREFERENCE that fits; None if none does."""
    return next(
        (
            need
            for need in (predict(work, strategy) for strategy in PREFERENCE)
            if limits.hold(need)
        ),
        None,
    )


def _largest(fits, start: int, most: int) -> int:
    """The largest number up to `most` for which `fits` is true, it being true for all smaller ones;
    0 if not even for start.
    """
    if not fits(start):
        return 0
    low, high = start, start * 2
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_batch(work: Work, strategy: str, limits: Limits) -> int:
    """Blocks in the largest micro-batch that fits; 0 if not even one does."""
    return _largest(
        lambda size: limits.hold(predict(replace(work, batch_size=size), strategy)), 1, 65536
    )


def fewest_gpus(work: Work, strategy: str, limits: Limits) -> int | None:
    """GPUs that the model needs at this batch on each; None if 4,096 are not enough."""
    for number in (*range(1, 65), *(2**power for power in range(7, 13))):
        ranks = min(limits.ranks_per_node, number)
        if replace(limits, ranks_per_node=ranks).hold(
            predict(replace(work, world_size=number), strategy)
        ):
            return number
    return None


def gpt2_of_width(hidden: int, like: Architecture) -> Architecture:
    """A model of GPT-2's shape: as many layers for its width as GPT-2's four sizes have (12 at 768,
    48 at 1600), and on.
    """
    layers = (
        max(1, round(12 + (hidden - 768) * (48 - 12) / (1600 - 768)))
        if hidden >= 768
        else max(1, hidden // 64)
    )
    return gpt2(
        layers,
        hidden // 64,
        hidden,
        like.vocabulary if like.family == "gpt2" else 50257,
        like.positions or 1024,
    )


def largest_gpt2(work: Work, strategy: str, limits: Limits) -> Architecture | None:
    """The largest model of GPT-2's shape that fits, its width a multiple of 64."""
    if work.lora and work.model.family != "gpt2":
        work = replace(work, lora=adapters(gpt2_of_width(768, work.model), work.lora.r, None))
    width = _largest(
        lambda k: limits.hold(
            predict(replace(work, model=gpt2_of_width(64 * k, work.model)), strategy)
        ),
        1,
        1024,
    )
    return gpt2_of_width(64 * width, work.model) if width else None


@dataclass(frozen=True)
class Way:
    """One change that would make a run fit: the flags that make it, and what the run then needs."""

    flags: str
    need: Need


def fitting_split(work: Work, strategy: str, limits: Limits) -> Work | None:
    """The same step in the largest micro-batches that fit; None if not even single blocks do."""
    sizes = divisors(work.batch_size)

    def split(size: int) -> Work:
        return replace(
            work, batch_size=size, accumulation=work.accumulation * work.batch_size // size
        )

    def fits(size: int) -> bool:
        return limits.hold(predict(split(size), strategy))

    if fits(work.batch_size):  # without accumulation it may need less than its half
        return work
    first_too_large = bisect_left(sizes, True, key=lambda size: not fits(size))
    return split(sizes[first_too_large - 1]) if first_too_large else None


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


def ways_to_fit(work: Work, strategy: str, limits: Limits) -> list[Way]:
    """What to change when `strategy` does not fit, the least change first: only what fits, and with
    room to spare.

    Another strategy at the same batch; a smaller micro-batch with as many more of them;
    checkpointing; shorter blocks.
    """
    limits = limits.with_room()
    found, heavier = [], predict(work, strategy).total
    for other in PREFERENCE:
        need = predict(work, other)
        if other != strategy and need.total < 0.98 * heavier:
            found.append(Way(f"--strategy {other}", need))
    split = fitting_split(work, strategy, limits)
    if split and split.batch_size < work.batch_size:
        flags = (
            f"--batch_size {split.batch_size} --gradient_accumulation_steps {split.accumulation}"
        )
        found.append(Way(flags, predict(split, strategy)))
    if not work.gradient_checkpointing:
        found.append(
            Way(
                "--gradient_checkpointing",
                predict(replace(work, gradient_checkpointing=True), strategy),
            )
        )
    if work.seq_length >= 64:
        half = work.seq_length // 2
        found.append(Way(f"--seq_length {half}", predict(replace(work, seq_length=half), strategy)))
    return [way for way in found if limits.hold(way.need)]


def describe_ways(work: Work, strategy: str, limits: Limits) -> list[str]:
    """Lines of advice with numbers, for a run that did not fit."""
    need, there = predict(work, strategy), f" of {limits.gpu / GB:.1f}" if limits.gpu else ""
    planned = f"Planned for {strategy}: {need.total / GB:.1f}{there} GB"
    if limits.with_room().hold(need):
        return [
            f"{planned}, which should have fitted: does another process use this memory, or did dropout or a long prompt?"
        ]
    ways = ways_to_fit(work, strategy, limits)
    if not ways:
        return [
            f"{planned}. No single change gives room enough: see scripts/plan_memory.py --solve gpus, and --solve model."
        ]
    return [
        f"{planned}. It would fit with one of:",
        *(f"  {w.flags}: {w.need.total / GB:.1f}{there} GB" for w in ways),
    ]
