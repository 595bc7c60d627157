"""Memory estimate of a run before it starts: bytes on each GPU, in host memory and on NVMe.

The estimate is computed from the numbers in a model's config.json, for each strategy. It needs no
PyTorch, no weights and no GPU. The tests compare it with measurements: live tensors by category
(support/memory/measure.py) in a real run and in a simulated one (--simulate_gpus).

Sources. Model states: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 3, with the dtypes that
PyTorch and DeepSpeed 0.19 use. Buffers: DeepSpeed's runtime/zero/stage_1_and_2.py and stage3.py.
Activations: the tensors that autograd saves in transformers' modelling files, counted operation by
operation (the method of Korthikanti et al., "Reducing Activation Recomputation", arXiv 2205.05198,
section 4.1; their numbers are for other kernels).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from support.chunks import LOGITS_CHUNK, NORM_CHUNK
from support.cli.ds_config import bucket_sizes
from support.errors import UserError
from support.memory.architectures import Architecture, gpt2
from support.strategy import STRATEGIES
from support.units import GB

MASTER_AND_MOMENTS = 12  # bytes per parameter: fp32 weight, exp_avg, exp_avg_sq (ZeRO's K)
# Allowances, not measured: for memory outside of tensors (the CUDA context, cuBLAS workspaces,
# NCCL), and for fragmentation.
CUDA_CONTEXT, GPU_SLACK = 1 * GB, 1.05

# On a CPU: resident memory of Python and the libraries, and the ratio of glibc's heap to the live
# tensors (tiny-gpt2, fp32, 64 sequences of 512 tokens, torch 2.13: 6.7 GB resident for 5.1 GB of
# live tensors).
CPU_LIBRARIES, CPU_SLACK = GB // 2, 1.3


# ----------------------------------------------------------------------------------------- workload


# Default targets of adapters, as in peft's TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.
USUAL_TARGETS = {"gpt2": "c_attn", "gpt_neox": "query_key_value", "llama": "q_proj,v_proj"}


@dataclass(frozen=True)
class Adapters:
    """LoRA adapters on some linear layers of each transformer block.

    Attributes:
        r: rank of the adapters.
        layers: the layers, as in Architecture.linear_layers.
    """

    r: int
    layers: tuple[str, ...]

    def of_block(self, model: Architecture) -> list[int]:
        """Return the elements of A and B of each adapted layer of a transformer block."""
        shapes = model.linear_layers()
        return [self.r * width for layer in self.layers for width in shapes[layer]]


def adapters(model: Architecture, r: int | None, targets: str | None) -> Adapters | None:
    """Return the adapters that --lora_r and --lora_targets request; None without --lora_r.

    Raises:
        UserError: a target is not one of the linear layers of a transformer block.
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
class Workload:
    """Workload of a run: the model, its batches and the number of ranks.

    Attributes:
        model: its architecture.
        world_size: number of ranks, one per GPU.
        batch_size, seq_length: sequences in one micro-batch, and tokens in each.
        precision: "fp32", "bf16" or "fp16".
        gradient_checkpointing: keep only the inputs of the transformer blocks for backward.
        accumulation: micro-batches per optimizer step.
        device: "cuda", or "cpu" for a simulation on a CPU (the rules of autocast differ).
        rank: the rank to estimate; None: the one that needs the most memory.
        lora: adapters on frozen weights; None: all parameters are trained.
        fused_gelu: one kernel computes GPT-2's activation.
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
        """Elements of each trained parameter, in the model's order."""
        return (
            self.model.parameters()
            if self.lora is None
            else self.model.layers * self.lora.of_block(self.model)
        )

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter, in the model's order, then of the adapters."""
        return self.model.parameters() + ([] if self.lora is None else self.trained)

    def saves(self, layer: str, strategy: str) -> bool:
        """Return whether autograd saves a linear layer's input.

        Only the gradient of the layer's own weights needs it. DeepSpeed's stage 3 replaces
        torch.nn.Linear by a version that always saves its input; GPT-2 has no such layer except its
        output layer.
        """
        own_linear = STRATEGIES[strategy].stage == 3 and (
            self.model.family != "gpt2" or layer == "head"
        )
        return self.lora is None or layer in self.lora.layers or own_linear

    @property
    def tokens(self) -> int:
        """Tokens in one micro-batch."""
        return self.batch_size * self.seq_length

    @property
    def item(self) -> int:
        """Bytes per element in computations."""
        return 4 if self.precision == "fp32" else 2

    def autocast(self, strategy: str) -> bool:
        """Return whether weights are fp32 and computations 16-bit: always for dp, in fp16 for fsdp.

        In all other 16-bit runs DeepSpeed or FSDP2 converts the weights.
        """
        return self.precision != "fp32" and (
            strategy == "dp" or (strategy == "fsdp" and self.precision == "fp16")
        )


def saved_by_block(work: Workload, strategy: str) -> int:
    """Return the bytes that autograd saves of one transformer block, with fused attention (SDPA).

    Each term is a tensor that some operation saves. A tensor that two operations save is counted
    once. A frozen linear layer or norm saves its weight, which exists anyway, and not its input.
    """
    m, c = work.model, work.item
    h, autocast, frozen = m.hidden, work.autocast(strategy), work.lora is not None
    stream = 4 if autocast else c  # the residual stream, fp32 under autocast
    readers = [
        [
            layer
            for layer in m.linear_layers()
            if layer.endswith(ends) and work.saves(layer, strategy)
        ]
        for ends in (FIRST_OF_ATTENTION, FIRST_OF_MLP)
    ]
    # Query, key, value and output; the kernel's log-sum-exp in fp32.
    attention = c * (2 * m.query + 2 * m.key) + 4 * m.heads
    if m.family == "llama":
        # RMSNorm computes in fp32: its fp32 input, the normalised input, and its output (under
        # autocast a 16-bit copy for each linear layer that reads it).
        normalised = 0 if frozen else 4 if autocast else c
        norms = 2 * (4 + normalised) * h + c * h * sum(
            len(group) if autocast else bool(group) for group in readers
        )
        if m.qk_norm:
            norms += (4 + (0 if frozen else c)) * (m.query + m.key)
    else:
        inputs = 1 if m.parallel else 2  # parallel attention and MLP have the same input
        norms = stream * h * inputs + c * h * sum(map(bool, readers))
        if m.family == "gpt_neox":
            # Query and key are rotated copies. The joint projection stays in memory because the
            # value is a view of it. The output is copied to the layout of the next layer.
            attention += c * h * (3 if work.saves("attention.dense", strategy) else 2)
    lora = c * work.lora.r * len(work.lora.layers) if frozen else 0  # output of A, input of B
    return work.tokens * (norms + attention + _saved_by_mlp(work, strategy) + lora)


# Layers whose input is the norm before attention, and the norm before the MLP.
FIRST_OF_ATTENTION = ("c_attn", "query_key_value", "q_proj", "k_proj", "v_proj")
FIRST_OF_MLP = ("c_fc", "dense_h_to_4h", "gate_proj", "up_proj")


def _saved_by_mlp(work: Workload, strategy: str) -> int:
    """Return the bytes per token that the MLP saves after its first linear layers.

    Llama saves gate, its activation and up. The other families save the activation's input, and
    what the activation saves in addition. The product, which the last layer reads, is included if
    that layer saves its input.
    """
    m, c = work.model, work.item
    product = c * m.intermediate if work.saves(list(m.linear_layers())[-1], strategy) else 0
    if m.family == "llama":
        return 3 * c * m.intermediate + product
    return c * m.intermediate + product + _saved_by_activation(work, work.autocast(strategy))


def _saved_by_activation(work: Workload, autocast: bool) -> int:
    """Return the bytes per token that the activation saves in addition to its input and output.

    transformers computes GPT-2's gelu_new in eight operations.
    """
    if work.model.activation != "gelu_new" or work.fused_gelu:
        return 0
    # On CUDA, autocast computes powers in fp32, and the operations that follow are in fp32, too.
    if autocast and work.device == "cuda":
        return (3 * 4 + work.item) * work.model.intermediate
    return 3 * work.item * work.model.intermediate


def activation_bytes(work: Workload, strategy: str) -> int:
    """Return the bytes that autograd holds at the end of forward, without the logits.

    Dropout is not counted. Under autocast the 16-bit copies of the weights are included.
    """
    m, c, autocast = work.model, work.item, work.autocast(strategy)
    stream, frozen = 4 if autocast else c, work.lora is not None
    if work.gradient_checkpointing:
        # With frozen embeddings transformers makes their output a leaf that requires a gradient. It
        # stays in memory, because position embeddings are added to it in a new tensor.
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
    if work.precision == "fp16":  # backward computes the logits again from the loss's input
        final_norm += stream
    in_blocks = (
        0 if work.gradient_checkpointing else m.layers * sum(n for n in m.block() if m.is_matrix(n))
    )
    copies = c * in_blocks if autocast else 0
    return blocks + work.tokens * final_norm * m.hidden + copies


def _before_adapters(work: Workload, strategy: str) -> int:
    """Return the bytes that the first transformer block does not save.

    No gradient is needed before the first adapter: not for the first norm, nor for the MLP if it is
    parallel to attention and has no adapters.
    """
    m, c = work.model, work.item
    if work.gradient_checkpointing:
        return 0
    saved = (4 if m.family == "llama" or work.autocast(strategy) else c) * m.hidden * work.tokens
    if m.parallel and not any(layer.startswith("mlp") for layer in work.lora.layers):
        saved += work.tokens * _saved_by_mlp(work, strategy)
        saved += c * 2 * m.hidden * m.intermediate if work.autocast(strategy) else 0
    return saved


def kept_by_loss(work: Workload, strategy: str) -> int:
    """Return the bytes that the loss keeps until backward.

    These are the gradients of the output layer's input, and of its weight if it is trained. In fp16
    backward computes them.
    """
    return 0 if work.precision == "fp16" else gradients_of_head(work, strategy)


def gradients_of_head(work: Workload, strategy: str) -> int:
    """Return the bytes of the output layer's gradients: of its input, and of its weight if trained.

    They are in memory while backward runs.
    """
    item = 4 if work.autocast(strategy) else work.item
    return item * work.model.hidden * (work.tokens + (0 if work.lora else work.model.vocabulary))


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
    trained = 0 if work.lora else 4 * weight + (0 if c == 4 else c * weight)
    copies = c * (weight + work.tokens * m.hidden) if work.autocast(strategy) else 0
    item = 4 if work.autocast(strategy) else c
    return item * work.tokens * m.hidden + trained + copies + chunk


# -------------------------------------------------------------------- memory estimate of a strategy


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory estimate of one strategy, in bytes of one rank.

    Attributes:
        strategy: its name.
        parameters, gradients, optimizer: model states on the GPU at the end of backward.
        buffers: persistent communication buckets and staging buffers.
        activations, logits: held at the end of forward; `logits` are the gradients that the loss
            keeps.
        peak: the maximum over a step, temporary tensors included.
        host: in host memory, for this rank.
        nvme: on disk, for this rank.
        sent: bytes that this rank sends per step.
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
        """Bytes that must fit the memory of the device.

        On a CPU that is host memory, and the total includes `host`.
        """
        if self.device == "cuda":
            return int(GPU_SLACK * self.peak) + CUDA_CONTEXT
        return int(CPU_SLACK * (self.peak + self.host)) + CPU_LIBRARIES


@dataclass(frozen=True)
class _Held:
    """Memory that a strategy holds in addition to activations and logits, in bytes of one rank.

    Attributes:
        parameters, gradients, optimizer, buffers: as in Need.
        steady: during the whole forward pass.
        gathered, in_backward: in addition to `steady`, from forward on, and during backward.
        at_end: total at the end of backward, when activations are freed and the embedding's
            gradients are computed.
        update: in addition to `steady`, while weights are updated.
        host, nvme, sent: as in Need; `sent` before the factor (N - 1) / N for N ranks.
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


def predict(work: Workload, strategy: str) -> MemoryEstimate:
    """Return the memory estimate of one strategy.

    Args:
        work: the workload.
        strategy: one of STRATEGIES.
    """
    families = {"dp": _dp, "fsdp": _fsdp, "zero3": _stage3, "infinity": _stage3}
    states = families.get(strategy, _stages12)(work, strategy)
    activations, kept_gradients = activation_bytes(work, strategy), kept_by_loss(work, strategy)
    block = saved_by_block(work, strategy) if work.gradient_checkpointing else 0
    working = activations + max(
        peak_of_loss(work, strategy), gradients_of_head(work, strategy) + states.in_backward + block
    )
    peak = max(
        states.steady + states.gathered + working, states.at_end, states.steady + states.update
    )
    sent = states.sent * (work.world_size - 1) // work.world_size
    return MemoryEstimate(
        strategy,
        states.parameters,
        states.gradients,
        states.optimizer,
        states.buffers,
        activations,
        kept_gradients,
        peak,
        states.host,
        states.nvme,
        sent,
        work.device,
    )


def _dp(work: Workload, _strategy: str) -> _Held:
    """Estimate DDP: all states whole, in fp32. Gradient buckets persist between steps."""
    trained, parameters = sum(work.trained), 4 * sum(work.sizes)
    largest = max(work.trained)
    states = parameters + 12 * trained
    persistent = work.world_size > 1 or work.accumulation > 1
    # Each use of a tied embedding has its own gradient, and their sum is a third tensor. Without
    # buckets the sum becomes the gradient.
    uses = 2 + persistent if work.model.tied and not work.lora else 1
    return _Held(
        parameters,
        4 * trained,
        8 * trained,
        steady=states if persistent else states - 4 * trained,
        at_end=states + uses * 4 * largest,
        update=_norm(work, largest) + (0 if persistent else 4 * trained),
        sent=2 * 4 * trained,
    )


def _stages12(work: Workload, strategy: str) -> _Held:
    """Estimate zero1, zero2 and offload: a flat working copy, this rank's masters and moments."""
    m, c = work.model, work.item
    total, trained = sum(work.sizes), sum(work.trained)
    largest, share = max(work.trained), _partition(work)
    offload = STRATEGIES[strategy].offloads
    parameters, optimizer = c * total, 0 if offload else MASTER_AND_MOMENTS * share
    gradients = 0 if offload else c * _kept_gradients(work)
    # Gradients of earlier micro-batches. Stage 1 keeps them whole until it reduces the last one's.
    accumulated = 0
    if work.accumulation > 1:
        accumulated = c * trained if strategy == "zero1" else gradients
    # Staging buffer for the largest gradient, with a counterpart in host memory.
    buffers = c * largest if offload else 0
    # Two buckets if reductions overlap with computation (overlap_comm).
    buckets = 2 if offload or work.world_size > 1 else 1
    in_backward = buckets * c * bucket_sizes(m.hidden, total, False)["reduce_bucket_size"]
    states = parameters + optimizer + buffers
    reductions = 1 if strategy == "zero1" else work.accumulation
    uses = (3 if m.tied else 2) + (c == 4)  # the last gradient's parts (see _dp) and copies
    # fp32 gradients, and in 16 bit the new working copy; or the norm of one gradient in fp64.
    copies = 4 + c if c < 4 else 4
    update = (0 if accumulated else gradients) + max(8 * min(largest, share), copies * share)
    return _Held(
        parameters,
        gradients,
        optimizer,
        steady=states + accumulated,
        at_end=states
        + accumulated
        + in_backward
        + max(0, gradients - c * largest)
        + uses * c * largest,
        update=0 if offload else update,
        sent=(2 * reductions + 1) * c * trained,
        buffers=buffers,
        in_backward=in_backward,
        host=_host_of_offload(work) if offload else 0,
    )


def _host_of_offload(work: Workload) -> int:
    """Return the bytes of host memory that DeepSpeed's stage 2 uses for its CPU optimizer.

    They follow stage_1_and_2.py (cpu_offload). With "pin_memory", as in ds_config_offload.json, all
    of it is page-locked except the moments, which CPU Adam allocates.
    """
    c, host = work.item, 0
    for group in _groups(work):
        share = _share(group, work.world_size)
        # Masters, fp32 gradients, and a copy of the weights in the working type for the transfer
        # back to the GPU; two moments.
        host += _page_locked(work, [4 * share, 4 * share, c * share]) + 8 * share
    host += _page_locked(work, [c * max(work.trained)])  # staging for the largest gradient
    if work.accumulation > 1:  # one tensor per parameter
        host += _page_locked(work, [c * size for size in work.trained])
    return host


def _page_locked(work: Workload, sizes: list[int]) -> int:
    """Return the bytes of host memory that page-locked tensors of these sizes (in bytes) use.

    With CUDA, PyTorch rounds each of them up to a power of two and returns no memory to the system
    (ATen/core/CachingHostAllocator.h, allocate). On a CPU nothing is page-locked.
    """
    if work.device != "cuda":
        return sum(sizes)
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def _stage3(work: Workload, strategy: str) -> _Held:
    """Estimate zero3 and infinity: a shard of every parameter, gathered while it is used."""
    c, n, sizes = work.item, work.world_size, work.sizes
    total, largest = sum(sizes), max(sizes)
    shards, trained = _parts(sizes, n), _parts(work.trained, n)
    buckets = bucket_sizes(work.model.hidden, total, False)
    bucket, persistent = buckets["reduce_bucket_size"], _persistent(sizes, buckets)
    swaps = STRATEGIES[strategy].uses_nvme
    # Infinity keeps only the persistent parameters on the GPU, which every rank has whole. A single
    # rank has them once, as its shard.
    parameters = c * (_parts(persistent, n) if swaps else shards) + (
        c * sum(persistent) if n > 1 else 0
    )
    gradients, optimizer = (0, 0) if swaps else (c * trained, MASTER_AND_MOMENTS * trained)
    gathered = 0 if n == 1 and not swaps else c * (largest + min(2 * bucket, total - largest))
    steady = parameters + gradients + optimizer + c * bucket
    # ds_config_infinity.json: 5 buffers for parameters and 4 for the states of a sub-group, which
    # DeepSpeed page-locks without rounding (csrc/pin_memory/deepspeed_pin_tensor.cpp); and the
    # gradients, in one tensor that PyTorch page-locks.
    in_host = c * 5 * (largest // n + 4096) + 4 * 4 * min(trained, buckets["sub_group_size"])
    in_host += _page_locked(work, [c * trained])
    # At the end of backward the embedding is whole, with the gradients of its uses (see _dp), and
    # so is the largest matrix of a transformer block.
    uses = 2 if work.model.tied else 1
    at_end = c * ((largest if gathered else 0) + uses * max(work.trained) + max(work.model.block()))
    # The norm of one gradient in fp64, or the fp32 copies of a sub-group.
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
        nvme=(MASTER_AND_MOMENTS + 4) * trained + c * shards if swaps else 0,
    )


def _fsdp(work: Workload, strategy: str) -> _Held:
    """Estimate FSDP2: fp32 shards of all states.

    Transformer blocks are gathered one by one. Parameters outside of them are gathered for a whole
    pass.
    """
    m, n, sizes = work.model, work.world_size, work.sizes
    # Bytes per gathered element. In fp16 parameters are gathered in fp32, because autocast is used.
    c = 4 if work.autocast(strategy) else work.item
    shards, trained, block = _parts(sizes, n), _parts(work.trained, n), sum(m.block())
    total, outside = sum(sizes), m.total - m.layers * block
    with_adapters = block + (sum(work.lora.of_block(m)) if work.lora else 0)
    # Gradients are not sharded until the last micro-batch.
    accumulated = 4 * sum(work.trained) if work.accumulation > 1 else 0
    steady = 4 * shards + 8 * trained + accumulated
    in_backward = (c if work.lora else 2 * c) * with_adapters
    # At the end of backward, parameters outside of the transformer blocks are whole, with their
    # gradient (three tensors for a tied embedding, see _dp), and in 16 bit its fp32 copy for the
    # reduction.
    gathered = 0 if n == 1 and c == 4 else c * outside
    gradients = 0 if work.lora else max(3 * c if m.tied else 0, c + (4 if c < 4 else 0)) * outside
    return _Held(
        4 * shards,
        4 * trained,
        8 * trained,
        steady=steady,
        at_end=steady
        + 4 * (trained if work.lora else trained - outside // n)
        + in_backward
        + gathered
        + gradients,
        update=4 * trained + _norm(work, max(work.trained) // n),
        sent=2 * c * work.accumulation * total + 4 * sum(work.trained),
        gathered=gathered,
        in_backward=in_backward,
    )


def _norm(work: Workload, largest: int) -> int:
    """Return the bytes for the norm of the gradients: on a CPU fp64 copies of NORM_CHUNK elements.

    Args:
        work: the workload.
        largest: elements of the largest gradient.
    """
    return 8 * min(largest, NORM_CHUNK) if work.device == "cpu" else 0


def _parts(sizes: list[int], n: int) -> int:
    """Return the elements of one rank's shards of parameters, each divided by n and rounded up."""
    return sum(-(-size // n) for size in sizes)


def _persistent(sizes: list[int], buckets: dict[str, int]) -> list[int]:
    """Return the sizes of the parameters that stage 3 keeps whole on every rank."""
    return [size for size in sizes if size <= buckets["stage3_param_persistence_threshold"]]


def _groups(work: Workload) -> list[list[int]]:
    """Return the sizes of the trained matrices and of the other trained parameters.

    DeepSpeed flattens each parameter group separately. Adapters are matrices.
    """
    if work.lora:
        return [work.trained]
    return [
        [s for s in work.trained if work.model.is_matrix(s)],
        [s for s in work.trained if not work.model.is_matrix(s)],
    ]


def _share(group: list[int], n: int) -> int:
    """Return the elements of a rank's part of a group, which is padded to a multiple of 2N."""
    return math.ceil(sum(group) / (2 * n)) * 2


def _partition(work: Workload) -> int:
    """Return the elements of a rank's part of all groups."""
    return sum(_share(group, work.world_size) for group in _groups(work))


def _kept_gradients(work: Workload) -> int:
    """Return the elements of the gradients that a rank keeps under stages 1 and 2.

    A gradient is kept whole if the rank's part contains any of its elements.
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


def predict_all(work: Workload) -> list[MemoryEstimate]:
    """Return the memory estimates of all strategies."""
    return [predict(work, strategy) for strategy in STRATEGIES]


# ----------------------------------------------------------------------- limits and recommendations


ADVISED_SHARE = 0.9  # share of a GPU that advice may fill: peaks are predicted within 10 %


@dataclass(frozen=True)
class Limits:
    """Available memory in bytes; None if it is not known, which sets no limit.

    Attributes:
        gpu: memory of one GPU.
        host, nvme: of one node, shared by its ranks.
        ranks_per_node: number of these ranks.
    """

    gpu: int | None
    host: int | None = None
    nvme: int | None = None
    ranks_per_node: int = 1

    def with_room(self) -> Limits:
        """Return the limits for advice, which leave a margin on the GPU."""
        return replace(self, gpu=None if self.gpu is None else int(ADVISED_SHARE * self.gpu))

    def hold(self, need: MemoryEstimate) -> bool:
        """Return whether a strategy's memory estimate fits."""
        share = {"host": need.host * self.ranks_per_node, "nvme": need.nvme * self.ranks_per_node}
        on_gpu = self.gpu is None or need.total <= self.gpu
        return on_gpu and all(
            getattr(self, name) is None or size <= getattr(self, name)
            for name, size in share.items()
        )


# The order of recommendation: the first that fits is the simplest and usually the fastest.
PREFERENCE = ("dp", "zero1", "zero2", "fsdp", "zero3", "offload", "infinity")


def recommend(work: Workload, limits: Limits) -> MemoryEstimate | None:
    """Return the estimate of the first strategy of PREFERENCE that fits; None if none fits."""
    return next(
        (
            need
            for need in (predict(work, strategy) for strategy in PREFERENCE)
            if limits.hold(need)
        ),
        None,
    )


def _largest(fits, start: int, most: int) -> int:
    """Return the largest number from `start` to `most` for which `fits` is true, or 0.

    `fits` must be true for all smaller numbers if it is true for a number.
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


def largest_batch(work: Workload, strategy: str, limits: Limits) -> int:
    """Return the number of sequences in the largest micro-batch that fits; 0 if not even one fits.

    Sizes up to 65,536 are tried.
    """
    return _largest(
        lambda size: limits.hold(predict(replace(work, batch_size=size), strategy)), 1, 65536
    )


def fewest_gpus(work: Workload, strategy: str, limits: Limits) -> int | None:
    """Return the number of GPUs that the model needs at this batch per GPU.

    Tried are all numbers up to 64, then powers of two. None if 4,096 are not enough.
    """
    for number in (*range(1, 65), *(2**power for power in range(7, 13))):
        ranks = min(limits.ranks_per_node, number)
        if replace(limits, ranks_per_node=ranks).hold(
            predict(replace(work, world_size=number), strategy)
        ):
            return number
    return None


def gpt2_of_width(hidden: int, like: Architecture) -> Architecture:
    """Return a model of GPT-2's shape with the given width.

    The number of layers grows linearly with the width, as in GPT-2's sizes (12 at 768, 48 at 1600),
    and continues beyond them. Below 768 it is one layer per 64.

    Args:
        hidden: width, a multiple of 64.
        like: its vocabulary is used if it is a GPT-2, and its number of positions if it is not 0.
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


def largest_gpt2(work: Workload, strategy: str, limits: Limits) -> Architecture | None:
    """Return the largest model of GPT-2's shape that fits, with a width that is a multiple of 64.

    With adapters, a model of another family is replaced by a GPT-2 with GPT-2's default targets.
    None if a width of 64 does not fit. The largest width that is tried is 65,536.
    """
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
class Remedy:
    """A change of flags that would make a run fit, with the changed run's memory estimate."""

    flags: str
    need: MemoryEstimate


def fitting_split(work: Workload, strategy: str, limits: Limits) -> Workload | None:
    """Return the same step in the largest micro-batches that fit.

    None if not even micro-batches of one sequence fit.
    """
    sizes = divisors(work.batch_size)

    def split(size: int) -> Workload:
        return replace(
            work, batch_size=size, accumulation=work.accumulation * work.batch_size // size
        )

    def fits(size: int) -> bool:
        return limits.hold(predict(split(size), strategy))

    if fits(work.batch_size):  # without accumulation, it may need less than half of it
        return work
    first_too_large = bisect_left(sizes, True, key=lambda size: not fits(size))
    return split(sizes[first_too_large - 1]) if first_too_large else None


def divisors(number: int) -> list[int]:
    """Return all divisors of a number in ascending order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


def ways_to_fit(work: Workload, strategy: str, limits: Limits) -> list[Remedy]:
    """Return the changes that make a run fit with a margin, the smallest change first.

    The candidates are: another strategy with the same batch; a smaller micro-batch with more
    accumulation; gradient checkpointing; sequences of half the length.
    """
    limits = limits.with_room()
    candidates, present = [], predict(work, strategy).total
    for other in PREFERENCE:
        need = predict(work, other)
        if other != strategy and need.total < 0.98 * present:
            candidates.append(Remedy(f"--strategy {other}", need))
    split = fitting_split(work, strategy, limits)
    if split and split.batch_size < work.batch_size:
        flags = (
            f"--batch_size {split.batch_size} --gradient_accumulation_steps {split.accumulation}"
        )
        candidates.append(Remedy(flags, predict(split, strategy)))
    if not work.gradient_checkpointing:
        candidates.append(
            Remedy(
                "--gradient_checkpointing",
                predict(replace(work, gradient_checkpointing=True), strategy),
            )
        )
    if work.seq_length >= 64:
        half = work.seq_length // 2
        candidates.append(
            Remedy(f"--seq_length {half}", predict(replace(work, seq_length=half), strategy))
        )
    return [way for way in candidates if limits.hold(way.need)]


def describe_ways(work: Workload, strategy: str, limits: Limits) -> list[str]:
    """Return lines of advice with memory estimates, for a run that did not fit."""
    need, capacity = predict(work, strategy), f" of {limits.gpu / GB:.1f}" if limits.gpu else ""
    planned = f"Planned for {strategy}: {need.total / GB:.1f}{capacity} GB"
    if limits.with_room().hold(need):
        return [
            f"{planned}, which should have fitted: does another process use this memory, "
            "or did dropout or a long prompt?"
        ]
    remedies = ways_to_fit(work, strategy, limits)
    if not remedies:
        return [
            f"{planned}. No single change gives room enough: "
            "see scripts/plan_memory.py --solve gpus, and --solve model."
        ]
    return [
        f"{planned}. It would fit with one of:",
        *(f"  {w.flags}: {w.need.total / GB:.1f}{capacity} GB" for w in remedies),
    ]
