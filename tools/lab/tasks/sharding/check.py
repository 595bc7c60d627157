"""Task 7: what each rank stores, whether the gradient is right, and what is alive when.

The harness runs the student's functions on three ranks, and one process without sharding.
"""

import math
from pathlib import Path

from tools.lab.answers import number_of, read_answer
from tools.lab.programs import distance, failure, watch
from tools.lab.task import Place
from tools.lab.verdict import Finding, right, wrong

HARNESS = Path(__file__).with_name("harness.py")
RANKS = 3  # a program for two ranks only must not look right
TOLERANCE = 1e-9  # relative, in fp64
# Of the question about the peak, in blocks: shards, gradients of the shards of the blocks before,
# one gathered block, and its whole gradient, which is not reduced yet.
BLOCKS, QUESTION_RANKS = 12, 4
SHARDS, REDUCED = BLOCKS / QUESTION_RANKS, (BLOCKS - 1) / QUESTION_RANKS
PEAK = SHARDS + REDUCED + 1 + 1
NEAR = 0.1  # of the answer: less than half of a block's shard


def check(place: Place) -> list[Finding]:
    """Run the program on three ranks and judge it; then the answer about the peak."""
    ranks, output = watch(HARNESS, place.folder / "fsdp.py", RANKS)
    findings = judge_all(ranks, output)
    if any(not finding.is_right for finding in findings):
        return findings
    answer = number_of(read_answer(place.folder / "answer.json"), "peak_in_blocks")
    return [*findings, judge_peak(answer)]


def judge_all(ranks: list[dict], output: str) -> list[Finding]:
    """Judge what the harness wrote; later findings need the earlier ones.

    Args:
        ranks: what each rank wrote.
        output: what the program printed, in case it failed.
    """
    if failed := failure(ranks, output, f"On {RANKS} ranks your functions"):
        return [failed]
    if any("late_binding" in found for found in ranks):
        text = (
            "The backward pass computes with the last block or shard in place of the others: does"
        )
        text += (
            " your function use the loop's variable? When checkpoint calls it again, that has its"
        )
        return [wrong("late_binding", f"{text} last value: pass what it needs as an argument.")]
    findings = []
    for judge in (judge_shards, judge_gathered, judge_gradients, judge_memory, judge_reshard):
        found = judge(ranks)
        findings += [found] if found else []
        if found and not found.is_right:
            break
    return findings


def judge_shards(ranks: list[dict]) -> Finding:
    """Judge how much of each block a rank stores, and which part."""
    for found in ranks:
        for stored, whole in zip(found["shards"], map(len, found["whole"]), strict=True):
            if stored >= whole:
                text = f"A rank stores all {whole} parameters of a block ({stored} with padding)."
                return wrong("not_sharded", text)
            if stored != math.ceil(whole / RANKS):
                text = f"On {RANKS} ranks a rank stores {stored} of {whole} parameters: each must"
                return wrong("unequal_shards", f"{text} store the same number, 1/{RANKS} of them.")
        if found["shards_in_memory"] > sum(found["shards"]):
            text = f"The shards have {sum(found['shards'])} parameters, and their memory "
            text += f"{found['shards_in_memory']}: a slice is a view, which keeps the whole vector."
            return wrong("view_of_the_whole", text)
    for block, whole in enumerate(ranks[0]["whole"]):
        parts = [found["parts"][block] for found in ranks]
        if all(part == parts[0] for part in parts):
            text = "Every rank stores the same part of a block: which one belongs to its rank?"
            return wrong("same_part", text)
        if joined(parts)[: len(whole)] != whole:
            text = f"The shards of block {block + 1}, one after the other, are not its parameters."
            return wrong("other_parts", text)
    return right(f"Each rank stores 1/{RANKS} of the parameters.")


def joined(parts: list[list[float]]) -> list[float]:
    """Return the parts of the ranks, one after the other."""
    return [value for part in parts for value in part]


def judge_gathered(ranks: list[dict]) -> Finding | None:
    """Judge whether a block computes with its parameters."""
    if all(found["gathered_right"] for found in ranks):
        return None
    text = "A block computes with other parameters than its own: does Gather.forward put the shards"
    return wrong("gathered_wrong", f"{text} of all ranks together, in the order of the ranks?")


def judge_gradients(ranks: list[dict]) -> Finding:
    """Judge the gradients of the shards, put together."""
    for block, expected in enumerate(ranks[0]["right"]):
        parts = [found["gradients"][block] for found in ranks]
        if any(part is None for part in parts):
            text = "A shard has no gradient: does the whole vector follow from it by Gather.apply?"
            return wrong("no_gradient", text)
        if any(
            len(p) != n for p, n in zip(parts, (f["shards"][block] for f in ranks), strict=True)
        ):
            return wrong(
                "whole_gradient", "The gradient of a shard has another size than the shard."
            )
        together = joined(parts)[: len(expected)]
        if distance(together, expected) > TOLERANCE:
            return explain(ranks, block, together)
    return right("The gradients of the shards are those of one process.")


def explain(ranks: list[dict], block: int, together: list[float]) -> Finding:
    """Name the mistake behind the gradient of a block."""
    expected = ranks[0]["right"][block]
    size = ranks[0]["shards"][block]
    own = [
        value for r, x in enumerate(ranks) for value in x["own"][block][r * size : (r + 1) * size]
    ]
    if distance(together, [RANKS * value for value in expected]) <= TOLERANCE:
        text = f"The gradient is the sum over the ranks; on {RANKS} ranks {RANKS} times the mean."
        return wrong("sum_not_mean", text)
    if distance(together, [RANKS / 2 * value for value in expected]) <= TOLERANCE:
        text = f"The gradient is the sum over the ranks / 2, which is no mean on {RANKS} ranks."
        return wrong("divided_by_two", text)
    if distance(together, [value / RANKS for value in expected]) <= TOLERANCE:
        return wrong("divided_twice", "The gradient is too small by the number of ranks.")
    if distance(together, own) <= TOLERANCE:
        text = "Each rank keeps its part of the gradient of its own data: the ranks do not exchange"
        return wrong("not_reduced", f"{text} it.")
    first = (expected[:size] * RANKS)[: len(expected)]
    if distance(together, first) <= TOLERANCE:
        text = "Every rank keeps the same part of the gradient. Which part belongs to its shard?"
        return wrong("part_of_rank_0", text)
    text = f"The gradient of block {block + 1} is not that of one process. Do the backward passes"
    return wrong("another_gradient", f"{text} gather the block that they compute?")


def judge_memory(ranks: list[dict]) -> Finding | None:
    """Judge whether the gradients of the shards keep more memory than their own."""
    for found in ranks:
        own = sum(map(len, found["gradients"]))
        if found["gradients_in_memory"] > own:
            text = f"The gradients of the shards have {own} numbers, and their memory "
            text += f"{found['gradients_in_memory']}: a slice is a view, which keeps the whole one."
            return wrong("view_of_the_gradient", text)
    return None


def judge_reshard(ranks: list[dict]) -> Finding:
    """Judge how many whole blocks are alive."""
    count = len(ranks[0]["whole"])
    after = max(found["alive_after_forward"] for found in ranks)
    most = max(found["most_alive"] for found in ranks)
    again = all(found["calls"] > found["calls_of_forward"] for found in ranks)
    if after == count and not again:
        text = f"After the forward pass all {count} blocks are still gathered: autograd has saved"
        return wrong("not_resharded", f"{text} them for the backward pass. The peak is that of dp.")
    if after:
        text = f"After the forward pass {after} of {count} blocks are still gathered."
        return wrong("partly_resharded", text)
    if most > 2:
        text = f"Up to {most} whole blocks are alive at the same time."
        return wrong("gathered_too_early", f"{text} Gather a block when it computes.")
    return right(f"Whole blocks are freed, and gathered again: at most {most} at a time.")


def judge_peak(answer: float) -> Finding:
    """Judge the peak of the question."""
    if abs(answer - PEAK) <= NEAR:
        return right("The peak is right: shards, their gradients, one block, and its gradient.")
    own = 1 / QUESTION_RANKS
    mistakes = {
        "peak_with_all_gradients": (
            PEAK,  # and that of the first block
            "The gradient of the first block is whole at that moment: it has no shard of it yet.",
        ),
        "peak_of_dp": (2.0 * BLOCKS, "This is dp: all parameters and all gradients, whole."),
        "peak_without_reshard": (
            BLOCKS + SHARDS + REDUCED + 1,
            "This is without resharding: all blocks are still gathered.",
        ),
        "peak_of_shards": (2 * SHARDS, "Nothing is gathered in this sum."),
        "peak_without_one_block": (
            PEAK - 1,
            "One whole block is missing: the block AND its gradient are whole at that moment.",
        ),
        "peak_without_reduced_gradients": (
            PEAK - REDUCED,
            "The gradients that have been reduced before are missing: they wait for the update.",
        ),
        "peak_without_shards": (PEAK - SHARDS, "The shards are missing: they never leave."),
    }
    for name, (value, text) in mistakes.items():
        if min(abs(answer - value), abs(answer - value - own)) <= NEAR:
            return wrong(name, f"Peak: {text}")
    return wrong("peak", "Peak: add shards, their gradients, what is gathered, and its gradient.")
