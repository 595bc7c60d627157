"""Terms of the memory estimate of DeepSpeed's ZeRO stages.

Sources: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py and stage3.py.
"""

import math

from distributed_training.strategies.deepspeed.buckets import bucket_sizes
from distributed_training.workload.activations import (
    BACKWARD,
    END,
    HOST,
    LOSS,
    NVME,
    STEP,
    UPDATE,
    Term,
)
from distributed_training.workload.workload import Workload, shard_elements


def terms_of_stages12(work: Workload, stage: int, offload: bool) -> tuple[list[Term], int]:
    """Estimate zero1, zero2 and offload: a flat working copy, this rank's masters and moments."""
    m, c = work.model, work.item
    r = work.reduced_item(c)
    trained, largest = sum(work.trained), max(work.trained)
    shares = [_share(group, work) for group in _groups(work)]
    share, accumulates = sum(shares), work.accumulation > 1
    gradients = 0 if offload else c * _kept_gradients(work)
    # Two buckets if reductions overlap with computation (overlap_comm).
    buckets = 2 if offload or work.world_size > 1 else 1
    bucket = bucket_sizes(m.hidden, sum(work.sizes), False)["reduce_bucket_size"]
    uses = (3 if m.embedding.tied else 2) + (c == 4)  # as in ddp/memory.py, and copies
    # Stage 1 keeps all gradients until those of the last micro-batch are reduced.
    whole = c * trained - gradients if accumulates and stage == 1 else 0
    terms = [
        Term("parameters", c * trained + work.frozen_bytes, STEP),
        Term("buckets of gradients", buckets * c * bucket, (BACKWARD, END)),
        Term("a bucket in --reduce_dtype", r * bucket if r != c else 0, (BACKWARD, END)),
        Term("gradients of the embedding", uses * c * largest, (END,)),
        Term("other reduced gradients", max(0, gradients - c * largest), (END,)),
        Term("other gradients", whole, STEP),
        # Also with offload: Muon's iterations are on the device.
        Term("optimizer's temporaries", work.update_temporaries(share), (UPDATE,)),
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
        ]
    reductions = 1 if stage == 1 else work.accumulation
    return terms, (2 * reductions * r + c) * trained


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
    if work.device.type != "cuda":
        return sum(sizes)
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def terms_of_stage3(work: Workload, swaps: bool) -> tuple[list[Term], int]:
    """Estimate zero3 and infinity: a shard of every parameter, gathered while it is used."""
    c, n, sizes = work.item, work.world_size, work.sizes
    total, largest, largest_trained = sum(sizes), max(sizes), max(work.trained)
    shards, trained = shard_elements(sizes, n), shard_elements(work.trained, n)
    buckets = bucket_sizes(work.model.hidden, total, False)
    bucket, sub_group = buckets["reduce_bucket_size"], min(trained, buckets["sub_group_size"])
    # Where whole blocks are gathered, their norms and biases come with them.
    threshold = buckets["stage3_param_persistence_threshold"] if swaps else 0
    persistent = [size for size in sizes if size <= threshold]
    # Infinity keeps only the persistent parameters on the GPU, which every rank has whole. A single
    # rank has them once, as its shard.
    kept = shard_elements(persistent, n) if swaps else shards
    whole = sum(persistent) if n > 1 else 0
    masters_and_states = 4 * trained + work.optimizer_states([trained])
    gathers = n > 1 or swaps
    gathered = c * (largest + min(2 * bucket, total - largest)) if gathers else 0
    uses = 2 if work.model.embedding.tied else 1
    terms = [
        Term("parameters", c * (kept + whole), STEP),
        Term("communication buffers", work.reduced_item(c) * bucket, STEP),  # a bucket
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
        # What a rank sends to the ranks that compute whole matrices, and what it receives.
        exchanged = 2 * 4 * min(work.gathered_in_update // n, sub_group) * (n - 1) // n
        terms += [
            Term("optimizer states", masters_and_states, STEP),
            Term("gradients", c * trained, STEP),
            Term("fp32 copies of a sub-group", copies, (UPDATE,)),
            Term("optimizer's temporaries", work.update_temporaries(sub_group), (UPDATE,)),
            Term("parts of matrices, exchanged", exchanged, (UPDATE,)),
        ]
    sent = 2 * c * total + work.reduced_item(c) * sum(work.trained)
    return terms, sent * work.accumulation + 2 * 4 * (work.gathered_in_update // n)


def _offloaded_to_nvme(work: Workload, parameters: int, masters_and_states: int) -> list[Term]:
    """Return what infinity adds to stage 3.

    Args:
        parameters: bytes of this rank's shards.
        masters_and_states: bytes of their fp32 copies and of the optimizer states.
    """
    c, n, largest, largest_trained = work.item, work.world_size, max(work.sizes), max(work.trained)
    trained, total = shard_elements(work.trained, n), sum(work.sizes)
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


def _groups(work: Workload) -> list[list[int]]:
    """Return the sizes in each parameter group: matrices (also adapters), and the rest."""
    if work.lora:
        of_block = (work.lora.matrices(work.model), work.lora.vectors(work.model))
        matrices, rest = (work.model.layers * sizes for sizes in of_block)
    else:
        matrices = [size for size in work.trained if work.model.is_matrix(size)]
        rest = [size for size in work.trained if not work.model.is_matrix(size)]
    return [sizes for sizes in (*work.groups_of_matrices(matrices), rest) if sizes]


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
    return max(kept) if work.rank.number is None else kept[work.rank.number]
