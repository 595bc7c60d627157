"""The parser of all flags, built from `Arguments`: its fields and its docstring.

Nothing heavy is imported here, so that --help and argument errors appear at once.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from support import VERSION
from support.cli import argument_types as kinds
from support.cli.aliases import IGNORED, RENAMED
from support.cli.arguments import Arguments
from support.errors import UserError

EXIT_CODES = """\
exit codes: 0 completed, 1 failed, 2 wrong usage or bad input, 3 out of memory,
75 stopped by a signal and saved. Launchers may turn any but 0 into their own:
programs read "status" in results.json."""
FLAGS = {field.name: field for field in fields(Arguments) if field.metadata}
DEFAULTS: dict[str, Any] = {
    field.name: field.default if field.default_factory is MISSING else field.default_factory()
    for field in FLAGS.values()
}
COMMANDS = "Instead of a run"  # the group without a title in --help


def described_flags() -> dict[str, dict[str, str]]:
    """Return the help of each flag by group and name, from the docstring of `Arguments`."""
    groups: dict[str, dict[str, str]] = {}
    for line in inspect.cleandoc(Arguments.__doc__ or "").splitlines():
        if title := re.fullmatch(r"(\S.*):", line):
            group = groups[title[1]] = {}
        elif entry := re.fullmatch(r" {4}(\w+): (.*)", line):
            name, group[entry[1]] = entry.groups()
        elif line.startswith(8 * " "):
            group[name] += f" {line.strip()}"
    return groups


GROUPS = described_flags()


class SetFlag(argparse.Action):
    """Set a flag and record its spelling; a flag that is given under two names is an error."""

    def __call__(self, parser, namespace, values, option_string=None):
        spelled = vars(namespace).setdefault("spelled", {})  # option by flag
        other = spelled.get(self.dest, option_string)
        if other != option_string and other in self.option_strings:  # not --eval and --no_eval
            raise UserError(
                f"{other} and {option_string} are two names of one flag: leave one out."
            )
        spelled[self.dest] = option_string
        is_opposite = option_string == f"--no_{self.dest}"
        setattr(namespace, self.dest, not values if is_opposite else values)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help in which all names of a flag come before its value: --lr, --learning_rate LR."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=80)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        if action.nargs == 0 or action.type is kinds.boolean:
            return names
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{names} {value}"


def options_of(name: str, text: str | None) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield the names of a flag, and the arguments of `add_argument` for them.

    Args:
        text: its help, to which the default is appended if it names none; None: not in --help.
    """
    details, default = dict(FLAGS[name].metadata), DEFAULTS[name]
    kind, hidden = details.pop("kind"), argparse.SUPPRESS
    text = hidden if text is None else text.replace("%", "%%")
    if isinstance(default, str | int | float) and not isinstance(default, bool):
        text += "" if text == hidden or "(default:" in text else f" (default: {default})"
    details["choices" if isinstance(kind, tuple) else "type"] = kind
    if kind is kinds.boolean:
        details |= {"nargs": "?", "const": True}
        if details.pop("has_opposite"):
            # --help has only the one that changes the default.
            yield [f"--no_{name}"], {**details, "dest": name, "help": text if default else hidden}
            text = hidden if default else text
    yield (
        [f"--{name}", *(f"--{other}" for other in RENAMED.get(name, ()))],
        details | {"help": text},
    )


def build_parser() -> kinds.Parser:
    """Build the parser of all flags. The parsed options are those that were given."""
    parser = kinds.Parser(
        prog="real_model_example.py",
        usage="%(prog)s [flags]",
        description="Fine-tune a causal language model under one of seven data-parallel "
        "strategies.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=HelpFormatter,
    )
    parser.unknown_advice = (
        ": flags of a launcher go before real_model_example.py, and docs/COMING_FROM.md is about "
        "those of other trainers"
    )
    parser.add_argument("--version", action="version", version=f"distributed-training {VERSION}")
    for title, texts in GROUPS.items():
        heading = title[0].lower() + title[1:]
        group = parser if title == COMMANDS else parser.add_argument_group(heading)
        for name, text in texts.items():
            for names, options in options_of(name, text):
                group.add_argument(*names, action=SetFlag, **options)
    for name in FLAGS.keys() - {name for texts in GROUPS.values() for name in texts}:
        for names, options in options_of(name, None):
            parser.add_argument(*names, action=SetFlag, **options)
    for name in IGNORED:
        hidden: dict[str, Any] = {"nargs": "*", "help": argparse.SUPPRESS}
        parser.add_argument(f"--{name}", f"--no_{name}", action=SetFlag, **hidden)
    return parser
