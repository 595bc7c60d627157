"""Whether fine-tuning helped: two models on the same documents or tasks, and a verdict."""

from __future__ import annotations

from pathlib import Path

from distributed_training import console
from distributed_training.errors import UserError
from distributed_training.files.json_types import JsonObject
from distributed_training.trained.load import load_tokenizer
from distributed_training.trained.source import Source
from tools.hand_over import documents, harness
from tools.hand_over.paired import FEWEST, Difference, compare
from tools.hand_over.prompts import NotHere, rows_of_run

BETTER, WORSE, SAME = "better", "worse", "not distinguishable"
MARKS = {BETTER: "✅", WORSE: "❌", SAME: "⚖️ "}


def score_documents(before: Source, after: Source, results: JsonObject, file: str | None) -> str:
    """Compare the losses on held-out documents; print the result, and return the verdict.

    Args:
        results: of the run that trained `after`; {} if it is not known.
        file: --data; None: the validation data of the run.
    Raises:
        UserError: there is no held-out data.
    """
    flags = results.get("flags") or {}
    if file:
        results = {"flags": {**flags, "dataset": [file], "validation_file": None}}
    elif not ((results.get("dataset") or {}).get("validation") or {}).get("rows"):
        raise UserError(
            f"{after.name} has no validation file or split of its own: name documents that it was "
            "not trained on: --data FILE."
        )
    try:
        rows = documents.limited(rows_of_run(results, load_tokenizer(after)))
    except NotHere as error:
        raise UserError(
            f"{after.name}: {error}, so its validation data is not read: name documents that it "
            "was not trained on: --data FILE."
        ) from error
    with console.timer("Computing the losses"):
        first, _ = documents.losses_of(before, rows)
        second, tokens = documents.losses_of(after, rows)
    usable = (tokens > 0) & (first > 0)
    if not usable.any():
        raise UserError("No document has a token with a loss.")
    found = compare(first[usable], second[usable], tokens[usable])
    print(f"{found.items} documents, {tokens[usable].sum():,} tokens")
    return _print("loss, nats per token", found, smaller_is_better=True)


def score_tasks(before: Source, after: Source, tasks: str, include: Path | None) -> list[str]:
    """Compare the values of lm-eval's tasks; print the results, and return the verdicts.

    Raises:
        UserError: lm-eval is not installed or failed, or there is nothing to compare.
    """
    first, second = (harness.scores_of(source, tasks, include) for source in (before, after))
    pairs = list(harness.paired(first, second))
    if not pairs:
        raise UserError("lm-eval wrote no values of single items: nothing can be compared.")
    return [
        _print(", ".join(key), compare(*values), second.smaller_is_better(key))
        for key, *values in pairs
    ]


def _print(name: str, found: Difference, smaller_is_better: bool) -> str:
    """Print both means, their difference, and the verdict; return the verdict."""
    print(
        f"{name}: {found.before:.4f} → {found.after:.4f}, difference {found.value:+.4f} ± "
        f"{found.error:.4f} (95 %: {found.low:+.4f} to {found.high:+.4f}; {found.items} items)"
    )
    verdict = verdict_of(found, smaller_is_better)
    few = f": fewer than {FEWEST} items" if found.items < FEWEST else ""
    print(f"{MARKS[verdict]} {verdict}{few}")
    return verdict


def verdict_of(found: Difference, smaller_is_better: bool) -> str:
    """Return whether the second model is better."""
    if not found.is_distinguishable:
        return SAME
    return BETTER if (found.value < 0) == smaller_is_better else WORSE
