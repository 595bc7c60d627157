"""The rows of a file, of each type of file, as documents and examples."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from support.data.formats import (
    BadRow,
    Document,
    Example,
    RowOptions,
    TextFile,
    columns_of_table,
    is_row,
    read_row,
    shorten,
)
from support.errors import UserError, first_line
from support.files.user_files import unique_keys

PIECE_CHARACTERS = 1 << 16  # a text file is read in pieces of this length
LONGEST_ROW = 1 << 30  # characters; a file with a longer row is probably not of its suffix's format
# Bytes of memory for each byte of a .json file while it is read; 2.3 were measured with rows of
# plain text.
JSON_IN_MEMORY = 3
# A row as it is in the file, with its place; or a part of the file that cannot be read.
Row = tuple[object, str] | BadRow


@contextlib.contextmanager
def reading(what: Path | str):
    """Convert an OSError in this context to a UserError which says that `what` cannot be read.

    An error of the file that the tokens are written to is not converted.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{what} cannot be read: {error.strerror or first_line(error, 200)}."
        ) from error


def has_rows(file: Path) -> bool:
    """Return whether a file has rows; any other file is one document."""
    return file.suffix.lower() in READERS


def contents_of_file(file: Path, options: RowOptions) -> Iterator[Document | Example | BadRow]:
    """Yield the rows of a file as documents and examples, or the only document of a text file.

    A part that cannot be used is a BadRow, and so is a file of another format than its suffix says.

    Raises:
        UserError: during iteration, also over the pieces of a document: the file cannot be read, or
            the rest of it is not of its format.
    """
    with reading(file):
        if flaw := _foreign(file):
            yield flaw
        elif has_rows(file):
            # The readers decode a byte that is not UTF-8 to half of a surrogate pair, so that the
            # row with this byte can be named.
            for row in READERS[file.suffix.lower()](file, options):
                yield row if isinstance(row, BadRow) else read_row(*row, options)
        else:
            pieces = _pieces_of(file)
            try:
                first = next(pieces, "")
            except BadRow as flaw:
                yield flaw
            else:
                yield TextFile(str(file), itertools.chain([first], pieces))


def _pieces_of(file: Path) -> Iterator[str]:
    try:
        with reading(file), open(file, encoding="utf-8-sig", newline="") as stream:
            while chunk := stream.read(PIECE_CHARACTERS):
                yield chunk
    except UnicodeDecodeError as error:
        raise BadRow(
            f"{file} is not UTF-8 text: convert it first (iconv -f LATIN1 -t UTF-8), or in a "
            "folder leave it out with --include or --max_bad_rows."
        ) from error


FOREIGN = {
    b"\x1f\x8b\x08": "compressed with gzip: gunzip it",
    b"PK\x03\x04": "a zip archive (as .docx and .xlsx are): unpack it, or save it as text",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unzstd it",
    b"\xfd7zXZ\x00": "compressed with xz: unxz it",
    b"\xff\xfe": "UTF-16 text: convert it (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "UTF-16 text: convert it (iconv -f UTF-16 -t UTF-8)",
}


def _foreign(file: Path) -> BadRow | None:
    """Return a BadRow if a file begins as a compressed file, an archive or UTF-16 text does."""
    with open(file, "rb") as stream:
        begin = stream.read(max(map(len, FOREIGN)))
    advice = next((advice for mark, advice in FOREIGN.items() if begin.startswith(mark)), None)
    return BadRow(f"{file} is {advice} first.") if advice else None


# ------------------------------------------------------------------------------ rows of each format


def _parse_json(text: str, file: Path, line: int | None = None) -> object | BadRow:
    """Parse a line of a file, or the whole file; returns a BadRow if it cannot be used."""
    place = f"{file}, line {line}" if line else str(file)
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        return BadRow(
            f"{file}, line {line or error.lineno}, column {error.colno}: "
            f"not valid JSON ({error.msg})."
        )
    except RecursionError:
        return BadRow(f"{place}: JSON that is nested too deeply.")
    except MemoryError:
        return BadRow(f"{place}: more JSON at a time than fits into this host's memory.")
    except ValueError as error:  # a duplicate key; a number with more than Python's 4,300 digits
        return BadRow(f"{place}: {first_line(error, 200).split(';')[0]}.")


def _read_jsonl(file: Path, options: RowOptions) -> Iterator[Row]:
    with open(file, encoding="utf-8-sig", errors="surrogateescape") as stream:
        for number in itertools.count(1):
            place = f"{file}, line {number}"
            line = stream.readline(LONGEST_ROW)
            if not line:
                return
            if len(line) == LONGEST_ROW and not line.endswith("\n"):
                yield BadRow(f"{place}: a line of more than {LONGEST_ROW:,} characters.")
                while line and not line.endswith("\n"):
                    line = stream.readline(LONGEST_ROW)
            elif line.strip():
                row = _parse_json(line.rstrip("\n"), file, number)
                yield row if isinstance(row, BadRow) else (row, place)


def _has_a_row_per_line(file: Path) -> bool:
    """Return whether a .json file is one of JSON lines, as `datasets` reads and writes them."""
    with open(file, encoding="utf-8-sig", errors="surrogateescape") as stream:
        first = stream.readline(LONGEST_ROW)
        if not (first.startswith("{") and first.endswith("\n")):
            return False
        # In parts, because the rest of the file may be one line that does not fit into memory.
        if not any(part.strip() for part in iter(lambda: stream.read(1 << 16), "")):
            return False
    return not isinstance(_parse_json(first, file), BadRow)


def _read_json(file: Path, options: RowOptions) -> Iterator[Row]:
    import psutil

    if _has_a_row_per_line(file):
        yield from _read_jsonl(file, options)
        return

    too_large = BadRow(
        f"{file} is read as a whole, and does not fit into this host's free memory: make it a "
        ".jsonl file (jq -c '.[]'), which is read line by line."
    )
    if file.stat().st_size * JSON_IN_MEMORY > psutil.virtual_memory().available:
        yield too_large
        return
    try:
        rows = _parse_json(file.read_text(encoding="utf-8-sig", errors="surrogateescape"), file)
    except MemoryError:
        yield too_large
        return
    if isinstance(rows, BadRow):
        yield rows
        return
    if isinstance(rows, dict) and not is_row(rows, options):  # {"data": [...]}
        lists = {key: value for key, value in rows.items() if isinstance(value, list)}
        if len(lists) > 1:
            yield BadRow(
                f"{file} has several lists, {shorten(lists)}: write each to its own file, and name "
                "one with --validation_file."
            )
            return
        rows = next(iter(lists.values()), rows)
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        yield row, f"{file}, entry {number}"


def _read_csv(file: Path, options: RowOptions) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_ROW)  # the default, 128 kB, is less than a long document
    with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        rows = csv.DictReader(stream, strict=True)
        try:
            columns = rows.fieldnames or []
        except csv.Error as error:
            yield BadRow(f"{file}, line 1: {error}.")
            return
        if len(set(columns)) < len(columns):
            yield BadRow(f"{file}, line 1: two columns have the same name.")
            return
        while True:
            begin = rows.reader.line_num + 1
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                if "end of data" in str(error):  # the unclosed quote contains all following rows
                    raise UserError(
                        f"{file}, line {begin}: a quote is opened here and not closed."
                    ) from error
                yield BadRow(f"{file}, line {begin}: {error}.")
                continue
            place = f"{file}, line {rows.line_num}"
            if None in row or None in row.values():
                yield BadRow(
                    f"{place}: it does not have {len(columns)} cells as the first line has: "
                    "quote a text that has commas."
                )
            else:
                yield row, place


def _read_parquet(file: Path, options: RowOptions) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = columns_of_table(table.schema_arrow.names, options, str(file))
        if duplicates := [name for name in columns if table.schema_arrow.names.count(name) > 1]:
            raise UserError(f"{file}: two columns have the same name, {duplicates[0]}.")
        for batch in table.iter_batches(columns=columns, batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield row, f"{file}, row {number}"
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError, UserError) as error:
        if getattr(error, "errno", None):  # an error of the system, not of the file's content
            raise
        if number:
            raise UserError(
                f"{file}: what follows row {number} cannot be read: {first_line(error, 200)}"
            ) from error
        if isinstance(error, UserError):
            yield BadRow(str(error))
        else:
            yield BadRow(f"{file} is not a Parquet file that can be read: {first_line(error, 200)}")


READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
