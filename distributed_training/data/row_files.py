"""The rows of files: text, JSON lines, JSON, CSV, Parquet and Arrow."""

import contextlib
import csv
import gzip
import hashlib
import io
import json
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TextIO, TypeVar

from distributed_training.data import refused_rows
from distributed_training.data.rows import (
    BadRow,
    NotUnicode,
    PlacedRows,
    Position,
    RawRows,
    Row,
    RowOptions,
    Rows,
    Source,
    columns_to_read,
    format_of,
    formats_of,
    read_row,
    row_of_table,
)
from distributed_training.errors import UserError, first_line
from distributed_training.files.atomic import sha256_of
from distributed_training.files.user_files import shown

Item = TypeVar("Item")
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "'|'"}
# UTF-32 first: its mark for little-endian begins with that of UTF-16.
BYTE_ORDER_MARKS = {
    **dict.fromkeys((BOM_UTF32_LE, BOM_UTF32_BE), "utf-32"),
    **dict.fromkeys((BOM_UTF16_LE, BOM_UTF16_BE), "utf-16"),
}
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
                digest.update(type_of(file).encode() + bytes.fromhex(sha256_of(file)))

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
    if isinstance(what, str) or type_of(what) == ".parquet":
        return f"{what} has a text that is not UTF-8: write it again as UTF-8."
    if not error.encoding.startswith("utf-8"):
        return (
            f"{what} is damaged: it begins with the byte-order mark of {error.encoding.upper()}, "
            f"and is cut or has other bytes ({error.reason}): copy it again."
        )
    from distributed_training.files.encodings import conversion  # only for such files

    return f"{what} is not UTF-8 text: {conversion(what, _is_compressed(what))}"


def type_of(file: Path) -> str:
    """Return the suffix that determines how a file is read, without .gz."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix != ".gz"), "")


def rows_of_file(file: Path, options: RowOptions) -> Iterator[Row | BadRow]:
    """Yield the rows of a file, or the only document of a text file.

    Raises:
        UserError: during iteration, also over the pieces of a document: the file cannot be read.
    """
    if read := READERS.get(type_of(file)):
        with reading(file):
            for row, place in read(file, options):
                content = read_row(row, place, options)
                yield _with_encoding(content, file) if isinstance(content, NotUnicode) else content
        return
    yield Row(str(file), format="text files", pieces=_pieces_of(file), is_file=True)


def _with_encoding(row: NotUnicode, file: Path) -> BadRow:
    """Return a bad row whose message names the encoding of its file, unless that is UTF-8."""
    from distributed_training.files.encodings import conversion  # only for such rows

    problem = conversion(file, _is_compressed(file)) if type_of(file) != ".parquet" else ""
    return BadRow(f"{row.where}: not UTF-8 text: {problem}") if problem else row


def _is_compressed(file: Path) -> bool:
    return file.suffix.lower() == ".gz"


def _open_text(file: Path, errors: str = "surrogateescape", newline: str | None = None) -> TextIO:
    """Open a file as text: UTF-8, or UTF-16 or UTF-32 with a byte-order mark; also gzip.

    A byte that is not UTF-8 becomes half of a surrogate pair, so that its row can be named.

    Raises:
        UserError: it is UTF-16 or UTF-32 without a mark, whose ASCII letters are valid UTF-8 with
            zero bytes between them.
    """
    binary: gzip.GzipFile | io.BufferedReader
    binary = gzip.open(file) if _is_compressed(file) else open(file, "rb")  # noqa: SIM115
    start = binary.peek(4096)[:4096]
    marked = (name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark))
    encoding = next(marked, "utf-8-sig")
    if encoding == "utf-8-sig" and b"\0" in start:
        from distributed_training.files.encodings import without_mark  # only for such files

        if problem := without_mark(file, _is_compressed(file), start):
            binary.close()
            raise UserError(f"{file} is not UTF-8 text: {problem}")
    return io.TextIOWrapper(binary, encoding, errors, newline)


def _pieces_of(file: Path) -> Iterator[str]:
    with reading(file), _open_text(file, "strict", newline="") as stream:
        while piece := stream.read(READ_CHARACTERS):
            yield piece


def _parse_json(text: str, place: str) -> object:
    """Return the value of a line, or of a whole file; a BadRow if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = first_line(error, 200).replace("line 1 column", "column")
        return BadRow(f"{place}: not valid JSON ({reason}).")


def _read_jsonl(file: Path, options: RowOptions) -> RawRows:
    with _open_text(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                place = f"{file}, line {number}"
                yield _parse_json(line, place), place


def _read_json(file: Path, options: RowOptions) -> RawRows:
    """Yield the entries of a list, or the rows of JSON lines, which `datasets` writes as .json."""
    with _open_text(file) as stream:
        if isinstance(_parse_json(stream.readline(), ""), dict):
            yield from _read_jsonl(file, options)
            return
        stream.seek(0)
        rows = _parse_json(stream.read(), str(file))
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        yield row, f"{file}, entry {number}"


def _check_delimiter(file: Path, header: str, expected: str, options: RowOptions) -> None:
    """Raise a UserError if the first line is one column, and several with another delimiter."""
    columns = {each: next(csv.reader([header], delimiter=each), []) for each in DELIMITERS}
    with contextlib.suppress(ValueError):
        format_of(columns[expected], options)
        return
    found = max(columns, key=lambda each: len(columns[each]))
    if len(columns[found]) > len(columns[expected]):
        raise UserError(
            f"{file} has {DELIMITERS[found]} between its columns, and a {type_of(file)} file must "
            f"have {DELIMITERS[expected]}: convert it, for example with pandas: read_csv(FILE, "
            f"sep={found!r}).to_csv(NEW, sep={expected!r}, index=False)."
        )


def _read_csv(file: Path, options: RowOptions) -> RawRows:
    csv.field_size_limit(1 << 30)  # the default, 128 kB, is less than a long document
    delimiter = "\t" if type_of(file) == ".tsv" else ","
    with _open_text(file, newline="") as stream:
        _check_delimiter(file, stream.readline(), delimiter, options)
        stream.seek(0)
        lines = csv.reader(stream, strict=True, delimiter=delimiter)
        names = next(lines, [])
        if len({*filter(None, names)}) < len([*filter(None, names)]):
            raise UserError(f"{file} has two columns of one name: {', '.join(map(shown, names))}.")
        for cells in lines:
            place = f"{file}, line {lines.line_num}"
            if cells and (len(names) == 1 or any(map(str.strip, cells))):  # else an empty line
                row = _row_of_cells(names, cells, options)
                problem = "it has more or fewer cells than the first line"
                yield row or BadRow(f"{place}: {problem}: quote texts with separators."), place


def _row_of_cells(
    names: list[str], cells: list[str], options: RowOptions
) -> dict[str, object] | None:
    """Return a row of a CSV file; None if it has more or fewer cells than the first line.

    Other programs end some lines with empty cells.
    """
    missing = names[len(cells) :]
    if any(map(str.strip, [*missing, *cells[len(names) :]])):
        return None
    row = dict(zip(names, [*cells, *[""] * len(missing)], strict=False))
    fits = [read.values() for _, read in formats_of(row, options)]
    if len(fits) > 1 and not any(row.get(column) for column in fits[0]):
        row = {name: cell for name, cell in row.items() if cell}  # as nulls in other tables
    return refused_rows.typed(row, dict(options.columns).values())


def _read_parquet(file: Path, options: RowOptions) -> RawRows:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file)
    columns, numbers = columns_to_read(table.schema_arrow.names, options, str(file)), count(1)
    for batch in table.iter_batches(columns=columns, batch_size=1024):
        for row in batch.to_pylist():
            yield row_of_table(row), f"{file}, row {next(numbers)}"


def _read_arrow(file: Path, options: RowOptions) -> RawRows:
    """Yield the rows of a file that `Dataset.save_to_disk` has written."""
    import datasets

    table = datasets.Dataset.from_file(str(file))
    columns = columns_to_read(table.column_names, options, str(file))
    for number, row in enumerate(table.select_columns(columns), 1):
        yield row_of_table(row), f"{file}, row {number}"


READERS = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
