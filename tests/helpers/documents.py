"""The documents: their blocks, and the flags, files and names that they mention.

tests/unit/test_documents.py checks them, and tests/runs/test_documents_run.py runs their commands.
CONTRIBUTING.md describes the markers of the blocks, and of numbers that are constants of the code.
"""

import argparse
import contextlib
import fnmatch
import functools
import inspect
import io
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from project_copy import PROJECT, project_files
from script_mains import main_of

from distributed_training.cli import parser as parsing
from distributed_training.cli.flags import build_parser
from distributed_training.cli.parse import parse_arguments
from distributed_training.errors import UserError

COMMANDS = ("runnable", "needs-gpu", "needs-cluster", "needs-hub")
MARKERS = (*COMMANDS, "output", "illustration")
LAUNCHERS = {"torchrun", "deepspeed", "accelerate"}
# Those of their flags that the documents mention.
LAUNCHER_FLAGS = """
    cpu hostfile launcher local_addr log_dir machine_rank main_process_ip main_process_port
    master_addr master_port max_restarts multi_gpu nnodes no_ssh node_rank nproc_per_node num_gpus
    num_machines num_nodes num_processes rdzv_backend rdzv_conf rdzv_endpoint rdzv_id standalone
    """.split()
# Commands that pip installs; the others have the names of scripts, with hyphens.
INSTALLED = {
    "distributed-training": "real_model_example.py",
    "compare-strategies": "compare_strategies.sh",
    "report-run": "scripts/report.py",
    "chat-run": "scripts/chat.py",
}
# The script, and what passes it their flags.
MAIN_PROGRAMS = r"real_model_example\.py$|compare_strategies\.sh$|\.slurm$"
CODE_SUFFIXES = (".py", ".sh", ".slurm", ".jinja", ".md", ".def")
INLINE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
COMMENT = re.compile(r"<!--.*?-->")
VALUE = re.compile(r"([\w.,+-]*)<!-- value: ([\w.]+)\.(\w+)(?:\[(\w+)\])? -->")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    line: int  # number of its fence
    marker: str  # the text of the comment before it; "" without one
    language: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """A document."""

    name: str  # path in the project
    lines: list[str]
    blocks: list[Block]
    prose: dict[int, str]  # the lines outside of blocks, by number from 1, without comments

    def spans(self) -> list[tuple[int, str]]:
        """Return (line number, text) of each inline code; it may continue on the next line."""
        text = "\n".join(self.prose.get(i + 1, "") for i in range(len(self.lines)))
        return [
            (text.count("\n", 0, found.start()) + 1, found[2].replace("\n", " "))
            for found in re.finditer(INLINE.pattern, text, re.DOTALL)
            if "\n\n" not in found[2]
        ]

    def anchors(self) -> set[str]:
        """Return the anchors that GitHub gives the titles."""
        titles = [line.lstrip("# ") for line in self.prose.values() if line.startswith("#")]
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    def commands(self) -> list[tuple[int, list[str]]]:
        """Return (line number, words) of each command in the blocks of bash."""
        return [
            (block.line + number, command)
            for block in self.blocks
            if block.language != "python"
            and (block.marker in COMMANDS or (not block.marker and block.language == "bash"))
            for number, line in joined(block.lines)
            for command in split(line)
        ]


def read(name: str, text: str | None = None) -> Page:
    """Parse a page of the project, or a text."""
    lines = ((PROJECT / name).read_text(encoding="utf-8") if text is None else text).splitlines()
    blocks, prose, fence, language, start = [], {}, "", "", 0
    for number, line in enumerate(lines, 1):
        found = re.match(r"\s*(`{3,})(\w*)", line)
        if fence and line.strip() == fence:
            before = re.fullmatch(r"\s*<!-- (.+) -->", lines[start - 2]) if start > 1 else None
            content = tuple(lines[start : number - 1])
            blocks.append(Block(start, before[1] if before else "", language, content))
            fence = ""
        elif not fence and found:
            fence, language, start = found[1], found[2], number
        elif not fence:
            prose[number] = COMMENT.sub("", line)
            if line == "<!-- runnable -->" and lines[number : number + 1][0].startswith("|"):
                blocks += _blocks_of_table(lines, number)
    assert not fence, f"{name}:{start}: the block does not end"
    return Page(name, lines, blocks, prose)


@functools.cache
def pages() -> list[Page]:
    """Return the documents: README.md and its neighbors, those of docs/, and each tool's README."""
    pattern = r"(docs/)?\w+\.md|tools/(\w+/)?README\.md"
    return [read(name) for name in sorted(tracked()) if re.fullmatch(pattern, name)]


def _blocks_of_table(lines: list[str], header: int) -> list[Block]:
    """Return the commands of a marked table, the first code of each row, as two blocks.

    The second block has the commands of rows with the comment `needs-hub` or `needs-cluster`.

    Args:
        lines: of the page.
        header: index of the table's first line.
    """
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines[header + 1 :]))
    found = [(INLINE.search(row), "<!-- needs-" in row) for row in rows]
    return [
        Block(
            header + 1,
            marker,
            "bash",
            tuple(code[2] if code and elsewhere == needed else "" for code, elsewhere in found),
        )
        for marker, needed in (("runnable", False), ("needs-hub", True))
    ]


def joined(lines: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, text) of each command, with continued lines joined."""
    first, text = 1, ""
    for number, line in enumerate(lines, 1):
        text += line.rstrip()
        if text.endswith("\\"):
            text = text.removesuffix("\\")
        else:
            yield first, text
            first, text = number + 1, ""


def split(line: str) -> list[list[str]]:
    """Split a line of bash into the words of its commands."""
    lexer = shlex.shlex(line.replace("$(", "; ("), posix=True, punctuation_chars="();|&")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("();|&"):
            commands.append([])
        else:
            commands[-1].append(word)
    return [words for words in commands if words]


# ------------------------------------------------------------------------------------------- flags


class _Parser(BaseException):
    """Ends a program where it would parse its arguments."""


@functools.cache
def parser_of(program: str) -> argparse.ArgumentParser:
    """Return the parser of a program of this project, such as scripts/report.py."""
    if re.search(MAIN_PROGRAMS, program):
        return build_parser()
    main = main_of(program)

    def found(parser, *_args, **_kwargs):
        raise _Parser(parser)

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", found),
        mock.patch.object(parsing.Parser, "parse_args", found),
        pytest.raises(_Parser) as end,
    ):
        main(*[[]] * len(inspect.signature(main).parameters))
    return end.value.args[0]


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return all spellings of all flags, also of subcommands."""
    flags: set[str] = set()
    for action in parser._actions:
        flags |= {*action.option_strings}
        if isinstance(action, argparse._SubParsersAction):
            flags = flags.union(*map(flags_of, action.choices.values()))
    return flags


def program_of(words: list[str]) -> tuple[str | None, int]:
    """Return the project's program that a command starts, and its position; or (None, 0)."""
    installed = INSTALLED.get(words[0]) or f"scripts/{words[0].replace('-', '_')}.py"
    if "-" in words[0] and installed in tracked():
        return installed, 0
    for place, word in enumerate(words):
        if word.startswith("tools.benchmarks.") and words[place - 1] == "-m":
            return f"{word.replace('.', '/')}.py", place
        if word.startswith("tools/benchmarks/") and word.endswith(".sh"):
            return word.replace(".sh", ".py"), place
        if re.search(r"^(scripts|tools/benchmarks)/\w+\.py$|" + MAIN_PROGRAMS, word):
            return word, place
    return None, 0


def unknown_flags(words: list[str]) -> list[str]:
    """Return the flags of a command that its program or launcher does not have."""
    program, place = program_of(words)
    launcher, own = (words[:place], words[place:]) if program else (words, [])
    unknown = []
    if {Path(word).name for word in launcher} & LAUNCHERS:
        names = [word.split("=")[0] for word in launcher if word.startswith("--")]
        unknown += [name for name in names if name[2:].replace("-", "_") not in LAUNCHER_FLAGS]
    if program:
        names = [word.split("=")[0] for word in own if re.match(r"--\w", word)]
        unknown += [name for name in names if name not in flags_of(parser_of(program))]
    return unknown


def usage_error(words: list[str]) -> str:
    """Return why the project's program would refuse a command; "" if it would not.

    A command with three dots or a variable is not complete, so it is not parsed.
    """
    program, place = program_of(words)
    values = [*itertools.takewhile(lambda word: not re.match("2?>", word), words[place + 1 :])]
    if not program or any(re.search(r"\.\.\.|…|\$|^--help$", word) for word in values):
        return ""
    if program.endswith("compare_strategies.sh") and values and values[0][0] != "-":
        values = values[1:]
    is_main, errors = re.search(MAIN_PROGRAMS, program), io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            (parse_arguments if is_main else parser_of(program).parse_known_args)(values)
    except UserError as error:
        return str(error)
    except SystemExit as end:
        return errors.getvalue() if end.code else ""
    return ""


# ------------------------------------------------------------------------------------------- files


@functools.cache
def tracked() -> frozenset[str]:
    """Return the project's files, also new ones that git does not ignore, and its folders."""
    files = project_files()
    return frozenset(files) | {str(up) for name in files for up in Path(name).parents}


def is_missing(word: str) -> bool:
    """Return whether a word is the name of a project file that does not exist."""
    name = re.sub(r"(:\d+|::\S+|[,;:.])+$", "", word).removeprefix("./").rstrip("/")
    if not re.fullmatch(r"[\w.*/-]+", name) or ".." in name:
        return False
    folder, _, _ = name.partition("/")
    if "/" in name and folder in {n for n in tracked() if "." not in n[1:]}:
        return not fnmatch.filter(tracked(), name)
    if "/" not in name and (name.endswith(CODE_SUFFIXES) or name.startswith("ds_config_")):
        return not fnmatch.filter({Path(n).name for n in tracked()}, name)
    return False


def created(page: Page) -> set[str]:
    """Return the names of the files that a page's blocks and commands write."""
    names = {b.marker.removeprefix("file: ") for b in page.blocks if b.marker.startswith("file: ")}
    for _, words in page.commands():
        pairs = itertools.pairwise(words)
        names |= {word for before, word in pairs if before in ("-o", "--out", "--output", ">")}
    return names | {Path(name).name for name in names}
