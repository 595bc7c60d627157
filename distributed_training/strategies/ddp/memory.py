"""Terms of the memory estimate of DDP."""

from distributed_training.workload.activations import END, STEP, UPDATE, Term
from distributed_training.workload.workload import Workload


def terms_of_ddp(work: Workload) -> tuple[list[Term], int]:
    """Estimate DDP: all states whole, in fp32, and frozen weights in the dtype of computations."""
    trained, largest = sum(work.trained), max(work.trained)
    several = work.world_size > 1
    # DDP's buckets, gradients that accumulate, and those that CUDA graphs write persist between
    # steps. (The graph of the first micro-batch creates them, perhaps where activations were. The
    # plan assumes more graphs: of later micro-batches, or of other lengths, which add to them.)
    persistent = several or work.accumulation > 1 or work.has_graphs
    # Each use of a tied embedding has its own gradient, and their sum is a third tensor. Without
    # buckets the sum becomes the gradient.
    uses = 2 + persistent if work.model.embedding.tied and not work.lora else 1
    # Between micro-batches the gradients are not yet in DDP's buckets: zero_grad() has removed the
    # views of the buckets.
    accumulated = 4 * trained if several and work.accumulation > 1 else 0
    # The communication hook of --reduce_dtype converts a bucket to 16 bits. The largest parameter
    # has a bucket that ends with it, which usually is the last one.
    copied = 2 * largest if several and work.reduced_item(4) < 4 else 0
    return [
        Term("parameters", 4 * trained + work.frozen_bytes, STEP),
        Term("optimizer states", work.optimizer_states(work.trained), STEP),
        Term("gradients", 4 * trained, STEP if persistent else (END, UPDATE)),
        Term("gradients of the embedding", uses * 4 * largest, (END,)),
        Term("optimizer's temporaries", work.update_temporaries(largest), (UPDATE,)),
        Term("accumulated gradients", accumulated, STEP),
        Term("a bucket in 16 bits", copied, (END,)),
    ], 2 * work.reduced_item(4) * trained
