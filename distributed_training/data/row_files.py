"""The rows of files. `file_types` has the suffixes; a file with another one is a document."""

import contextlib
import csv
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from distributed_training.data.file_types import type_of
from distributed_training.data.rows import (
    BadRow,
    NotUnicode,
    PlacedRows,
    Position,
    Row,
    RowOptions,
    Rows,
    Source,
    read_row,
)
from distributed_training.data.text_files import is_compressed, open_text, suffix_of
from distributed_training.errors import UserError, first_line
from distributed_training.files.atomic import sha256_of

Item = TypeVar("Item")
READ_CHARACTERS = 1 << 16  # a text file is read in pieces of this length


def open_files(splits: dict[str, list[Path]], options: RowOptions) -> Source:
    """Open the files of splits, and compute the digest of their content."""
    digest = hashlib.sha256(repr(options).encode())
    times = {}
    for number, files in enumerate(splits.values()):
        digest.update(b"\0" * number)  # between splits
        for file in files:
            with reading(file):
                times[file] = file.stat().st_mtime_ns
                digest.update(suffix_of(file).encode() + bytes.fromhex(sha256_of(file)))

    def check(file: Path) -> None:  # the tokens are stored under the digest of what it was
        with reading(file):
            if file.stat().st_mtime_ns != times[file]:
                raise UserError(f"{file} has changed since the run started: start again.")

    rows: dict[str, Rows] = {
        split: partial(rows_of_files, files, options, check) for split, files in splits.items()
    }
    return Source(digest.hexdigest(), rows)


def rows_of_files(
    files: list[Path],
    options: RowOptions,
    check: Callable[[Path], object],
    position: Position | None,
) -> PlacedRows:
    """Yield the rows of several files from a position on.

    Args:
        check: raises an exception if a file is not the one that was opened. It is called before a
            file is read, at its end, and where it cannot be read: a file that is cut during the
            run would otherwise end early, or be called damaged.
    """
    first, skip = (position["file"], position["row"]) if position else (0, 0)
    for number in range(first, len(files)):
        unchanged = partial(check, files[number])
        rows = _checked(rows_of_file(files[number], options), unchanged)
        for row, content in enumerate(rows):
            if number > first or row >= skip:
                if isinstance(content, Row) and content.is_file:  # it is read later
                    content = replace(content, pieces=_checked(content.pieces, unchanged))
                yield {"file": number, "row": row}, content


def _checked(items: Iterable[Item], check: Callable[[], object]) -> Iterator[Item]:
    check()
    try:
        for item in items:
            if isinstance(item, BadRow):
                check()
            yield item
    except UserError:
        check()
        raise
    check()


@contextlib.contextmanager
def reading(what: Path | str) -> Iterator[None]:
    """Convert an error of reading in this context to a UserError that names `what`."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(_not_text(what, error)) from error
    except (OSError, EOFError, ValueError, zlib.error, csv.Error) as error:  # also of pyarrow
        reason = getattr(error, "strerror", None) or first_line(error, 200)
        raise UserError(f"{what} cannot be read: {reason}.") from error


def _not_text(what: Path | str, error: UnicodeDecodeError) -> str:
    """Return the message about a file, or about rows of the hub, with bytes that are no text."""
    if isinstance(what, str) or not _is_text(what):
        return f"{what} has a text that is not UTF-8: write it again as UTF-8."
    if not error.encoding.startswith("utf-8"):
        return (
            f"{what} is damaged: it begins with the byte-order mark of {error.encoding.upper()}, "
            f"and is cut or has other bytes ({error.reason}): copy it again."
        )
    from distributed_training.files.encodings import conversion  # only for such files

    return f"{what} is not UTF-8 text: {conversion(what, is_compressed(what))}"


def rows_of_file(file: Path, options: RowOptions) -> Iterator[Row | BadRow]:
    """Yield the rows of a file, or the only document of a text file.

    Raises:
        UserError: during iteration, also over the pieces of a document: the file cannot be read.
    """
    if file_type := type_of(file):
        with reading(file):
            for row, place in file_type.read(file, options):
                content = read_row(row, place, options)
                yield _with_encoding(content, file) if isinstance(content, NotUnicode) else content
        return
    yield Row(str(file), format="text files", pieces=_pieces_of(file), is_file=True)


def _with_encoding(row: NotUnicode, file: Path) -> BadRow:
    """Return a bad row whose message names the encoding of its file, unless that is UTF-8."""
    from distributed_training.files.encodings import conversion  # only for such rows

    problem = conversion(file, is_compressed(file)) if _is_text(file) else ""
    return BadRow(f"{row.where}: not UTF-8 text: {problem}") if problem else row


def _is_text(file: Path) -> bool:
    file_type = type_of(file)
    return file_type is None or file_type.is_text


def _pieces_of(file: Path) -> Iterator[str]:
    with reading(file), open_text(file, "strict", newline="") as stream:
        while piece := stream.read(READ_CHARACTERS):
            yield piece
