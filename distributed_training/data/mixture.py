"""Several datasets in one epoch, in the shares of their weights."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from distributed_training import console
from distributed_training.data.corpus import open_corpus
from distributed_training.data.facts import DatasetFacts
from distributed_training.data.sequences import Padding, Sequences, shares_of
from distributed_training.data.token_file import TokenFile
from distributed_training.errors import UserError
from distributed_training.files.atomic import digest_of_json
from distributed_training.ranks.context import DistContext
from distributed_training.settings.data import DataSettings
from distributed_training.settings.training import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_mixture(
    data: DataSettings,
    training: TrainingSettings,
    ctx: DistContext,
    tokenizer: PreTrainedTokenizerBase,
    padding: Padding,
) -> tuple[Sequences, Sequences, DatasetFacts]:
    """Do what `opening.open_tokenized` does for several datasets."""
    # All training sequences of each, also with --eval_only.
    whole, training = replace(data, num_samples=None), replace(training, eval_only=False)
    datasets, validations, entries = [], [], []
    for name, _ in data.dataset:
        console.print0(f"📂 {name}")
        train, validation, entry = open_corpus(whole, training, ctx, tokenizer, padding, name)
        datasets.append(train)
        validations.append(validation)
        entries.append(entry)
    weights = [Fraction(weight) for _, weight in data.dataset if weight]
    mixture = mix(datasets, weights)
    mixture = mixture.take(data.num_samples or mixture.num_sequences)
    for named, (_, count), entry in zip(data.dataset, mixture.shares, entries, strict=True):
        if not count:
            raise UserError(
                f"--dataset {named} has less than one sequence in an epoch of "
                f"{mixture.num_sequences}: change the weights, or use more data."
            )
        entry |= {"weight": named.weight, "blocks_per_epoch": count}
        share = count / mixture.num_sequences
        console.print0(f"📂 {named.name}: {count:,} sequences in an epoch ({share:.1%})")
    evaluated = validations[0] if data.validation_file else mix(validations)
    held_out = [entry["validation"].get("sha256") for entry in entries]
    kinds = {entry["kind"] for entry in entries}
    facts = {
        "name": data.dataset_name,
        "kind": kinds.pop() if len(kinds) == 1 else "mixed",
        "formats": list(dict.fromkeys(name for entry in entries for name in entry["formats"])),
        **{key: sum(e[key] for e in entries) for key in ("rows", "tokens", "truncated", "skipped")},
        "sha256": digest_of_json([[entry["sha256"], entry["weight"]] for entry in entries]),
        "tokens_sha256": digest_of_json([entry["tokens_sha256"] for entry in entries]),
        "blocks": mixture.num_sequences,
        "validation": {
            "blocks": evaluated.num_sequences,
            "sha256": digest_of_json(held_out) if any(held_out) else None,
        },
        "bad_rows": [row for entry in entries for row in entry.pop("bad_rows")],
        "datasets": entries,
    }
    return mixture, evaluated, facts


def mix(datasets: list[Sequences], weights: list[Fraction] | None = None) -> Sequences:
    """Return the sequences of several datasets in the shares of the weights (None: all of them)."""
    sizes = [dataset.num_sequences for dataset in datasets]
    counts = shares_of(weights, sizes) if weights else sizes
    files, ranges, ends = list[TokenFile](), [np.empty((0, 3), np.int64)], list[np.ndarray]()
    for dataset in datasets:
        ends.append(dataset.ends + sum(map(len, ranges)))
        ranges.append(dataset.ranges + np.array([len(files), 0, 0]))
        files += dataset.files
    packed, shares = any(dataset.packed for dataset in datasets), zip(sizes, counts, strict=True)
    return Sequences(
        tuple(files),
        np.concatenate(ranges),
        np.concatenate(ends),
        datasets[0].padding,
        packed,
        tuple(shares),
    )
