"""The rows of a file in each format, as documents and examples.

A row of a JSON, CSV, Parquet or hub dataset has one of three forms:

    {"messages": [{"role": …, "content": …}, …]}   a conversation; the loss counts the assistant's
                                                   messages
    {"prompt": …, "completion": …}                 the loss counts the completion
    {"text": …}                                    a document; the loss counts all of it (another
                                                   key: --text_column)

Any other file is UTF-8 text, and one document. A row that cannot be used is a `BadRow`, which names
its file and line.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from support.errors import UserError, first_line
from support.files.user_files import printable, unique_keys

PIECE_CHARACTERS = 1 << 16  # a text file is read in pieces of this length
LONGEST_ROW = 1 << 30  # characters; a file with a longer row is probably not of its suffix's format
SHOWN_KEYS = 10  # keys of a row that a message lists
# Bytes of memory for each byte of a .json file while it is read; 2.3 were measured with rows of
# plain text.
JSON_IN_MEMORY = 3
# Keys of a message whose values would not be trained on; only the content is.
UNSUPPORTED = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


class BadRow(UserError):
    """A row that cannot be used, with its place and the reason; or a file that cannot be read."""

    def __init__(self, text: str):
        # The text may quote bytes that are not UTF-8.
        super().__init__(printable(text.encode(errors="replace").decode()))


@dataclass(frozen=True)
class Document:
    """A text; the loss counts all of it.

    Attributes:
        where: its file and line.
        pieces: the text, in one or more pieces.
        kind: always "text".
    """

    where: str
    pieces: Iterable[str]
    kind: str = "text"


@dataclass(frozen=True)
class TextFile(Document):
    """A text file, which is one document of any length."""


@dataclass(frozen=True)
class Example:
    """A conversation, or a prompt and its completion; the loss counts a part of it.

    Attributes:
        where: its file and line.
        messages: the conversation; None for a pair.
        prompt, completion: the pair; empty for a conversation.
    """

    where: str
    messages: list[dict] | None = None
    prompt: str = ""
    completion: str = ""

    @property
    def kind(self) -> str:
        """The kind of the row: "chat" or "pair"."""
        return "pair" if self.messages is None else "chat"

    def as_json(self) -> str:
        """Return its content as JSON, for a digest."""
        pair = [self.prompt, self.completion]
        return json.dumps(self.messages or pair, sort_keys=True)


# A row as it is in the file, with its place; or a part of the file that cannot be read.
Row = tuple[object, str] | BadRow


def kind_of(keys: Iterable[str], text_column: str | None) -> str | None:
    """Return the kind of a row with these keys: "chat", "pair" or "text"; None if unknown."""
    if text_column is None and "messages" in keys:
        return "chat"
    if text_column is None and "prompt" in keys and "completion" in keys:
        return "pair"
    return "text" if (text_column or "text") in keys else None


class OneKind:
    """A check that all rows of a corpus are of one kind.

    Attributes:
        kind: "text", "chat" or "pair", the kind of the first usable row; None before it.
    """

    def __init__(self):
        self.kind: str | None = None

    def check(self, row: Document | Example | BadRow) -> Document | Example | BadRow:
        """Return the row, or a BadRow if it is of another kind than the rows before it."""
        if isinstance(row, BadRow):
            return row
        self.kind = self.kind or row.kind
        if row.kind == self.kind:
            return row
        return BadRow(
            f"{row.where}: of kind {row.kind} among rows of kind {self.kind}: "
            "a corpus has one kind of rows."
        )


def _no_text(text_column: str | None, keys: Iterable) -> str:
    """Return a message for a row or table whose keys do not match any kind."""
    key_list = shorten(keys) or "nothing"
    if text_column:
        return f"no {text_column!r}, which --text_column names, but {key_list}."
    return (
        f"no 'text', no 'messages', and no 'prompt' with 'completion', but {key_list}: "
        "rename a key, or name the text with --text_column."
    )


def shorten(keys: Iterable) -> str:
    """Join keys with commas for a message: the first SHOWN_KEYS, with up to 40 characters each.

    A broken file may have millions of keys.
    """
    first = [str(key)[:40] for key in itertools.islice(keys, SHOWN_KEYS + 1)]
    return ", ".join(first[:SHOWN_KEYS]) + (", …" if len(first) > SHOWN_KEYS else "")


def read_row(row, where: str, text_column: str | None) -> Document | Example | BadRow:
    """Convert a row to a document or an example, or to a BadRow with the reason why it is neither.

    Args:
        row: a text, or an object with the keys of the module docstring.
        where: its file and line.
        text_column: see `sources.open_source`.
    """
    if isinstance(row, str):
        row = {text_column or "text": row}
    if not isinstance(row, dict):
        return BadRow(f"{where}: neither a text nor an object with keys such as text or messages.")
    kind = kind_of(row, text_column)
    if kind is None:
        return BadRow(f"{where}: {_no_text(text_column, row)}")
    try:
        if kind == "chat":
            return Example(where, _messages(row))
        if kind == "pair":
            return Example(where, None, _text(row, "prompt"), _text(row, "completion"))
        name = text_column or "text"
        # null is an empty document
        return Document(where, [_text({name: ""} if row[name] is None else row, name)])
    except ValueError as error:
        return BadRow(f"{where}: {error}.")


def _messages(row: dict) -> list[dict]:
    if row.get("tools"):
        raise ValueError("'tools' is not supported: only the messages are trained on")
    if not isinstance(row["messages"], list) or not row["messages"]:
        raise ValueError("'messages' is not a list of messages")
    return [_message(message) for message in row["messages"]]


def _message(message) -> dict:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("a message is not an object with 'role' and 'content'")
    if lost := [key for key in UNSUPPORTED if message.get(key)]:
        raise ValueError(
            f"a message has {lost[0]!r}, which is not supported: only its 'content' is trained on"
        )
    if message.get("weight") not in (None, 1):
        weight = reprlib.repr(message["weight"])
        raise ValueError(
            f"a message has the weight {weight}, which is not supported: every answer has weight 1"
        )
    return {"role": message["role"], "content": _text(message, "content")}


def _text(row: dict, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is not a text but {reprlib.repr(value)[:40]}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name!r} is not UTF-8 text (iconv -f LATIN1 -t UTF-8 converts a file)"
        ) from error
    return value


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


def contents_of_file(file: Path, text_column: str | None) -> Iterator[Document | Example | BadRow]:
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
            for row in READERS[file.suffix.lower()](file, text_column):
                yield row if isinstance(row, BadRow) else read_row(*row, text_column)
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


def _read_jsonl(file: Path, text_column: str | None) -> Iterator[Row]:
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


def _read_json(file: Path, text_column: str | None) -> Iterator[Row]:
    import psutil

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
    if isinstance(rows, dict) and kind_of(rows, text_column) is None:  # {"data": [...]}
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


def _read_csv(file: Path, text_column: str | None) -> Iterator[Row]:
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


def _read_parquet(file: Path, text_column: str | None) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = columns_of_text(table.schema_arrow.names, text_column, str(file))
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


def columns_of_text(columns: list[str], text_column: str | None, where: str) -> list[str]:
    """Return the columns of a table that are read.

    Args:
        columns: names of the table's columns.
        text_column: see `sources.open_source`.
        where: the table, for messages.
    Raises:
        UserError: the columns do not match any kind of row.
    """
    kind = kind_of(columns, text_column)
    if kind is None:
        raise UserError(f"{where}: {_no_text(text_column, columns)}")
    names = {"chat": ["messages", "tools"], "pair": ["prompt", "completion"]}
    return [name for name in names.get(kind, [text_column or "text"]) if name in columns]


READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
