"""Tables of text for a terminal and for Markdown, all columns aligned to the left.

The package tabulate does the same, but its import takes as long as the rest of plan_memory.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def text_table(rows: Rows, headers: Sequence[str]) -> str:
    """Return a table for a terminal; a header may have several lines."""
    lines = list(itertools.zip_longest(*(header.split("\n") for header in headers), fillvalue=""))
    widths = _widths([*([f"{cell}  " for cell in line] for line in lines), *rows])
    ruler = ["-" * width for width in widths]
    return "\n".join("  ".join(_padded(row, widths)).rstrip() for row in [*lines, ruler, *rows])


def markdown_table(rows: Rows, headers: Sequence[str]) -> str:
    """Return a table in GitHub's Markdown, with each header on one line."""
    headers = [" ".join(header.split()) for header in headers]
    widths = _widths([headers, *rows])
    lines = [f"| {' | '.join(_padded(row, widths))} |" for row in [headers, *rows]]
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)


def _widths(rows: Rows) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _padded(row: Sequence[str], widths: list[int]) -> list[str]:
    return [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
