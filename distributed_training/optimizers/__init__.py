"""The optimizers of --optim: one file for each, and what a run, a plan and a checkpoint ask them.

To add one, write its file, with a subclass of Optimizer, and add a line to NAMES.

optimizer       what every optimizer answers
adamw, adamw_8bit, adafactor, muon, sgd  one optimizer each
moments_8bit    AdamW's moments in the 8 bits of bitsandbytes
muon_and_adamw  the updates of Muon
flat_matrices   whole matrices whose elements are in the flat partitions of several ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed_training.optimizers.optimizer import Optimizer

# Loss scaling in fp16, the same for torch's GradScaler and DeepSpeed: an overflow skips the update
# and halves the scale; GROWTH_INTERVAL steps without an overflow double it.
INITIAL_SCALE_POWER, GROWTH_INTERVAL = 16, 2000

# How a strategy holds the fp32 weights that an optimizer updates, its `layout`: whole parameters;
# FSDP2's tensors, of which a rank has rows; DeepSpeed's flat partitions, without shapes.
WHOLE, ROWS, FLAT = "whole", "rows", "flat"

# The class of each optimizer, in the module of its name.
NAMES = {
    "adamw": "AdamW",
    "adamw_8bit": "AdamW8bit",
    "adafactor": "Adafactor",
    "muon": "Muon",
    "sgd": "SGD",
}


class Optimizers(Mapping[str, "Optimizer"]):
    """The optimizers by name. A run imports only its own."""

    def __init__(self) -> None:
        self._created: dict[str, Optimizer] = {}

    def __getitem__(self, name: str) -> Optimizer:
        class_name = NAMES[name]
        if name not in self._created:
            self._created[name] = getattr(import_module(f"{__name__}.{name}"), class_name)()
        return self._created[name]

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


OPTIMIZERS = Optimizers()


def optimizer_of(base: object) -> Optimizer:
    """Return which optimizer of --optim one of PyTorch is; for others one without states."""
    from distributed_training.optimizers.optimizer import Optimizer

    return next((row for row in OPTIMIZERS.values() if row.is_class_of(base)), Optimizer())
