"""Task 2: is the step of two ranks that of one process?

A gradient is a weighted sum over micro-batches: of the gradients of their sums of losses, which
`harness.py` writes down. The right weight of each is 1 / (all tokens of the step). Each known
mistake gives other weights, so the mistake whose gradient is equal to the student's is named.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tools.lab.programs import RANKS, distance, failure, watch
from tools.lab.task import Place
from tools.lab.verdict import Finding, right, wrong

HARNESS = Path(__file__).with_name("harness.py")
TOLERANCE = 1e-9  # relative, in fp64
EQUAL, UNEQUAL = "equal lengths", "unequal lengths"
PADDED = ("a micro-batch of padding", "a rank of padding")


class Work(NamedTuple):
    """The micro-batches of a step: tokens[rank][micro_batch], and the same with padding."""

    tokens: list[list[int]]
    with_padding: list[list[int]]

    @property
    def total(self) -> int:
        """The tokens of the step."""
        return sum(map(sum, self.tokens))

    @property
    def micro_steps(self) -> int:
        """The micro-batches of a rank."""
        return len(self.tokens[0])

    def of_micro_step(self, micro_step: int) -> int:
        """Return the tokens of all ranks in one micro-batch."""
        return sum(own[micro_step] for own in self.tokens)


class Mistake(NamedTuple):
    """A mistake, by the weight that it gives to the micro-batch m of rank r."""

    name: str
    weight: Callable[[Work, int, int], float]
    text: str


SCALED = "The gradient is exactly {} the right one, for any data. "
MISTAKES = (
    Mistake(
        "mean_of_means",
        lambda work, r, m: 1 / (work.tokens[r][m] * work.micro_steps * RANKS),
        "This is the mean of the means of the micro-batches: a token in a short micro-batch "
        "counts more than one in a long micro-batch.",
    ),
    Mistake(
        "mean_over_ranks",
        lambda work, r, m: 1 / (sum(work.tokens[r]) * RANKS),
        "Each rank alone is right now. But the mean over the ranks of their means is a mean of "
        "means: ranks have different numbers of tokens.",
    ),
    Mistake(
        "mean_over_micro_steps",
        lambda work, r, m: 1 / (work.of_micro_step(m) * work.micro_steps),
        "Across the ranks it is right, but micro-batches with different numbers of tokens are "
        "averaged as if they were alike.",
    ),
    Mistake(
        "times_the_ranks",
        lambda work, r, m: RANKS / work.total,
        SCALED.format("the number of ranks times")
        + "AdamW and clipping hide this; SGD does not. Which operation sums, and which averages?",
    ),
    Mistake(
        "divided_by_the_ranks",
        lambda work, r, m: 1 / (RANKS * work.total),
        SCALED.format("1 / (number of ranks) of")
        + "You divide by the tokens of all ranks, and by the ranks once more.",
    ),
    Mistake(
        "times_the_micro_batches",
        lambda work, r, m: work.micro_steps / work.total,
        SCALED.format("the number of micro-batches times")
        + "backward() adds to the gradient. What does the sum have to be divided by?",
    ),
    Mistake(
        "divided_by_the_micro_batches",
        lambda work, r, m: 1 / (work.micro_steps * work.total),
        SCALED.format("1 / (number of micro-batches) of")
        + "You divide by all tokens of the step, and by the micro-batches once more.",
    ),
    Mistake(
        "sum_of_means",
        lambda work, r, m: 1 / (work.tokens[r][m] * RANKS),
        "The means of the micro-batches are added, not averaged; and a sum of means has the same "
        "fault as a mean of means.",
    ),
    Mistake(
        "sum_over_ranks_of_means",
        lambda work, r, m: 1 / sum(work.tokens[r]),
        "Each rank divides by its own tokens, and the ranks are added.",
    ),
    Mistake(
        "last_micro_batch_only",
        lambda work, r, m: (m == work.micro_steps - 1) / work.of_micro_step(m),
        "Only the last micro-batch is in this gradient. When is it set to zero?",
    ),
    Mistake(
        "last_micro_batch_only",
        lambda work, r, m: (m == work.micro_steps - 1) / work.total,
        "Only the last micro-batch is in this gradient. When is it set to zero?",
    ),
    Mistake(
        "summed_again",
        lambda work, r, m: RANKS ** (work.micro_steps - 1 - m) / work.total,
        "After each micro-batch the ranks add what they have accumulated. So the sum of the first "
        "micro-batch is added again. How often do the ranks have to reduce in a step?",
    ),
    Mistake(
        "padding_counted",
        lambda work, r, m: 1 / sum(map(sum, work.with_padding)),
        "You divide by a number that includes the padding: those targets have no loss.",
    ),
)


def check(place: Place) -> list[Finding]:
    """Run the student's train_step on two ranks, and compare it with one process."""
    ranks, output = watch(HARNESS, place.folder / "loop.py")
    return judge_all(ranks, output)


def judge_all(ranks: list[dict], output: str) -> list[Finding]:
    """Judge the cases of the harness.

    Args:
        ranks: what each rank wrote.
        output: what the program printed, in case it failed.
    """
    if failed := failure(ranks, output, "train_step"):
        return [failed]
    equal, unequal, *padded = (
        judge_update(case, [found[case] for found in ranks]) for case in (EQUAL, UNEQUAL, *PADDED)
    )
    if not unequal.is_right:  # it tells mistakes apart that equal lengths make look alike
        return [*([equal] if equal.is_right else []), unequal]
    findings = [equal, unequal, *padded]
    if all(finding.is_right for finding in findings):
        losses = [judge_loss(case, [found[case] for found in ranks]) for case in (UNEQUAL, *PADDED)]
        findings.append(next((one for one in losses if not one.is_right), losses[0]))
    return findings


def judge_update(case: str, ranks: list[dict]) -> Finding:
    """Judge the gradient that a step applied, on both ranks."""
    parts = ranks[0]["parts"]
    tokens, with_padding = (
        [[part[key] for part in own] for own in parts] for key in ("tokens", "with_padding")
    )
    work = Work(tokens, with_padding)
    gradients = [found["gradient"] for found in ranks]
    if not distance(*gradients) <= TOLERANCE:  # also if it is not a number
        return wrong(
            "ranks_differ",
            f"{case}: after the step the ranks have different weights. Each must apply the same "
            "gradient: where do they exchange it, and is it for every parameter?",
        )
    if distance(gradients[0], weighted(parts, work, lambda w, r, m: 1 / w.total)) > TOLERANCE:
        return explain(case, gradients[0], parts, work)
    seen_later = " A test with equal lengths cannot see a wrong mean." if case == EQUAL else ""
    return right(f"{case}: the update is that of one process.{seen_later}")


def judge_loss(case: str, ranks: list[dict]) -> Finding:
    """Judge the losses that the step returned on both ranks."""
    parts = ranks[0]["parts"]
    tokens = sum(part["tokens"] for own in parts for part in own)
    mean = sum(part["loss"] for own in parts for part in own) / tokens
    for rank, found in enumerate(ranks):
        if found["loss"] is None:
            return wrong("no_loss", "The updates are right, but train_step returns no loss.")
        if not math.isfinite(found["loss"]):
            return wrong(
                "not_finite",
                f"{case}: the updates are right, but the loss that rank {rank} returns is not a "
                "number. What is the mean over no tokens?",
            )
        if not is_close(found["loss"], mean):
            own = sum(part["loss"] for part in parts[rank])
            own_tokens = sum(part["tokens"] for part in parts[rank]) or 1
            if is_close(found["loss"], own / tokens) or is_close(found["loss"], own / own_tokens):
                text = "it is about this rank's tokens alone."
                name = "loss_of_one_rank"
            else:
                name, text = "loss", "it is not the mean over all tokens of the step."
            return wrong(name, f"The updates are right. The loss that rank {rank} returns: {text}")
    return right("The loss that both ranks return is the mean over all tokens of the step.")


def is_close(a: float, b: float) -> bool:
    """Return whether two losses are equal up to the rounding of fp32."""
    return math.isclose(a, b, rel_tol=1e-6)


def weighted(parts: list, work: Work, weight: Callable[[Work, int, int], float]) -> list[float]:
    """Return the sum of the gradients of all micro-batches with their weights."""
    total = [0.0] * len(parts[0][0]["gradient"])
    for r, own in enumerate(parts):
        for m, part in enumerate(own):
            factor = weight(work, r, m) if part["tokens"] else 0.0
            for i, value in enumerate(part["gradient"]):
                total[i] += factor * value
    return total


def explain(case: str, gradient: list[float], parts: list, work: Work) -> Finding:
    """Name the mistake that gives this gradient."""
    for mistake in MISTAKES:
        if distance(gradient, weighted(parts, work, mistake.weight)) <= TOLERANCE:
            return wrong(mistake.name, f"{case}: {mistake.text}")
    return wrong(
        "another_gradient",
        f"{case}: the ranks agree, but their gradient is not that of one process, nor that of a "
        "mistake that this check knows. Compare one micro-batch on one rank first.",
    )
