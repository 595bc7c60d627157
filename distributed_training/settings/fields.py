"""A setting of a section: a field of a dataclass, with all that is known of its flag.

The parser, the checks of flags, the comparison of runs, the resume and the documents are built from
these fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from distributed_training.settings import flag_types

COMPUTED = object()  # a default that depends on other flags: cli/parse.py computes it
# Flags that need evaluations during the training; several others exclude them.
NEED_EVALUATIONS = "eval_every generate_every_eval early_stopping_patience load_best_at_end"
# What a setting can change in a run.
MODEL, TOKENS, ORDER = "the model", "the tokens", "the order of the data"
SEQUENCES, DROPPED = "the sequences", "the dropped elements"
RATE, UPDATES = "the learning rate", "the updates"
ROUNDING, EVALUATIONS = "rounding", "evaluations"
# What a resume does if a setting has changed.
MUST_MATCH, REPORTED = "it is refused without --resume_force", "a line says so"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a flag besides its type and default; see `flag`."""

    names: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    needs: str | None = None
    effect: str | None = None
    at_resume: str | None = None
    used_by: str | None = None
    planned: bool = False


def flag(
    default: object,
    kind: Callable[[str], object],
    text: str,
    *,
    names: str = "",
    excludes: str = "",
    needs: str | None = None,
    effect: str | None = None,
    at_resume: str | None = None,
    used_by: str | None = None,
    planned: bool = False,
    **options: object,
) -> Any:
    """Return a field with the flag --NAME, NAME being the name of the field.

    Args:
        default: the value without the flag. With COMPUTED the section cannot be created without it.
        kind: converts the text of a value, or raises argparse.ArgumentTypeError; see flag_types.
        text: the help.
        names: its names in other trainers, separated by spaces; the values are the same.
        excludes: flags that cannot be used with it; of a switch that is on by default: with its
            --no_NAME.
        needs: the flag that it needs.
        effect: what it can change in a run, such as UPDATES, for the comparison of runs; None:
            nothing that a loss shows.
        at_resume: what a resume does if it has changed: MUST_MATCH, REPORTED, or None: nothing.
            checkpoints/signature.py adds what depends on several flags, such as the global batch.
        used_by: the only runs in which it has an effect; in others a line says that it has none.
        planned: whether scripts/plan_memory.py has the flag, because the estimate depends on it.
        options: others of argparse's `add_argument`: metavar, choices, nargs, const, and the action
            "append" for a flag that may be repeated, whose value is a tuple.
    """
    others, excluded = tuple(names.split()), tuple(excludes.split())
    facts = Facts(others, excluded, needs, effect, at_resume, used_by, planned)
    of_parser = None if default is COMPUTED else default
    metadata = {"default": of_parser, "type": kind, "help": text, "options": options}
    metadata["facts"] = facts
    if default is COMPUTED:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def switch(default: bool, text: str, **facts: Any) -> Any:
    """Return a field with the flags --NAME and --no_NAME.

    Args:
        text: the help of the one that changes the default.
        facts: see `flag`.
    """
    return flag(default, flag_types.boolean, text, **facts)


class Section(Protocol):
    """A frozen dataclass of flags, and the title of their group in --help."""

    title: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]


def flags_of(section: type[Section]) -> list[dataclasses.Field]:
    """Return the fields of a section that are flags."""
    return [field for field in dataclasses.fields(section) if "help" in field.metadata]
