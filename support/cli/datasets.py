"""The datasets that --dataset names, with their weights."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from support.errors import UserError


class Dataset(NamedTuple):
    """A dataset among those of --dataset."""

    name: str  # as for a single one
    weight: str | None = None  # a decimal number, as text; None if no dataset has one

    def __str__(self) -> str:
        return self.name if self.weight is None else f"{self.name}:{self.weight}"


def parse_datasets(words: list[str]) -> tuple[Dataset, ...]:
    """Parse the values of --dataset: NAME, or several NAME or NAME:WEIGHT.

    Raises:
        UserError: only some of several datasets have a weight, a weight is 0, a single dataset has
            one, or a dataset is named twice.
    """
    datasets = []
    for word in words:
        weighted = re.fullmatch(r"(.+):(\d+\.?\d*|\.\d+)", word)
        # A file may have a colon and a number at the end of its name.
        if weighted and not os.path.exists(word):
            datasets.append(Dataset(weighted[1], weighted[2]))
        else:
            datasets.append(Dataset(word))
    names = [dataset.name for dataset in datasets]
    weights = [dataset.weight for dataset in datasets]
    if len(datasets) == 1 and weights[0]:
        raise UserError(f"--dataset {words[0]}: a weight is for several datasets: leave it out.")
    if None in weights and any(weights):
        without = names[weights.index(None)]
        raise UserError(
            f"--dataset: {without} has no weight, and others have one: write {without}:WEIGHT, or "
            "leave out all weights."
        )
    if any(weight and not float(weight) for weight in weights):
        raise UserError("--dataset: a weight is 0: leave out the dataset.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"--dataset names {twice} twice: name it once, with a larger weight.")
    return tuple(datasets)
