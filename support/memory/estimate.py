"""Memory estimate of a run before it starts: bytes on each GPU, in host memory and on NVMe.

It is a list of terms (name, bytes, phases) for each strategy, computed from a model's config.json
without PyTorch. The peak is the largest sum of the terms of one phase. Tests compare it with live
tensors in real and simulated runs.

Sources. Model states: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 3, with the dtypes that
PyTorch and DeepSpeed 0.19 use. Buffers: DeepSpeed's runtime/zero/stage_1_and_2.py and stage3.py.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from support.cli.buckets import bucket_sizes
from support.memory import activations
from support.memory.activations import BACKWARD, END, LOSS, STEP, UPDATE, Term
from support.memory.workload import Workload
from support.tables import STRATEGIES
from support.units import GB, HOPPER, KB, MB

# Allowances, not measured: for the CUDA context, cuBLAS and NCCL, and for fragmentation.
CUDA_CONTEXT, GPU_SLACK = 1 * GB, 1.05
# On a CPU: resident memory of Python and the libraries (and of DeepSpeed), and the ratio of glibc's
# heap, which keeps freed memory, to the live tensors. Measured with torch 2.13, see docs/PLAN.md.
CPU_LIBRARIES, DEEPSPEED_LIBRARIES, CPU_SLACK = 410 * MB, 70 * MB, 1.2
HOST, NVME = ("host",), ("nvme",)


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory estimate of one strategy, in bytes of one rank."""

    strategy: str
    # Model states on the GPU at the end of backward.
    parameters: int
    gradients: int
    optimizer: int
    buffers: int  # persistent communication buckets and staging buffers
    # Held at the end of forward; `logits` is what the loss keeps.
    activations: int
    logits: int
    peak: int  # the maximum over a step, temporary tensors included
    host: int  # in host memory, for this rank
    nvme: int  # on disk, for this rank
    sent: int  # bytes that this rank sends per step
    device: str  # "cuda" or "cpu"
    terms: tuple[Term, ...]  # of which the peak, `host` and `nvme` are sums

    @property
    def total(self) -> int:
        """Bytes that must fit the memory of the device; on a CPU they include `host`."""
        if self.device == "cuda":
            return int(GPU_SLACK * self.peak) + CUDA_CONTEXT
        deepspeed = DEEPSPEED_LIBRARIES if STRATEGIES[self.strategy].uses_deepspeed else 0
        return int(CPU_SLACK * (self.peak + self.host)) + CPU_LIBRARIES + deepspeed

    def sizes(self) -> dict[str, int]:
        """Return the bytes by kind."""
        return {name: size for name, size in vars(self).items() if isinstance(size, int)}

    def at(self, phase: str) -> int:
        """Return the sum of the terms of a phase."""
        return sum_of(self.terms, phase)

    def phase_of_peak(self) -> str:
        """Return the phase of STEP that has the peak."""
        return max(STEP, key=self.at)


def sum_of(terms: Iterable[Term], phase: str) -> int:
    """Return the sum of the terms of a phase."""
    return sum(term.size for term in terms if phase in term.phases)


def predict(work: Workload, strategy: str) -> MemoryEstimate:
    """Return the memory estimate of one of STRATEGIES."""
    row = STRATEGIES[strategy]
    if row.engine == "ddp":
        states, sent = _dp(work)
    elif row.engine == "fsdp":
        states, sent = _fsdp(work, strategy)
    elif row.stage == 3:
        states, sent = _stage3(work, row.uses_nvme)
    else:
        states, sent = _stages12(work, row.stage, row.offloads)
    saved = activations.activation_terms(work, strategy)
    libraries = Term("cuBLAS workspaces", _cublas(work), STEP)
    dequantized = Term("weight converted from 4 bits", work.dequantized, (BACKWARD,))
    terms = [*states, *saved, *activations.loss_terms(work, strategy), dequantized, libraries]
    on_device = {term.name: term.size for term in states if set(term.phases) & set(STEP)}
    return MemoryEstimate(
        strategy=strategy,
        parameters=on_device["parameters"],
        gradients=on_device.get("gradients", 0),
        optimizer=on_device.get("optimizer states", 0),
        buffers=on_device.get("communication buffers", 0),
        activations=sum_of(saved, LOSS),
        logits=activations.kept_by_loss(work, strategy),
        peak=max(sum_of(terms, phase) for phase in STEP),
        host=sum_of(terms, "host"),
        nvme=sum_of(terms, "nvme"),
        sent=sent * (work.world_size - 1) // work.world_size,
        device=work.device,
        terms=tuple(term for term in terms if term.size),
    )


def predict_all(work: Workload) -> list[MemoryEstimate]:
    """Return the memory estimates of all strategies that support the workload."""
    return [predict(work, strategy) for strategy in work.strategies]


# Each of these functions returns the terms of a strategy without activations and loss, and the
# bytes that a rank sends per step, before the factor (N - 1) / N for N ranks.


def _dp(work: Workload) -> tuple[list[Term], int]:
    """Estimate DDP: all states whole, in fp32, and frozen weights in the dtype of computations."""
    trained, largest = sum(work.trained), max(work.trained)
    several = work.world_size > 1
    # DDP's buckets, or gradients that accumulate, persist between steps.
    persistent = several or work.accumulation > 1
    # Each use of a tied embedding has its own gradient, and their sum is a third tensor. Without
    # buckets the sum becomes the gradient.
    uses = 2 + persistent if work.model.tied and not work.lora else 1
    # Between micro-batches the gradients are not yet in DDP's buckets: zero_grad() has removed the
    # views of the buckets.
    accumulated = 4 * trained if several and work.accumulation > 1 else 0
    return [
        Term("parameters", 4 * trained + work.frozen_bytes, STEP),
        Term("optimizer states", work.optimizer_states(work.trained), STEP),
        Term("gradients", 4 * trained, STEP if persistent else (END, UPDATE)),
        Term("gradients of the embedding", uses * 4 * largest, (END,)),
        Term("optimizer's temporaries", _temporaries(work) * largest, (UPDATE,)),
        Term("accumulated gradients", accumulated, STEP),
    ], 2 * 4 * trained


def _stages12(work: Workload, stage: int, offload: bool) -> tuple[list[Term], int]:
    """Estimate zero1, zero2 and offload: a flat working copy, this rank's masters and moments."""
    m, c = work.model, work.item
    trained, largest = sum(work.trained), max(work.trained)
    shares = [_share(group, work) for group in _groups(work)]
    share, accumulates = sum(shares), work.accumulation > 1
    gradients = 0 if offload else c * _kept_gradients(work)
    # Two buckets if reductions overlap with computation (overlap_comm).
    buckets = 2 if offload or work.world_size > 1 else 1
    bucket = c * bucket_sizes(m.hidden, sum(work.sizes), False)["reduce_bucket_size"]
    uses = (3 if m.tied else 2) + (c == 4)  # the last gradient's parts (see _dp) and copies
    # Stage 1 keeps all gradients until those of the last micro-batch are reduced.
    whole = c * trained - gradients if accumulates and stage == 1 else 0
    terms = [
        Term("parameters", c * trained + work.frozen_bytes, STEP),
        Term("buckets of gradients", buckets * bucket, (BACKWARD, END)),
        Term("gradients of the embedding", uses * c * largest, (END,)),
        Term("other reduced gradients", max(0, gradients - c * largest), (END,)),
        Term("other gradients", whole, STEP),
    ]
    if offload:
        # Staging buffer for the largest gradient, with a counterpart in host memory.
        terms.append(Term("communication buffers", c * largest, STEP))
        # In backward: stage_1_and_2.py, set_norm_for_param_grad_in_gpu.
        terms.append(Term("largest gradient in fp64", 8 * min(largest, share), (END,)))
        terms += _host_of_offload(work, shares)
    else:
        # The norm of one gradient is computed in fp64, before the fp32 gradients exist.
        norm, copies = 8 * min(largest, share), (4 + c if c < 4 else 4) * share
        name = "fp32 gradients, new weights" if c < 4 else "copy of the gradients"
        terms += [
            # fp32 masters and the optimizer's states (K bytes per parameter in ZeRO's terms).
            Term("optimizer states", 4 * share + work.optimizer_states(shares), STEP),
            Term("gradients", gradients, STEP if accumulates else (UPDATE,)),
            Term(name, max(norm, copies), (UPDATE,)),
            Term("optimizer's temporaries", _temporaries(work) * share, (UPDATE,)),
        ]
    reductions = 1 if stage == 1 else work.accumulation
    return terms, (2 * reductions + 1) * c * trained


def _host_of_offload(work: Workload, shares: list[int]) -> list[Term]:
    """Return what DeepSpeed keeps in host memory: page-locked, except the moments of CPU Adam."""
    c = work.item
    fp32, copies = (_page_locked(work, [size * share for share in shares]) for size in (4, c))
    accumulated = work.trained if work.accumulation > 1 else []  # one tensor per parameter
    return [
        Term("fp32 weights", fp32, HOST),
        Term("fp32 gradients", fp32, HOST),
        Term("weights to copy to the GPU", copies, HOST),
        Term("moments", work.optimizer_states(shares), HOST),
        Term("largest gradient", _page_locked(work, [c * max(work.trained)]), HOST),
        Term("accumulated gradients", _page_locked(work, [c * size for size in accumulated]), HOST),
    ]


def _page_locked(work: Workload, sizes: list[int]) -> int:
    """Return the bytes of host memory that page-locked tensors of these sizes (in bytes) use.

    With CUDA, PyTorch rounds each of them up to a power of two and returns no memory to the system
    (ATen/core/CachingHostAllocator.h, allocate). On a CPU nothing is page-locked.
    """
    if work.device != "cuda":
        return sum(sizes)
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def _stage3(work: Workload, swaps: bool) -> tuple[list[Term], int]:
    """Estimate zero3 and infinity: a shard of every parameter, gathered while it is used."""
    c, n, sizes = work.item, work.world_size, work.sizes
    total, largest, largest_trained = sum(sizes), max(sizes), max(work.trained)
    shards, trained = _parts(sizes, n), _parts(work.trained, n)
    buckets = bucket_sizes(work.model.hidden, total, False)
    bucket, sub_group = buckets["reduce_bucket_size"], min(trained, buckets["sub_group_size"])
    threshold = buckets["stage3_param_persistence_threshold"]
    persistent = [size for size in sizes if size <= threshold]
    # Infinity keeps only the persistent parameters on the GPU, which every rank has whole. A single
    # rank has them once, as its shard.
    kept = _parts(persistent, n) if swaps else shards
    whole = sum(persistent) if n > 1 else 0
    masters_and_states = 4 * trained + work.optimizer_states([trained])
    gathers = n > 1 or swaps
    gathered = c * (largest + min(2 * bucket, total - largest)) if gathers else 0
    uses = 2 if work.model.tied else 1
    terms = [
        Term("parameters", c * (kept + whole), STEP),
        Term("communication buffers", c * bucket, STEP),
        Term("gathered parameters", gathered, (LOSS, BACKWARD)),
        # At the end of backward the embedding is whole, and so is the largest matrix of a block.
        Term("gathered embedding", c * largest if gathers else 0, (END,)),
        Term("gradients of the embedding", uses * c * largest_trained, (END,)),
        Term("gathered matrix of a block", c * max(work.model.block()), (END,)),
    ]
    if swaps:
        terms += _offloaded_to_nvme(work, c * shards, masters_and_states)
    else:
        # The norm of one gradient in fp64, or the fp32 copies of a sub-group.
        copies = max(8 * largest_trained // n, (4 + (c if c < 4 else 0)) * sub_group)
        terms += [
            Term("optimizer states", masters_and_states, STEP),
            Term("gradients", c * trained, STEP),
            Term("fp32 copies of a sub-group", copies, (UPDATE,)),
            Term("optimizer's temporaries", _temporaries(work) * sub_group, (UPDATE,)),
        ]
    return terms, c * (2 * total + sum(work.trained)) * work.accumulation


def _offloaded_to_nvme(work: Workload, parameters: int, masters_and_states: int) -> list[Term]:
    """Return what infinity adds to stage 3.

    Args:
        parameters: bytes of this rank's shards.
        masters_and_states: bytes of their fp32 copies and of the optimizer states.
    """
    c, n, largest, largest_trained = work.item, work.world_size, max(work.sizes), max(work.trained)
    trained, total = _parts(work.trained, n), sum(work.sizes)
    sub_group = min(trained, bucket_sizes(work.model.hidden, total, False)["sub_group_size"])
    # In backward the norm of a gradient is computed in fp64, in parts (stage3.py,
    # _offload_grad_partition_at_boundary and _constant_buffered_norm2).
    part = min(-(-largest_trained // n), 250_000_000)
    # ds_config_infinity.json: 5 buffers for parameters and 4 for the states of a sub-group, which
    # DeepSpeed page-locks without rounding (csrc/pin_memory/deepspeed_pin_tensor.cpp); and the
    # gradients, in one tensor that PyTorch page-locks.
    return [
        Term("largest gradient in fp64", 8 * part, (END,)),
        Term("5 buffers for parameters", c * 5 * (largest // n + 4096), HOST),
        Term("4 buffers for states", 4 * 4 * sub_group, HOST),
        Term("gradients", _page_locked(work, [c * trained]), HOST),
        Term("fp32 weights, moments", masters_and_states, NVME),
        Term("fp32 gradients", 4 * trained, NVME),
        Term("parameters", parameters, NVME),
    ]


def _fsdp(work: Workload, strategy: str) -> tuple[list[Term], int]:
    """Estimate FSDP2: sharded states; blocks are gathered one by one, the rest for a whole pass."""
    m, n, lora = work.model, work.world_size, work.lora
    # Bytes per gathered element. In fp16 parameters are gathered in fp32, because autocast is used.
    c = work.stream(strategy)
    trained, block = _parts(work.trained, n), sum(m.block())
    outside = m.total - m.layers * block
    of_block = c * (block + (sum(lora.of_block(m)) if lora else 0))
    gathered = 0 if n == 1 and c == 4 else c * outside
    # The gradient of the parameters outside of blocks is whole at the end of backward (three
    # tensors for a tied embedding, see _dp), and in 16 bit so is its fp32 copy for the reduction.
    whole = 0 if lora else max(3 * c if m.tied else 0, c + (4 if c < 4 else 0)) * outside
    reduced = trained if lora else trained - outside // n
    # Gradients are not sharded until the last micro-batch.
    accumulated = 4 * sum(work.trained) if work.accumulation > 1 else 0
    return [
        Term("parameters", 4 * trained + work.item * _parts(work.frozen, n), STEP),
        Term("optimizer states", work.optimizer_states([trained]), STEP),
        Term("gradients", 4 * trained, (UPDATE,)),
        Term("gathered outside of blocks", gathered, (LOSS, BACKWARD, END)),
        Term("a gathered block", of_block, (BACKWARD, END)),
        Term("reduced gradients", 4 * reduced, (END,)),
        Term("gradients outside of blocks", whole, (END,)),
        Term("gradients of a block", 0 if lora else of_block, (BACKWARD, END)),
        Term("accumulated gradients", accumulated, STEP),
    ], 2 * c * work.accumulation * sum(work.sizes) + 4 * sum(work.trained)


def _cublas(work: Workload) -> int:
    """Return the bytes of cuBLAS's workspaces, which PyTorch's allocator holds.

    One for each handle and stream: of the main thread, and of autograd's thread
    (ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize).
    """
    if work.device != "cuda":
        return 0
    return 2 * (32 * MB if work.capability >= HOPPER else 8 * MB + 128 * KB)


def _temporaries(work: Workload) -> int:
    """Return the temporary bytes per element while an optimizer updates a tensor.

    Adafactor needs two fp32 tensors; bitsandbytes on a CPU five, on CUDA none.
    """
    if work.optimizer == "adafactor":
        return 8
    return 20 if work.optimizer == "adamw_8bit" and work.device == "cpu" else 0


def _parts(sizes: list[int], n: int) -> int:
    """Return the elements of one rank's shards of parameters, each divided by n and rounded up."""
    return sum(-(-size // n) for size in sizes)


def _groups(work: Workload) -> list[list[int]]:
    """Return the sizes in each parameter group: matrices (also adapters), and the rest."""
    if work.lora:
        return [work.trained]
    is_matrix = work.model.is_matrix
    return [[size for size in work.trained if is_matrix(size) == kind] for kind in (True, False)]


def _share(group: list[int], work: Workload) -> int:
    """Return the elements of a rank's part of a group, which is padded to a multiple of 2N."""
    return math.ceil(sum(group) / (2 * work.world_size)) * 2


def _kept_gradients(work: Workload) -> int:
    """Return the elements of the gradients that a rank keeps under stages 1 and 2.

    A gradient is kept whole if the rank's part contains any of its elements.
    """
    kept = [0] * work.world_size
    for group in _groups(work):
        share, start = _share(group, work), 0
        for size in group:
            last = min((start + size - 1) // share, work.world_size - 1)
            for rank in range(start // share, last + 1):
                kept[rank] += size
            start += size
    return max(kept) if work.rank is None else kept[work.rank]
