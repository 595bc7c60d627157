"""The runnable commands of each document, in order, and the output that the document shows of them.

A page's commands are run by one shell, in a copy of the project's files, on a CPU and without the
hub. A block of Python is a program of its own. The line numbers of the shell's script are those of the page.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import finish, free_port, start
from documents import Block, Page, pages, program_of
from project_copy import copy_project

pytestmark = pytest.mark.slow

PAGES = [page for page in pages() if any(block.marker == "runnable" for block in page.blocks)]
BLOCK, FAILED, END = "== block of line", "== failed in line", "END_OF_FILE_BLOCK"
# The numbers of this program and of this public name are compared, too.
DETERMINISTIC = {"scripts/plan_memory.py", "plan"}


def script_of(page: Page) -> str:
    """The shell script that writes a page's files and runs its commands."""
    lines = [""] * len(page.lines)
    lines[0] = f"set -eE; trap 'echo \"{FAILED} $LINENO: exit code $?: $BASH_COMMAND\"' ERR"
    for block in page.blocks:
        content = slice(block.line, block.line + len(block.lines))
        if block.marker == "runnable":
            lines[block.line - 1] = f"echo '{BLOCK} {block.line}'"
            lines[content] = block.lines
            if block.language == "python":
                lines[block.line - 1] += f"; python - <<'{END}'"
                lines[block.line + len(block.lines)] = END
        elif block.marker.startswith("file: "):
            name = block.marker.removeprefix("file: ")
            folder = shlex.quote(str(Path(name).parent))
            lines[block.line - 1] = f"mkdir -p {folder}; cat > {shlex.quote(name)} <<'{END}'"
            lines[content] = block.lines
            lines[block.line + len(block.lines)] = END
    return "\n".join(lines) + "\n"


def shape(line: str) -> str:
    """Return a line with numbers, times and absolute paths replaced, and single blanks."""
    line = re.sub(r"(?<![\w.])/[\w.+-]+(/[\w.+-]*)+", "/PATH", line)
    line = re.sub(r"[+−-]?\d[\d,.:]*(e[+-]?\d+)?", "0", line)
    line = re.sub(r"0 (ms|min|h)\b", "0 s", line)
    return " ".join(re.sub(r"-{3,}", "---", line).split())


def first_missing(shown: tuple[str, ...], real: str, exact: bool = False) -> str | None:
    """Return the first shown line that the real output lacks, in this order; None if it has all.

    A line of three dots stands for any lines, and three dots within a line for any text. Unless
    `exact`, the shapes of lines are compared.
    """
    reduced = str.rstrip if exact else shape
    lines = iter(map(reduced, real.splitlines()))
    for line in shown:
        pattern = ".*".join(map(re.escape, re.split(r"\.\.\.|…", reduced(line))))
        if line.strip() not in ("", "...", "…") and not any(
            re.fullmatch(pattern, candidate) for candidate in lines
        ):
            return line
    return None


def public_names(block: Block) -> set[str]:
    """The names that a block of Python imports from the package."""
    imported = re.findall(r"^from distributed_training import (.+)", "\n".join(block.lines), re.M)
    return {name for names in imported for name in names.split(", ")}


@pytest.fixture
def programs(preloaded, tmp_path) -> dict:
    """An environment in which python and torchrun are forks of the preloaded interpreter."""
    if preloaded is None:
        return {"HF_HUB_OFFLINE": "1"}
    folder, torchrun = tmp_path / "bin", Path(sys.executable).with_name("torchrun")
    folder.mkdir()
    command = f"{preloaded.python} {torchrun} --master_port={free_port()}"
    for name, program in (("python", preloaded.python), ("torchrun", command)):
        (folder / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (folder / name).chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    return {"PATH": path, "HF_HUB_OFFLINE": "1", **preloaded.for_torchrun()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_page(page, tmp_path, programs):
    folder = copy_project(tmp_path / "copy")
    (folder / ".page.sh").write_text(f"exec 2>&1; {script_of(page)}")
    process = start(["bash", ".page.sh"], programs, folder)
    out, _ = finish(process, 600)
    if failed := re.search(rf"^{FAILED} (\d+): (.*)", out, re.MULTILINE):
        pytest.fail(f"{page.name}:{failed[1]}: {failed[2]}\n{out[: failed.start()][-3000:]}")
    assert process.returncode == 0, out[-3000:]
    parts = re.split(rf"^{BLOCK} (\d+)\n", out, flags=re.MULTILINE)
    printed = dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))  # by line of the block
    for block in page.blocks:
        if block.marker == "runnable":
            before = block
        elif block.marker == "output":
            own = range(before.line, before.line + len(before.lines) + 1)
            used = {program_of(words)[0] for line, words in page.commands() if line in own}
            used |= public_names(before)
            real = printed[before.line]
            missing = first_missing(block.lines, real, exact=used <= DETERMINISTIC)
            assert missing is None, (
                f"{page.name}:{block.line}: the commands of line {before.line} do not print, in "
                f"this order, the shown line\n{missing}\nThey printed:\n{real[-5000:]}"
            )
