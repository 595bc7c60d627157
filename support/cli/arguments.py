"""The parsed arguments, which nothing can change after parsing."""

from __future__ import annotations

import argparse

from support.errors import UserError
from support.known_models import EMBEDDED_MODEL


class Arguments(argparse.Namespace):
    """The values of the flags by name; `freeze` makes them immutable.

    A value that is known only later goes into a copy: `args = args.replace(seq_length=512)`.
    """

    __slots__ = ("_frozen",)  # not in vars(args), which has the flags only

    def freeze(self) -> Arguments:
        """Make setting and deleting an attribute raise AttributeError.

        Returns:
            This object.
        """
        object.__setattr__(self, "_frozen", True)
        return self

    def replace(self, **values) -> Arguments:
        """Return a frozen copy with other values.

        Raises:
            AttributeError: a name is new.
        """
        for name in values:
            getattr(self, name)
        return Arguments(**(vars(self) | values)).freeze()

    def __setattr__(self, name: str, value) -> None:
        self._refuse_if_frozen(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._refuse_if_frozen(name)
        super().__delattr__(name)

    def _refuse_if_frozen(self, name: str) -> None:
        if getattr(self, "_frozen", False):
            raise AttributeError(
                f"args.{name} cannot be changed after parsing: "
                f"use args = args.replace({name}=...) and pass the copy on."
            )


def choose_seq_length(args, positions: int | None) -> int:
    """Return --seq_length, or its default for the model.

    Args:
        positions: the most tokens that the model can process; None if it has no limit.
    """
    if args.seq_length is None:
        default = 256 if args.model == EMBEDDED_MODEL else 512
        return min(default, positions or default)
    if positions and args.seq_length > positions:
        raise UserError(
            f"--seq_length {args.seq_length} is more than the {positions} positions of "
            f"{args.model}."
        )
    return args.seq_length


def global_batch(args, world_size: int) -> int:
    """Return the sequences in one optimizer step, over all ranks."""
    return args.batch_size * args.gradient_accumulation_steps * world_size


def held_out_share(args) -> float | None:
    """Return the share of the training sequences to hold out; None for the default."""
    if args.validation_split_percentage:
        return args.validation_split_percentage / 100
    return args.validation_split


def isolates_documents(args) -> bool:
    """Return whether tokens attend to their own document only."""
    return args.isolate_documents or args.packing
