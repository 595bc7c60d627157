"""Memory estimate of a run before it starts: bytes on each GPU, in host memory and on NVMe.

The estimate is computed from the numbers in a model's config.json, for each strategy. It needs no
PyTorch, no weights and no GPU. The tests compare it with measurements: live tensors by category
(support/memory/live.py) in a real run and in a simulated one (--simulate_gpus).

Sources. Model states: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 3, with the dtypes that
PyTorch and DeepSpeed 0.19 use. Buffers: DeepSpeed's runtime/zero/stage_1_and_2.py and stage3.py.
Activations and loss: support/memory/activations.py.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from support.cli.ds_config import bucket_sizes
from support.memory.activations import (
    activation_bytes,
    gradients_of_head,
    kept_by_loss,
    peak_of_loss,
    saved_by_block,
)
from support.memory.workload import Workload
from support.strategy import STRATEGIES
from support.units import GB

# Allowances, not measured: for memory outside of tensors (the CUDA context, cuBLAS workspaces,
# NCCL), and for fragmentation.
CUDA_CONTEXT, GPU_SLACK = 1 * GB, 1.05

# On a CPU: resident memory of Python and the libraries, and the ratio of glibc's heap to the live
# tensors (tiny-gpt2, fp32, 64 sequences of 512 tokens, torch 2.13: 6.7 GB resident for 5.1 GB of
# live tensors).
CPU_LIBRARIES, CPU_SLACK = GB // 2, 1.3


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory estimate of one strategy, in bytes of one rank."""

    strategy: str
    # Model states on the GPU at the end of backward.
    parameters: int
    gradients: int
    optimizer: int
    buffers: int  # persistent communication buckets and staging buffers
    # Held at the end of forward; `logits` are the gradients that the loss keeps.
    activations: int
    logits: int
    peak: int  # the maximum over a step, temporary tensors included
    host: int  # in host memory, for this rank
    nvme: int  # on disk, for this rank
    sent: int  # bytes that this rank sends per step
    device: str  # "cuda" or "cpu"

    @property
    def total(self) -> int:
        """Bytes that must fit the memory of the device.

        On a CPU that is host memory, and the total includes `host`.
        """
        if self.device == "cuda":
            return int(GPU_SLACK * self.peak) + CUDA_CONTEXT
        return int(CPU_SLACK * (self.peak + self.host)) + CPU_LIBRARIES

    def sizes(self) -> dict[str, int]:
        """Return the bytes by kind."""
        return {name: size for name, size in asdict(self).items() if isinstance(size, int)}


@dataclass(frozen=True)
class _States:
    """Memory that a strategy needs in addition to activations and logits, in bytes of one rank.

    The names that MemoryEstimate has, too, mean the same.
    """

    parameters: int
    gradients: int
    optimizer: int
    steady: int  # held during the whole forward pass
    # Total at the end of backward, when activations are freed and the embedding's gradients are
    # computed.
    at_end: int
    update: int  # in addition to `steady`, while weights are updated
    sent: int  # as in MemoryEstimate, before the factor (N - 1) / N for N ranks
    buffers: int = 0
    # In addition to `steady`, from forward on, and during backward.
    gathered: int = 0
    in_backward: int = 0
    host: int = 0
    nvme: int = 0


def predict(work: Workload, strategy: str) -> MemoryEstimate:
    """Return the memory estimate of one of STRATEGIES."""
    row = STRATEGIES[strategy]
    if row.engine == "ddp":
        states = _dp(work)
    elif row.engine == "fsdp":
        states = _fsdp(work, strategy)
    elif row.stage == 3:
        states = _stage3(work, row.uses_nvme)
    else:
        states = _stages12(work, row.stage, row.offloads)
    activations = activation_bytes(work, strategy)
    recomputed = saved_by_block(work, strategy) if work.gradient_checkpointing else 0
    in_backward = gradients_of_head(work, strategy) + states.in_backward + recomputed
    working = activations + max(peak_of_loss(work, strategy), in_backward + work.dequantized)
    same = ("parameters", "gradients", "optimizer", "buffers", "host", "nvme")
    return MemoryEstimate(
        strategy=strategy,
        **{name: getattr(states, name) for name in same},
        activations=activations,
        logits=kept_by_loss(work, strategy),
        peak=max(
            states.steady + states.gathered + working, states.at_end, states.steady + states.update
        ),
        sent=states.sent * (work.world_size - 1) // work.world_size,
        device=work.device,
    )


def predict_all(work: Workload) -> list[MemoryEstimate]:
    """Return the memory estimates of all strategies that support the workload."""
    return [predict(work, strategy) for strategy in work.strategies]


def _dp(work: Workload) -> _States:
    """Estimate DDP: all states whole, in fp32, and frozen weights in the dtype of computations.

    Gradient buckets persist between steps.
    """
    trained = sum(work.trained)
    parameters = 4 * trained + work.frozen_bytes
    largest = max(work.trained)
    optimizer = work.optimizer_states(work.trained)
    states = parameters + 4 * trained + optimizer
    persistent = work.world_size > 1 or work.accumulation > 1
    # Between micro-batches the gradients are not yet in DDP's buckets: zero_grad() has removed the
    # views of the buckets.
    if work.world_size > 1 and work.accumulation > 1:
        states += 4 * trained
    # Each use of a tied embedding has its own gradient, and their sum is a third tensor. Without
    # buckets the sum becomes the gradient.
    uses = 2 + persistent if work.model.tied and not work.lora else 1
    return _States(
        parameters,
        4 * trained,
        optimizer,
        steady=states if persistent else states - 4 * trained,
        at_end=states + uses * 4 * largest,
        update=(0 if persistent else 4 * trained) + _temporaries(work) * largest,
        sent=2 * 4 * trained,
    )


def _stages12(work: Workload, stage: int, offload: bool) -> _States:
    """Estimate zero1, zero2 and offload: a flat working copy, this rank's masters and moments."""
    m, c = work.model, work.item
    total, trained = sum(work.sizes), sum(work.trained)
    shares = [_share(group, work) for group in _groups(work)]
    largest, share = max(work.trained), sum(shares)
    # fp32 masters and the optimizer's states (K bytes per parameter in ZeRO's terms).
    optimizer = 0 if offload else 4 * share + work.optimizer_states(shares)
    parameters = c * trained + work.frozen_bytes
    gradients = 0 if offload else c * _kept_gradients(work)
    # Gradients of earlier micro-batches. Stage 1 keeps them whole until it reduces the last one's.
    accumulated = 0
    if work.accumulation > 1:
        accumulated = c * trained if stage == 1 else gradients
    # Staging buffer for the largest gradient, with a counterpart in host memory.
    buffers = c * largest if offload else 0
    steady = parameters + optimizer + buffers + accumulated
    # Two buckets if reductions overlap with computation (overlap_comm).
    buckets = 2 if offload or work.world_size > 1 else 1
    in_backward = buckets * c * bucket_sizes(m.hidden, total, False)["reduce_bucket_size"]
    uses = (3 if m.tied else 2) + (c == 4)  # the last gradient's parts (see _dp) and copies
    last_gradient = uses * c * largest + max(0, gradients - c * largest)
    # fp32 gradients, and in 16 bit the new working copy; or the norm of one gradient in fp64.
    copies = 4 + c if c < 4 else 4
    update = (0 if accumulated else gradients) + max(8 * min(largest, share), copies * share)
    update += _temporaries(work) * share
    reductions = 1 if stage == 1 else work.accumulation
    return _States(
        parameters,
        gradients,
        optimizer,
        steady=steady,
        at_end=steady + in_backward + last_gradient,
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
        share = _share(group, work)
        # Masters, fp32 gradients, and a copy of the weights in the working type for the transfer
        # back to the GPU; the optimizer's states.
        host += _page_locked(work, [4 * share, 4 * share, c * share])
        host += work.optimizer_states([share])
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


def _stage3(work: Workload, swaps: bool) -> _States:
    """Estimate zero3 and infinity: a shard of every parameter, gathered while it is used."""
    c, n, sizes = work.item, work.world_size, work.sizes
    total, largest = sum(sizes), max(sizes)
    shards, trained = _parts(sizes, n), _parts(work.trained, n)
    buckets = bucket_sizes(work.model.hidden, total, False)
    bucket, sub_group = buckets["reduce_bucket_size"], min(trained, buckets["sub_group_size"])
    threshold = buckets["stage3_param_persistence_threshold"]
    persistent = [size for size in sizes if size <= threshold]
    # Infinity keeps only the persistent parameters on the GPU, which every rank has whole. A single
    # rank has them once, as its shard.
    parameters = c * (_parts(persistent, n) if swaps else shards) + (
        c * sum(persistent) if n > 1 else 0
    )
    masters_and_states = 4 * trained + work.optimizer_states([trained])
    gradients, optimizer = (0, 0) if swaps else (c * trained, masters_and_states)
    gathered = 0 if n == 1 and not swaps else c * (largest + min(2 * bucket, total - largest))
    steady = parameters + gradients + optimizer + c * bucket
    # ds_config_infinity.json: 5 buffers for parameters and 4 for the states of a sub-group, which
    # DeepSpeed page-locks without rounding (csrc/pin_memory/deepspeed_pin_tensor.cpp); and the
    # gradients, in one tensor that PyTorch page-locks.
    in_host = c * 5 * (largest // n + 4096) + 4 * 4 * sub_group
    in_host += _page_locked(work, [c * trained])
    # At the end of backward the embedding is whole, with the gradients of its uses (see _dp), and
    # so is the largest matrix of a transformer block.
    uses = 2 if work.model.tied else 1
    at_end = c * ((largest if gathered else 0) + uses * max(work.trained) + max(work.model.block()))
    # The norm of one gradient in fp64, or the fp32 copies of a sub-group.
    update = max(8 * max(work.trained) // n, (4 + (c if c < 4 else 0)) * sub_group)
    update += _temporaries(work) * sub_group
    return _States(
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
        nvme=masters_and_states + 4 * trained + c * shards if swaps else 0,
    )


def _fsdp(work: Workload, strategy: str) -> _States:
    """Estimate FSDP2: shards of all states, with the dtypes of _dp.

    Transformer blocks are gathered one by one. Parameters outside of them are gathered for a whole
    pass.
    """
    m, n, sizes = work.model, work.world_size, work.sizes
    # Bytes per gathered element. In fp16 parameters are gathered in fp32, because autocast is used.
    c = work.stream(strategy)
    trained, block = _parts(work.trained, n), sum(m.block())
    shards = 4 * trained + work.item * _parts(work.frozen, n)
    total, outside = sum(sizes), m.total - m.layers * block
    with_adapters = block + (sum(work.lora.of_block(m)) if work.lora else 0)
    # Gradients are not sharded until the last micro-batch.
    accumulated = 4 * sum(work.trained) if work.accumulation > 1 else 0
    optimizer = work.optimizer_states([trained])
    steady = shards + optimizer + accumulated
    in_backward = (c if work.lora else 2 * c) * with_adapters
    # At the end of backward, parameters outside of the transformer blocks are whole, with their
    # gradient (three tensors for a tied embedding, see _dp), and in 16 bit its fp32 copy for the
    # reduction.
    gathered = 0 if n == 1 and c == 4 else c * outside
    gradients = 0 if work.lora else max(3 * c if m.tied else 0, c + (4 if c < 4 else 0)) * outside
    not_reduced = 4 * (trained if work.lora else trained - outside // n) + in_backward
    return _States(
        shards,
        4 * trained,
        optimizer,
        steady=steady,
        at_end=steady + not_reduced + gathered + gradients,
        update=4 * trained,
        sent=2 * c * work.accumulation * total + 4 * sum(work.trained),
        gathered=gathered,
        in_backward=in_backward,
    )


def _temporaries(work: Workload) -> int:
    """Return the bytes per element of a tensor that an unfused optimizer needs while it updates it.

    Adafactor computes the update in two fp32 tensors. The kernels of bitsandbytes need none on
    CUDA; on a CPU they compute with five fp32 tensors.
    """
    if work.optimizer == "adafactor":
        return 8
    return 20 if work.optimizer == "adamw_8bit" and work.device == "cpu" else 0


def _parts(sizes: list[int], n: int) -> int:
    """Return the elements of one rank's shards of parameters, each divided by n and rounded up."""
    return sum(-(-size // n) for size in sizes)


def _groups(work: Workload) -> list[list[int]]:
    """Return the sizes of the trained matrices and of the other trained parameters.

    DeepSpeed flattens each parameter group separately. Adapters are matrices.
    """
    if work.lora:
        return [work.trained]
    matrices = set(filter(work.model.is_matrix, set(work.trained)))
    return [
        [size for size in work.trained if (size in matrices) == wanted] for wanted in (True, False)
    ]


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
