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
        UserError: the weights are not those of several datasets, or a dataset is named twice.
    """
    datasets = []
    for word in words:
        weighted = re.fullmatch(r"(.+):(\d+\.?\d*|\.\d+)", word)
        # A file may have a colon and a number at the end of its name.
        if weighted and not os.path.exists(word):
            datasets.append(Dataset(weighted[1], weighted[2]))
        else:
            datasets.append(Dataset(word))
    weights = [dataset.weight for dataset in datasets]
    if any(weights) and (len(words) == 1 or not all(float(weight or 0) for weight in weights)):
        raise UserError(
            f"--dataset {' '.join(words)}: either all of several datasets have a weight above 0, "
            "or none has one."
        )
    names = [dataset.name for dataset in datasets]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--dataset names {twice[0]} twice: name it once, with a larger weight.")
    return tuple(datasets)
