"""Task 1: what one of four ranks stores, as predicted, as planned, and as measured.

The plan (`distributed_training.plan`) has the right numbers, so this file has none. A wrong number
is compared with what common mistakes give; the first that explains it is named.
"""

import math
from pathlib import Path
from typing import NamedTuple

from distributed_training import plan
from distributed_training.errors import UserError
from tools.lab.answers import number_of, read_answer, read_complete_run
from tools.lab.task import Place
from tools.lab.verdict import Finding, right, wrong

STRATEGIES = ("dp", "zero1", "zero2", "zero3", "fsdp")
PARTS = ("parameters", "gradients", "optimizer")
RANKS = 4
# Relative. Under zero1 and zero2 a rank has 21 % more than a quarter of the gradients (`WHOLE`);
# the mistakes below differ by a third or more.
TOLERANCE = 0.25
# Measured on the last of four ranks: a weight of 262,144 elements, of which it owns 32,768, and a
# bias of 256, of which it owns 128.
WHOLE = (
    ". The gradients have {:,} bytes more than a quarter of them: a share ends in the middle of a "
    "parameter, and DeepSpeed keeps the whole gradient of each parameter of which a rank owns a "
    "part. The plan counts this."
)


class Mistake(NamedTuple):
    """A mistake, by the factor between its number and the right one, and where it can be made."""

    name: str
    factor: float
    text: str
    parts: tuple[str, ...] = PARTS


UNITS = (
    Mistake("elements_not_bytes", 1 / 4, "These are elements: how many bytes has one?"),
    Mistake("megabytes", 1e-6, "Write bytes, not megabytes."),
    Mistake("megabytes", 2**-20, "Write bytes, not megabytes."),
)
MISTAKES = (
    Mistake(
        "all_ranks_together",
        RANKS,
        "This is the sum over all ranks, or a part that this strategy divides was not divided. "
        "What does ONE rank store?",
    ),
    Mistake(
        "divided_although_whole",
        1 / RANKS,
        "You divided a part by the ranks that this strategy keeps whole on each of them.",
    ),
    Mistake(
        "without_fp32_copy",
        2 / 3,
        "Two of three parts: one of what DeepSpeed counts among the optimizer states is missing.",
        ("optimizer",),
    ),
    Mistake(
        "one_moment",
        1 / 2,
        "Half of it: how many moments has AdamW, and how many bytes has each element?",
        ("optimizer",),
    ),
    Mistake(
        "fp32_copy_too_much",
        3 / 2,
        "A third of this is not there: which library keeps a second fp32 copy of the parameters, "
        "and which does not?",
        ("optimizer",),
    ),
    Mistake("in_16_bit", 1 / 2, "Half of it: the run is in fp32.", ("parameters", "gradients")),
    *UNITS,
)


def check(place: Place) -> list[Finding]:
    """Check the prediction; if it is right, also the measurement."""
    answer = read_answer(place.folder / "answer.json")
    predicted = {
        strategy: {part: number_of(answer, strategy, part) for part in PARTS}
        for strategy in STRATEGIES
    }
    findings = [judge(strategy, predicted[strategy]) for strategy in STRATEGIES]
    if any(not finding.is_right for finding in findings):
        return findings
    measured = place.folder / "measured"
    if not measured.is_dir():
        return [*findings, wrong("not_measured", "Now measure: step 3 of the page.")]
    return findings + [compare(strategy, predicted[strategy], measured) for strategy in STRATEGIES]


def is_close(value: float, expected: float) -> bool:
    """Return whether a number is right, for a model of this size."""
    return abs(value - expected) <= TOLERANCE * expected


def judge(strategy: str, predicted: dict[str, float]) -> Finding:
    """Compare the prediction for a strategy with the plan; name the first mistake."""
    planned = plan(
        "tiny-gpt2",
        strategy,
        gpus=RANKS,
        precision="fp32",
        batch_size=1,
        seq_length=64,
        device="cpu",
    ).memory
    factors = {part: predicted[part] / planned[part] for part in PARTS}
    for mistake in UNITS:  # all three parts have the same factor: no wrong division
        if all(is_close(factor, mistake.factor) for factor in factors.values()):
            return wrong(mistake.name, f"{strategy}: {mistake.text}")
    for part, factor in factors.items():
        if not is_close(factor, 1):
            name, text = explain(part, strategy, factor)
            return wrong(name, f"{strategy}, {part}: {text}")
    return right(f"{strategy}: the prediction is right.")


def explain(part: str, strategy: str, factor: float) -> tuple[str, str]:
    """Return the name and text of the mistake that gives this factor."""
    if strategy == "zero1" and part == "gradients" and is_close(factor, RANKS):
        text = "This is what a rank has during the backward pass. Look at the moment of the page."
        return "before_the_reduction", text
    possible = [mistake for mistake in MISTAKES if part in mistake.parts]
    # The padding makes factors smaller: the closest mistake explains the number.
    closest = min(possible, key=lambda mistake: abs(math.log(max(factor, 1e-9) / mistake.factor)))
    if is_close(factor, closest.factor):
        return closest.name, closest.text
    return "unexplained", (
        "This number is wrong: which of P, 4 bytes, the number of moments and the number of ranks "
        "must it follow from?"
    )


def compare(strategy: str, predicted: dict[str, float], measured: Path) -> Finding:
    """Compare the prediction with what a run of the strategy measured."""
    try:
        run = read_complete_run(measured / strategy, f"the measurement of {strategy}")
    except UserError as error:
        return wrong("not_measured", f"{strategy}: {error}")
    results = run.results
    if results["strategy"] != strategy:
        return wrong("another_strategy", f"{strategy}: this run is one of {results['strategy']}.")
    if results["world_size"] != RANKS:
        ranks = results["world_size"]
        return wrong("another_number_of_ranks", f"{strategy}: this run has {ranks} ranks.")
    if results["precision"] != "fp32":
        return wrong("another_precision", f"{strategy}: this run is in {results['precision']}.")
    found = results["memory"]["categories_bytes"]
    table = ", ".join(f"{part} {predicted[part]:,.0f} / {found[part]:,.0f}" for part in PARTS)
    text = f"{strategy}, predicted / measured: {table}"
    if not all(is_close(predicted[part], found[part]) for part in PARTS):
        return wrong("measured_otherwise", text)
    more = found["gradients"] - found["parameters"] // RANKS  # a gradient is as large as its weight
    return right(text + WHOLE.format(more) if strategy in ("zero1", "zero2") and more else text)
