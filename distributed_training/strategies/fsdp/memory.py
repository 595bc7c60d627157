"""Terms of the memory estimate of FSDP2."""

from distributed_training.workload.activations import BACKWARD, END, LOSS, STEP, UPDATE, Term
from distributed_training.workload.workload import Workload, shard_elements


def terms_of_fsdp(work: Workload) -> tuple[list[Term], int]:
    """Estimate FSDP2: sharded states; blocks are gathered one by one, the rest for a whole pass."""
    m, n, lora = work.model, work.world_size, work.lora
    # Bytes per gathered element. In fp16 parameters are gathered in fp32, because autocast is used.
    c, r = work.stream, work.reduced_item(4)
    trained, block = shard_elements(work.trained, n), sum(m.block())
    dora = lora is not None and lora.magnitudes
    outside = m.total - m.layers * block
    of_block = work.bytes_of(block, c, 1) + c * (sum(lora.of_block(m)) if lora else 0)
    gathered = 0 if n == 1 and c == 4 else c * outside
    # The gradient of the parameters outside of blocks is whole at the end of backward (three
    # tensors for a tied embedding, see ddp/memory.py). So is its copy for a reduction in another
    # dtype.
    of_tied = 3 * c if m.embedding.tied else 0
    whole = 0 if lora else max(of_tied, c + (r if r != c else 0)) * outside
    reduced = trained if lora else trained - outside // n
    # Gradients are not sharded until the last micro-batch. They are added in the reduction's dtype.
    accumulated = r * sum(work.trained) if work.accumulation > 1 else 0
    gathers = 2 * work.accumulation * work.bytes_of(sum(work.sizes), c, m.layers)
    sent = gathers + r * sum(work.trained)
    return [
        Term("parameters", 4 * trained + work.frozen_shard_bytes, STEP),
        Term("optimizer states", work.optimizer_states([trained]), STEP),
        Term("gradients", 4 * trained, (UPDATE,)),
        Term("optimizer's temporaries", work.update_temporaries(0), (UPDATE,)),
        Term("gathered outside of blocks", gathered, (LOSS, BACKWARD, END)),
        # DoRA's temporaries are in a forward pass at their peak, with a gathered block.
        Term("a gathered block", of_block, (LOSS, BACKWARD, END) if dora else (BACKWARD, END)),
        Term("reduced gradients", 4 * reduced, (END,)),
        Term("gradients outside of blocks", whole, (END,)),
        Term("gradients of a block", 0 if lora else of_block, (BACKWARD, END)),
        Term("accumulated gradients", accumulated, STEP),
    ], sent + 4 * work.gathered_in_update
