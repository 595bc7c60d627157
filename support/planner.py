"""How much memory a run needs, computed before it starts: bytes on each GPU, in host memory and on NVMe, by strategy.

Pure arithmetic on the numbers in a model's config.json; no torch, no weights, no GPU. What is computed is what the tests
measure: live tensors by kind (support/memory.py) in a real run and in a simulated one (--simulate_gpus).

Sources. Model states: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 3, with the types that PyTorch and DeepSpeed
0.19 really use. Buffers: DeepSpeed's runtime/zero/stage_1_and_2.py and stage3.py. Activations: what autograd saves for the
operations of transformers' modelling files, counted operation by operation (the method of Korthikanti et al., "Reducing
Activation Recomputation", arXiv 2205.05198, section 4.1; their numbers are for other kernels).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from support.config import EMBEDDED_MODEL, EMBEDDED_SHAPE, EMBEDDED_VOCABULARY, GPT2_SHAPES, STRATEGIES, bucket_sizes
from support.errors import UserError

GB = 2**30
MASTER_AND_MOMENTS = 12  # bytes a parameter: fp32 weight, exp_avg, exp_avg_sq (ZeRO's K)
CUDA_CONTEXT = 1 * GB  # an allowance for the CUDA context, cuBLAS workspaces and NCCL, which no tensor shows; not measured here

# On a CPU: resident memory of Python and the libraries, and what glibc's heap holds beyond the live tensors (tiny-gpt2, fp32,
# 64 blocks of 512 tokens, torch 2.13: 6.7 GB resident where 5.1 GB of tensors were live).
CPU_LIBRARIES, CPU_SLACK = GB // 2, 1.3

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
FAMILIES = ("gpt2", "gpt_neox", *LLAMA_LIKE)


# ------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class Architecture:
    """What memory depends on in a decoder-only transformer.

    Attributes:
        family: "gpt2", "gpt_neox" or "llama" (which Mistral and Qwen share).
        layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary: as in config.json.
        positions: rows of a learned position embedding; 0 where positions are rotary.
        limit: the longest block; None if the configuration does not say.
        tied: the output layer is the input embedding.
        activation: of the MLP, by transformers' name.
        qkv_bias, qk_norm, parallel: biases on query, key and value; a norm on query and key; attention and MLP side by side.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int
    limit: int | None
    tied: bool
    activation: str
    qkv_bias: bool = False
    qk_norm: bool = False
    parallel: bool = False

    @property
    def query(self) -> int:
        """Width of all queries together."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all keys together; with grouped queries less than `query`."""
        return self.kv_heads * self.head_dim

    def block(self) -> list[int]:
        """Elements of each parameter of one transformer block, in the model's order."""
        h, f, q, k = self.hidden, self.intermediate, self.query, self.key
        if self.family == "gpt2":
            return [h, h, 3 * h * h, 3 * h, h * h, h, h, h, h * f, f, f * h, h]
        if self.family == "gpt_neox":
            return [h, h, h, h, 3 * h * h, 3 * h, h * h, h, h * f, f, f * h, h]
        bias = [q, k, k] if self.qkv_bias else [0, 0, 0]
        attention = [q * h, bias[0], k * h, bias[1], k * h, bias[2], q * h]
        norms = [self.head_dim, self.head_dim] if self.qk_norm else []
        return [n for n in (*attention, *norms, h * f, h * f, f * h, h, h) if n]

    def parameters(self) -> list[int]:
        """Elements of each parameter, in the model's order."""
        h, norm = self.hidden, 1 if self.family == "llama" else 2
        embeddings = [self.vocabulary * h] + ([self.positions * h] if self.positions else [])
        head = [] if self.tied else [self.vocabulary * h]
        return [*embeddings, *self.layers * self.block(), *norm * [h], *head]

    @property
    def total(self) -> int:
        """Parameters; tied ones count once."""
        return sum(self.parameters())

    def is_matrix(self, numel: int) -> bool:
        """Whether a parameter of so many elements is a matrix (weight decay) and no bias or norm."""
        return numel > max(3 * self.hidden, self.intermediate, self.query)


def gpt2(layers: int, heads: int, hidden: int, vocabulary: int = 50257, positions: int = 1024) -> Architecture:
    """A GPT-2 of any size."""
    return Architecture(
        "gpt2", layers, hidden, heads, heads, hidden // heads, 4 * hidden, vocabulary, positions, positions, True, "gelu_new"
    )


def find_architecture(model: str) -> Architecture:
    """The architecture of one of GPT-2's sizes, of the embedded model, or of a config.json (the file, or its folder).

    Raises:
        UserError: no such file, or none that this planner knows.
    """
    if model == EMBEDDED_MODEL:
        return gpt2(*EMBEDDED_SHAPE, vocabulary=EMBEDDED_VOCABULARY, positions=512)
    if model in GPT2_SHAPES:
        return gpt2(*GPT2_SHAPES[model])
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        sizes = ", ".join((EMBEDDED_MODEL, *GPT2_SHAPES))
        raise UserError(f"--model {model}: {error.strerror}. Name one of {sizes}, a local model folder, or a config.json (of a "
                        "model on the hub: download that one file).") from error  # fmt: skip
    except ValueError as error:
        raise UserError(f"--model {model}: {path} is no JSON: {error}.") from error
    return read_architecture(config, str(path))


def read_architecture(config: dict, path: str) -> Architecture:
    """The architecture that a config.json describes; what it leaves out has transformers' defaults."""
    family = config.get("model_type")
    try:
        if family == "gpt2":
            return _read_gpt2(config)
        looks_like_llama = {"rms_norm_eps", "intermediate_size", "hidden_size", "num_hidden_layers"} <= config.keys()
        if family not in FAMILIES and not (looks_like_llama and "num_experts" not in json.dumps(config)):
            known = ", ".join(FAMILIES)
            raise UserError(f"--model {path} is a {family}: this planner knows {known} and what is built like them.")
        return _read_rotary(config, family)
    except (KeyError, TypeError) as error:
        raise UserError(f"--model {path}: this config.json lacks {error}.") from error


def _read_gpt2(config: dict) -> Architecture:
    hidden = config["n_embd"]
    return replace(
        gpt2(config["n_layer"], config["n_head"], hidden, config["vocab_size"], config["n_positions"]),
        intermediate=config.get("n_inner") or 4 * hidden, tied=config.get("tie_word_embeddings", True),
        activation=config.get("activation_function", "gelu_new"),
    )  # fmt: skip


def _read_rotary(config: dict, family: str) -> Architecture:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    neox = family == "gpt_neox"
    return Architecture(
        family="gpt_neox" if neox else "llama", layers=config["num_hidden_layers"], hidden=hidden, heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads, head_dim=config.get("head_dim") or hidden // heads,
        intermediate=config["intermediate_size"], vocabulary=config["vocab_size"], positions=0,
        limit=config.get("max_position_embeddings"), tied=config.get("tie_word_embeddings", False),
        activation=config.get("hidden_act", "gelu" if neox else "silu"),
        qkv_bias=neox or family == "qwen2" or config.get("attention_bias", False), qk_norm=family == "qwen3",
        parallel=neox and config.get("use_parallel_residual", True),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ the work


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
    """

    model: Architecture
    world_size: int
    batch_size: int = 4
    seq_length: int = 512
    precision: str = "bf16"
    gradient_checkpointing: bool = False
    accumulation: int = 1
    device: str = "cuda"

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return self.batch_size * self.seq_length

    @property
    def item(self) -> int:
        """Bytes of a number that is computed with."""
        return 4 if self.precision == "fp32" else 2

    def autocast(self, strategy: str) -> bool:
        """Whether weights are fp32 and arithmetic 16 bit: dp always, fsdp for fp16; DeepSpeed and FSDP2 convert the weights."""
        return self.precision != "fp32" and (strategy == "dp" or (strategy == "fsdp" and self.precision == "fp16"))


def saved_by_block(work: Work, autocast: bool) -> int:
    """Bytes that autograd keeps of one transformer block for its backward pass, attention by a fused kernel (SDPA).

    Each term is a tensor that some operation saves; what two operations save is counted once.
    """
    m, c = work.model, work.item
    h, f = m.hidden, m.intermediate
    stream = 4 if autocast else c  # the residual stream, fp32 under autocast
    attention = c * (2 * m.query + 2 * m.key) + 4 * m.heads  # query, key, value, output; the kernel's log-sum-exp in fp32
    if m.family == "llama":
        # RMSNorm computes in fp32: its input there, the normalised one, its output (under autocast a 16-bit copy for each
        # linear layer that reads it).
        if autocast:
            norms = 2 * (4 + 4) * h + c * (3 + 2) * h
        else:
            norms = 2 * (4 + 2 * c) * h
        if m.qk_norm:
            norms += (4 + c) * (m.query + m.key)
        mlp = 4 * c * f  # gate, its activation, up, their product
    else:
        norms = stream * h * (1 if m.parallel else 2) + 2 * c * h  # inputs (parallel: one for both) and outputs
        if m.family == "gpt_neox":
            # Query and key are rotated copies, the joint projection stays because the value is a part of it, and the output is
            # copied into the layout of the next layer.
            attention += c * 3 * h
        mlp = 2 * c * f + _saved_by_activation(work, autocast)
    return work.tokens * (norms + attention + mlp)


def _saved_by_activation(work: Work, autocast: bool) -> int:
    """Bytes a token beyond the activation's input and output; transformers writes GPT-2's gelu_new out in four operations."""
    if work.model.activation != "gelu_new":
        return 0
    if autocast and work.device == "cuda":  # there autocast takes powers in fp32, and what follows is fp32, too
        return (3 * 4 + work.item) * work.model.intermediate
    return 3 * work.item * work.model.intermediate


def activation_bytes(work: Work, strategy: str) -> int:
    """Bytes that autograd holds at the end of a forward pass, without the logits; dropout is not counted.

    Under autocast the 16-bit copies of the weights are among them.
    """
    m, c, autocast = work.model, work.item, work.autocast(strategy)
    stream = 4 if autocast else c
    if work.gradient_checkpointing:
        blocks = m.layers * work.tokens * stream * m.hidden
    else:
        blocks = m.layers * saved_by_block(work, autocast)
    if m.family == "llama":
        final_norm = (8 + c if autocast else 4 + 2 * c) * m.hidden
    else:
        final_norm = (stream + c) * m.hidden
    head = m.vocabulary * m.hidden
    in_blocks = 0 if work.gradient_checkpointing else m.layers * sum(n for n in m.block() if m.is_matrix(n))
    copies = c * (in_blocks + head) if autocast else 0
    return blocks + work.tokens * final_norm + copies


def logits_bytes(work: Work) -> int:
    """Bytes that the loss keeps: the logarithms of the probabilities, in fp32."""
    return 4 * work.tokens * work.model.vocabulary


# ------------------------------------------------------------------------------------------------ a strategy


@dataclass(frozen=True)
class Need:
    """What one strategy needs; bytes of rank 0, which never holds less than another.

    Attributes:
        parameters, gradients, optimizer: model states on the GPU at the end of backward.
        buffers: communication buckets and staging buffers that stay.
        activations, logits: held at the end of forward.
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
        """What must fit the memory of the device: on a CPU the host's, with what a GPU would not hold."""
        if self.device == "cuda":
            return self.peak + CUDA_CONTEXT
        return int(CPU_SLACK * (self.peak + self.host)) + CPU_LIBRARIES

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer states on the GPU."""
        return self.parameters + self.gradients + self.optimizer


def predict(work: Work, strategy: str) -> Need:
    """Bytes of each kind for one strategy."""
    m, c, n = work.model, work.item, work.world_size
    sizes = m.parameters()
    total, largest = sum(sizes), max(sizes)
    parts = sum(-(-size // n) for size in sizes)  # a rank's part of every parameter, filled up to a whole element
    buckets = bucket_sizes(m.hidden, total, False)
    bucket, persistent = c * buckets["reduce_bucket_size"], _persistent(sizes, buckets)
    active, logits = activation_bytes(work, strategy), logits_bytes(work)
    host = nvme = buffers = in_backward = gathered = 0
    if strategy == "dp":
        parameters, gradients, optimizer = 4 * total, 4 * total, 8 * total
        copies = 2 * 4 * largest if m.tied else 4 * largest  # the embedding's gradient, from its two uses
        update = 8 * min(largest, NORM_CHUNK)
        steady = parameters + optimizer + (gradients if n > 1 or work.accumulation > 1 else 0)  # DDP's buckets stay
        at_end = steady + (0 if n > 1 else gradients) + copies
        sent = 2 * 4 * total
    elif strategy in ("zero1", "zero2", "offload"):
        share = _partition(m, sizes, n)
        parameters = c * total
        on_host = strategy == "offload"
        gradients = 0 if on_host else c * _kept_gradients(m, sizes, n)
        optimizer = 0 if on_host else MASTER_AND_MOMENTS * share
        between = gradients if work.accumulation > 1 else 0  # of the micro-batches before
        if on_host:  # fp32 gradients, a 16-bit copy for the way back, and staging for the largest gradient on both sides
            host = (MASTER_AND_MOMENTS + 4 + c) * share + c * largest
            buffers = c * largest
        in_backward = 2 * bucket
        steady = parameters + optimizer + buffers + between
        at_end = steady - between + in_backward + gradients + 3 * c * largest
        update = 0 if on_host else max(8 * min(largest, share), (4 + c) * share)
        sent = 3 * c * total
    elif strategy in ("zero3", "infinity"):
        nvme_too = strategy == "infinity"
        # Infinity keeps on the GPU only what every rank has whole.
        kept = sum(-(-size // n) for size in persistent) + sum(persistent)
        parameters = c * (kept if nvme_too else parts + sum(persistent))
        gradients = 0 if nvme_too else c * parts
        optimizer = 0 if nvme_too else MASTER_AND_MOMENTS * parts
        buffers = bucket
        gathered = c * (largest + min(2 * buckets["reduce_bucket_size"], total - largest))
        steady = parameters + gradients + optimizer + buffers
        at_end = steady + gathered + 4 * c * largest
        update = 0 if nvme_too else (4 if c < 4 else 0) * parts + 8 * largest // n
        if nvme_too:
            nvme = (MASTER_AND_MOMENTS + 4 + c) * parts
            # buffers of ds_config_infinity.json: 5 for parameters, 4 for a sub-group's states, and the gradients
            host = c * 5 * (largest // n + 4096) + 4 * 4 * min(parts, buckets["sub_group_size"]) + c * parts
        sent = 3 * c * total
    else:
        parameters, gradients, optimizer = 4 * parts, 4 * parts, 8 * parts
        block = sum(m.block())
        outside = total - m.layers * block
        gathered = c * outside
        steady = parameters + optimizer + (4 * total if work.accumulation > 1 else 0)  # whole until the last micro-batch
        at_end = steady + gradients + (2 * c + 4) * outside + 4 * outside // n
        update = gradients + 8 * min(largest // n, NORM_CHUNK)
        in_backward = 2 * c * block
        sent = (2 * c + 4) * total
    # Where the loss is derived: log-probabilities, their gradient and the logits' gradient, all in fp32. Then the output layer,
    # with its gradient and DeepSpeed's buckets.
    loss, output_layer = active + 3 * logits, active + c * logits // 4 + c * largest
    block = saved_by_block(work, work.autocast(strategy)) if work.gradient_checkpointing else 0
    working = max(loss, in_backward + output_layer, in_backward + active + block)
    peak = max(steady + gathered + working, at_end, steady + update)
    sent = sent * (n - 1) // n
    return Need(strategy, parameters, gradients, optimizer, buffers, active, logits, peak, host, nvme, sent, work.device)


NORM_CHUNK = 2**24  # elements that the gradient's norm takes at a time, in fp64


def _persistent(sizes: list[int], buckets: dict[str, int]) -> list[int]:
    """Parameters that stage 3 leaves whole on every rank."""
    return [size for size in sizes if size <= buckets["stage3_param_persistence_threshold"]]


def _groups(model: Architecture, sizes: list[int]) -> list[list[int]]:
    """Matrices and the rest: DeepSpeed flattens each parameter group by itself."""
    return [[s for s in sizes if model.is_matrix(s)], [s for s in sizes if not model.is_matrix(s)]]


def _partition(model: Architecture, sizes: list[int], n: int) -> int:
    """Elements of a rank's part of all groups, each filled up to a multiple of 2N."""
    return sum(math.ceil(sum(group) / (2 * n)) * 2 for group in _groups(model, sizes))


def _kept_gradients(model: Architecture, sizes: list[int], n: int) -> int:
    """Elements of the gradients that rank 0 keeps under stages 1 and 2: whole parameters, until they cover its part."""
    kept = 0
    for group in _groups(model, sizes):
        share, covered = math.ceil(sum(group) / (2 * n)) * 2, 0
        for size in group:
            if covered >= share:
                break
            covered += size
        kept += covered
    return kept


def predict_all(work: Work) -> list[Need]:
    """All strategies."""
    return [predict(work, strategy) for strategy in STRATEGIES]


# ------------------------------------------------------------------------------------------------ what fits


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

    def hold(self, need: Need) -> bool:
        """Whether a strategy's need fits."""
        share = {"host": need.host * self.ranks_per_node, "nvme": need.nvme * self.ranks_per_node}
        on_gpu = self.gpu is None or need.total <= self.gpu
        return on_gpu and all(getattr(self, name) is None or size <= getattr(self, name) for name, size in share.items())


# The order in which to try: the first that fits is the simplest and, as a rule, the fastest.
PREFERENCE = ("dp", "zero1", "zero2", "fsdp", "zero3", "offload", "infinity")


def recommend(work: Work, limits: Limits) -> Need | None:
    """The first strategy of PREFERENCE that fits; None if none does."""
    return next((need for need in (predict(work, strategy) for strategy in PREFERENCE) if limits.hold(need)), None)


def _largest(fits, start: int, most: int) -> int:
    """The largest number up to `most` for which `fits` is true, it being true for all smaller ones; 0 if not even for start."""
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
    return _largest(lambda size: limits.hold(predict(replace(work, batch_size=size), strategy)), 1, 65536)


def fewest_gpus(work: Work, strategy: str, limits: Limits) -> int | None:
    """GPUs that the model needs at this batch on each; None if 4,096 are not enough."""
    for number in (*range(1, 65), *(2**power for power in range(7, 13))):
        ranks = min(limits.ranks_per_node, number)
        if replace(limits, ranks_per_node=ranks).hold(predict(replace(work, world_size=number), strategy)):
            return number
    return None


def gpt2_of_width(hidden: int, like: Architecture) -> Architecture:
    """A model of GPT-2's shape: as many layers for its width as GPT-2's four sizes have (12 at 768, 48 at 1600), and on."""
    layers = max(1, round(12 + (hidden - 768) * (48 - 12) / (1600 - 768))) if hidden >= 768 else max(1, hidden // 64)
    return gpt2(layers, hidden // 64, hidden, like.vocabulary if like.family == "gpt2" else 50257, like.positions or 1024)


def largest_gpt2(work: Work, strategy: str, limits: Limits) -> Architecture | None:
    """The largest model of GPT-2's shape that fits, its width a multiple of 64."""
    width = _largest(
        lambda k: limits.hold(predict(replace(work, model=gpt2_of_width(64 * k, work.model)), strategy)), 1, 1024
    )
    return gpt2_of_width(64 * width, work.model) if width else None


@dataclass(frozen=True)
class Way:
    """One change that would make a run fit: the flags that make it, and what the run then needs."""

    flags: str
    need: Need


def ways_to_fit(work: Work, strategy: str, limits: Limits) -> list[Way]:
    """What to change when `strategy` does not fit, the least change first: only what fits.

    Another strategy at the same batch; a smaller micro-batch with as many more of them; checkpointing; shorter blocks.
    """
    ways = []
    heavier = predict(work, strategy).total
    for other in PREFERENCE:
        need = predict(work, other)
        if other != strategy and need.total < 0.98 * heavier and limits.hold(need):
            ways.append(Way(f"--strategy {other}", need))
    if 0 < (fitting := largest_batch(work, strategy, limits)) < work.batch_size:
        smaller = max(size for size in range(1, fitting + 1) if work.batch_size % size == 0)
        steps = work.accumulation * work.batch_size // smaller
        need = predict(replace(work, batch_size=smaller, accumulation=steps), strategy)
        ways.append(Way(f"--batch_size {smaller} --gradient_accumulation_steps {steps}", need))
    if not work.gradient_checkpointing:
        need = predict(replace(work, gradient_checkpointing=True), strategy)
        ways += [Way("--gradient_checkpointing", need)] if limits.hold(need) else []
    if work.seq_length >= 64:
        need = predict(replace(work, seq_length=work.seq_length // 2), strategy)
        ways += [Way(f"--seq_length {work.seq_length // 2}", need)] if limits.hold(need) else []
    return ways


def describe_ways(work: Work, strategy: str, limits: Limits) -> list[str]:
    """Lines of advice with numbers, for a run that did not fit."""
    needed, there = predict(work, strategy), f" of {limits.gpu / GB:.1f}" if limits.gpu else ""
    lines = [f"Planned for {strategy}: {needed.total / GB:.1f}{there} GB. It would fit with one of:"]
    ways = ways_to_fit(work, strategy, limits)
    lines += [f"  {way.flags}: {way.need.total / GB:.1f}{there} GB" for way in ways]
    if not ways:
        lines = [f"Planned for {strategy}: {needed.total / GB:.1f}{there} GB. No single change makes it fit: see "
                 "scripts/plan_memory.py --solve gpus, and --solve model."]  # fmt: skip
    return lines
