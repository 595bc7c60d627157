"""The parser of all flags, built from `Arguments`: its fields and its docstring.

Nothing heavy is imported here, so that --help and argument errors appear at once.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

from support import VERSION
from support.cli import argument_types as kinds
from support.cli.aliases import IGNORED, SAME, names_of
from support.cli.argument_types import Parser
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


class SetFlag(argparse.Action):
    """Set a flag and record its spelling; a flag that is given under two names is an error."""

    def __call__(self, parser, namespace, values, option_string=None):
        spelled = vars(namespace).setdefault("spelled", {})  # option by flag
        setters = vars(namespace).setdefault("setters", {})  # option by the flag that it sets
        # --bf16 True --fp16 False is usual, and of --eval and --no_eval the last one counts.
        if values is not False and self.type is not kinds.opposite:
            # --deepspeed without a file does not set --ds_config.
            sets_no_file = self.dest == "deepspeed" and values is True
            name = self.dest if sets_no_file else SAME.get(self.dest, self.dest)
            other = setters.setdefault(name, option_string)
            if other != option_string:
                same = other in self.option_strings
                verb = "are two names of one flag" if same else f"both set --{name}"
                raise UserError(f"{other} and {option_string} {verb}: leave one out.")
        spelled[self.dest] = option_string
        setattr(namespace, self.dest, values)


def described_flags() -> dict[str, dict[str, str]]:
    """Return the help of each flag by group and name, from the docstring of `Arguments`."""
    groups: dict[str, dict[str, str]] = {}
    for line in inspect.cleandoc(Arguments.__doc__ or "").splitlines():
        if title := re.fullmatch(r"(\S.*):", line):
            group = groups[title[1][0].lower() + title[1][1:]] = {}
        elif entry := re.fullmatch(r" {4}(\w+): (.*)", line):
            name, group[entry[1]] = entry.groups()
        elif line.startswith(8 * " "):
            group[name] += f" {line.strip()}"
    return groups


def rows_of(field: Field, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the options of a field, and their arguments for argparse's `add_argument`.

    Args:
        text: its help, to which the default is appended if the text has none.
    """
    details, default = dict(field.metadata), DEFAULTS[field.name]
    kind, option = details.pop("kind"), {"action": SetFlag, "default": default}
    text = text.replace("%", "%%")
    if kind is not kinds.boolean:
        if isinstance(default, str | int | float) and "(default:" not in text:
            text += " (default: %(default)s)"
        details["choices" if isinstance(kind, tuple) else "type"] = kind
        yield f"--{field.name}", {**details, **option, "help": text or argparse.SUPPRESS}
        return
    option |= {"nargs": "?", "const": True, "type": kind, "help": text or argparse.SUPPRESS}
    opposite = {"type": kinds.opposite, "const": False, "dest": field.name}
    # --help has only the one that changes the default.
    hidden = {"help": argparse.SUPPRESS}
    yield f"--{field.name}", option | (hidden if default else {})
    if details["has_opposite"]:
        yield f"--no_{field.name}", option | opposite | ({} if default else hidden)


# Title of a group -> (option, arguments of `add_argument`) of its flags, in the order of --help.
GROUPS = {
    title: [row for name, text in texts.items() for row in rows_of(FLAGS[name], text)]
    for title, texts in described_flags().items()
}
COMMANDS = GROUPS.pop("instead of a run", [])
MODEL, DATA, STRATEGY = (GROUPS.get(title, []) for title in ("model", "data", "strategy"))


def names_in_help(names: Iterable[str]) -> list[str]:
    """Return the names of a flag without Trainer's oldest, which would make the line too long."""
    return [name for name in names if not name.startswith("--per_gpu_")]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help in which all names of a flag come before its value: --lr, --learning_rate LR."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(names_in_help(action.option_strings))
        if action.nargs == 0 or action.type in (kinds.boolean, kinds.opposite):
            return names
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{names} {value}"


def build_parser() -> Parser:
    """Build the parser of all flags, with defaults, limits and help."""
    parser = Parser(
        prog="real_model_example.py",
        usage="%(prog)s [flags]",
        description="Fine-tune a causal language model under one of seven data-parallel "
        "strategies.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
        formatter_class=lambda prog: HelpFormatter(prog, max_help_position=30, width=80),
    )
    parser.add_argument("--version", action="version", version=f"distributed-training {VERSION}")
    for name, options in COMMANDS:
        parser.add_argument(name, **options)
    for title, rows in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, options in rows:
            group.add_argument(*names_of(name), **options)
    for name in {**FLAGS}.keys() - {action.dest for action in parser._actions}:
        for option, options in rows_of(FLAGS[name], ""):
            parser.add_argument(*names_of(option), **options)
    for name in IGNORED:
        hidden: dict[str, Any] = {"action": SetFlag, "help": argparse.SUPPRESS}
        parser.add_argument(f"--{name}", f"--no_{name}", nargs="*", **hidden)
    return parser
