"""The rows of a corpus: documents, conversations and pairs of prompt and completion.

Every use of a corpus reads it through one generator: the token cache, --streaming, --show_sample
and --prefetch. It yields (position before the row, row), so that a stream can continue anywhere.
The keys of a row determine its format; a file without rows is text, and one document. A row that
cannot be used is a `BadRow`.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from support import console
from support.cli.arguments import Arguments, held_out_share
from support.cli.checks import is_local_dataset
from support.cluster.context import DistContext
from support.errors import UserError, first_line, refused_as
from support.files.atomic import digest_of_json, sha256_of
from support.files.user_files import files_of, printable, shown

WIKITEXT = "Salesforce/wikitext"  # its short name on the hub no longer loads with `datasets` 5
READ_CHARACTERS = 1 << 16  # a text file is read in pieces of this length
COMPARED_BYTES = 1 << 16  # of the beginning and the end of a file, in the digest of a stream
# A format's name, the keys that its rows have, and further keys that are read. The first that fits
# is used.
FORMATS = (
    ("messages", ("messages",), ()),
    ("ShareGPT (conversations)", ("conversations",), ("system",)),
    ("prompt and completion", ("prompt", "completion"), ()),
    ("Alpaca (instruction, input, output)", ("instruction", "output"), ("input", "system")),
    ("text", ("text",), ()),
)
# Keys whose values would not be trained on. A row with a value of one of them cannot be used,
# except a text, of which they are not read.
UNSUPPORTED = (
    *("tools", "functions", "history", "images", "image", "videos", "video", "audios", "audio"),
)


class BadRow(UserError):
    """A row that cannot be used, with its place and the reason."""

    def __init__(self, text: str) -> None:
        # The text may quote bytes that are not UTF-8.
        super().__init__(printable(text.encode(errors="replace").decode()))


@dataclass(frozen=True)
class Row:
    """A document, a conversation, or a prompt and its completion."""

    where: str  # its file and line
    kind: str = "text"  # or "chat", whose answers have a loss, or "pair", whose completion has one
    format: str = "text"  # name of its format, for the user
    pieces: Iterable[str] = ()  # of a document: the text, in one or more pieces
    is_file: bool = False  # whether the document is a text file, of any length
    messages: Sequence[dict] = ()  # of a conversation
    context: int = 0  # messages at the beginning of a conversation that have no loss
    prompt: str = ""
    completion: str = ""

    def as_json(self) -> str:
        """Return the content of a conversation or a pair as JSON, for a digest."""
        content = [self.prompt, self.completion] if self.kind == "pair" else self.messages
        return json.dumps([content, self.context] if self.context else content, sort_keys=True)


# Where a row is: {"file": number, "row": number in it}, or on the hub {"row", "state"}. JSON.
Position = dict[str, Any]
PlacedRows = Iterator[tuple[Position, Row | BadRow]]
RawRows = Iterator[tuple[Any, str]]  # the value of a row, or a BadRow; and its place, for messages
# A function from a position (None: the beginning) to the rows from there on.
Rows = Callable[[Position | None], PlacedRows]


class Source(NamedTuple):
    """A corpus before tokenization."""

    fingerprint: str  # a digest that changes whenever the text may have changed
    splits: dict[str, Rows]  # "train", and "validation" if the corpus has it


class RowOptions(NamedTuple):
    """How rows are read."""

    # (key of a format, the user's column for it): --text_column, --prompt_column and
    # --completion_column. Only formats with these keys are considered.
    columns: tuple[tuple[str, str], ...] = ()
    chat_template: str | dict | None = None  # of the tokenizer

    @classmethod
    def of(cls, args: Arguments, tokenizer: Any) -> RowOptions:
        """Return the options for a run's flags and tokenizer."""
        columns = {key: getattr(args, f"{key}_column") for key in ("text", "prompt", "completion")}
        named = tuple((key, name) for key, name in columns.items() if name)
        return cls(named, tokenizer.chat_template)


# ---------------------------------------------------------------------------------- formats of rows


def format_of(keys: Iterable[str], options: RowOptions) -> tuple[str, dict[str, str]]:
    """Return the name of the format that fits, and {key: its column} of the keys that it reads.

    Raises:
        ValueError: a row or table with these keys has no known format.
    """
    found, columns, wanted = list(keys), dict(options.columns), []
    for name, required, optional in FORMATS:
        if columns.keys() <= set(required):
            read = {key: columns.get(key, key) for key in (*required, *optional)}
            names = list(read.values())[: len(required)]
            if set(names) <= set(found):
                return name, read
            wanted.append(" with ".join(map(repr, names)))
    raise ValueError(
        f"no {', no '.join(wanted)}, but {shown(', '.join(map(str, found))) or 'nothing'}: rename "
        "a key, or name one with --text_column, --prompt_column or --completion_column"
    )


def columns_of_table(columns: list[str], options: RowOptions, where: str) -> list[str]:
    """Return the columns of a table that are read; `where` is the table, for messages."""
    try:
        name, read = format_of(columns, options)
    except ValueError as error:
        raise UserError(f"{where}: {error}.") from error
    also = () if name == "text" else UNSUPPORTED
    return [column for column in (*read.values(), *also) if column in columns]


def read_row(row: Any, where: str, options: RowOptions) -> Row | BadRow:
    """Convert a text or an object with the keys of a format; `where` is its place, for messages."""
    if isinstance(row, BadRow):
        return row
    if isinstance(row, str):
        row = {dict(options.columns).get("text", "text"): row}
    try:
        if not isinstance(row, dict):
            raise ValueError("neither a text nor an object with keys such as text or messages")
        name, columns = format_of(row, options)
        values = {key: row.get(column) for key, column in columns.items()}
        if name == "text":
            text = "" if values["text"] is None else values["text"]
            if not isinstance(text, str):
                raise ValueError(f"'text' is not a text but {shown(text, 40)}")
            text.encode()
            return Row(where, pieces=[text])
        if lost := [key for key in UNSUPPORTED if row.get(key)]:
            raise ValueError(f"{lost[0]!r} is not supported: only text is trained on")
        from support.data import chat

        return Row(where, **{"format": name, **chat.convert(values, options.chat_template)})
    except UnicodeEncodeError:
        return BadRow(f"{where}: not UTF-8 text (iconv -f LATIN1 -t UTF-8 converts a file).")
    except ValueError as error:
        return BadRow(f"{where}: {error}.")


def check_kind(row: Row | BadRow, facts: dict[str, Any]) -> Row | BadRow:
    """Return the row, or a BadRow if it is of another kind than the rows before it.

    `facts` gets the "kind" of the rows (None before the first one) and the list of "formats".
    """
    if isinstance(row, BadRow):
        return row
    facts["kind"] = facts["kind"] or row.kind
    if row.kind != facts["kind"]:
        return BadRow(f"{row.where}: of kind {row.kind} among rows of kind {facts['kind']}.")
    if row.format not in facts["formats"]:
        facts["formats"].append(row.format)
    return row


# ------------------------------------------------------------------------------------------ sources


def evaluates_only(args: Arguments) -> bool:
    """Return whether the training data is not needed; a resumed run compares it."""
    return bool(args.eval_only and args.resume is None)


def open_source(name: str, args: Arguments, options: RowOptions) -> Source:
    """Open a corpus ("pydocs", a file, a folder, or a dataset on the hub) and --validation_file.

    With --eval_only, only the validation data if it does not depend on the training data.
    """
    corpus = Source("", {})
    if not (args.validation_file and evaluates_only(args)):
        if name == "pydocs":
            corpus = _open_pydocs()
        else:
            corpus = (_open_files if is_local_dataset(name) else _open_hub)(name, args, options)
    if args.validation_file is None:
        return corpus
    held_out = _open_files(args.validation_file, args, options)
    digest = hashlib.sha256(f"{corpus.fingerprint}\0{held_out.fingerprint}".encode())
    return Source(digest.hexdigest(), {**corpus.splits, "validation": held_out.splits["train"]})


def open_for_streaming(args: Arguments, options: RowOptions, ctx: DistContext) -> Source:
    """Open the training split of --dataset for --streaming; every rank must call it.

    The fingerprint covers the beginnings and ends of files, which are never read completely.
    """
    name = args.dataset
    digest = hashlib.sha256(f"{args.dataset_config}\0{args.text_column}".encode())
    if args.prompt_column or args.completion_column:  # checkpoints of runs without them stay valid
        digest.update(repr(options.columns).encode())
    if is_local_dataset(name):
        files = files_of(Path(name), name, args.include)
        for file in files:
            with reading(file), open(file, "rb") as stream:
                size, begin = file.stat().st_size, stream.read(COMPARED_BYTES)
                stream.seek(max(0, size - COMPARED_BYTES))
                edges = begin + stream.read(COMPARED_BYTES)
                digest.update(os.fsencode(file.name) + f"\0{size}".encode() + edges)
        return Source(digest.hexdigest(), {"train": partial(_rows_of_files, files, options)})
    # All ranks read the same commit, even if the dataset changes on the hub meanwhile.
    commit = _builder_of(name, args, args.dataset_revision).hash if ctx.is_main else None
    commit = ctx.broadcast_from_rank0(commit)
    with _loading(name):
        builder = _builder_of(name, args, commit)
        table = builder.as_streaming_dataset(split=args.train_split or "train")
    digest.update(f"{name}\0{commit}".encode())
    digest.update(f"\0{args.train_split}".encode() if args.train_split else b"")
    rows = partial(_rows_of_table, table, name, f"--dataset {name}", options)
    return Source(digest.hexdigest(), {"train": rows})


def _open_pydocs() -> Source:
    """Open the Python language reference that CPython includes; its text differs by release."""
    from pydoc_data.topics import topics

    def rows(position: Position | None) -> PlacedRows:
        for number, name in enumerate(sorted(topics)):
            yield {"file": 0, "row": number}, Row(f"pydocs, {name}", pieces=[topics[name]])

    text = "\0".join(topics[name] for name in sorted(topics))
    return Source(hashlib.sha256(text.encode()).hexdigest(), {"train": rows})


# -------------------------------------------------------------------------------------------- files


def _open_files(name: str, args: Arguments, options: RowOptions) -> Source:
    files, digest = files_of(Path(name), name, args.include), hashlib.sha256(repr(options).encode())
    times = {}
    for file in files:
        with reading(file):
            times[file] = file.stat().st_mtime_ns
            digest.update(type_of(file).encode() + bytes.fromhex(sha256_of(file)))

    def rows(position: Position | None) -> PlacedRows:
        yield from _rows_of_files(files, options, position)
        for file in files:  # the tokens are stored under the digest of what it was
            if file.stat().st_mtime_ns != times[file]:
                raise UserError(f"{file} has changed since the run started: start again.")

    return Source(digest.hexdigest(), {"train": rows})


def _rows_of_files(files: list[Path], options: RowOptions, position: Position | None) -> PlacedRows:
    first, skip = (position["file"], position["row"]) if position else (0, 0)
    for number in range(first, len(files)):
        for row, content in enumerate(rows_of_file(files[number], options)):
            if number > first or row >= skip:
                yield {"file": number, "row": row}, content


@contextlib.contextmanager
def reading(what: Path | str) -> Iterator[None]:
    """Convert an error of reading in this context to a UserError that names `what`."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"{what} is not {error.encoding.upper()} text: unpack an archive, convert other text "
            "(iconv -f LATIN1 -t UTF-8), or leave the file out with --include."
        ) from error
    except (OSError, EOFError, ValueError, zlib.error, csv.Error) as error:  # also of pyarrow
        reason = getattr(error, "strerror", None) or first_line(error, 200)
        raise UserError(f"{what} cannot be read: {reason}.") from error


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
            yield from (read_row(row, place, options) for row, place in read(file, options))
        return
    yield Row(str(file), format="text files", pieces=_pieces_of(file), is_file=True)


def _open_text(file: Path, errors: str = "surrogateescape", newline: str | None = None) -> TextIO:
    """Open a file as text: UTF-8, also with a byte-order mark, or UTF-16 with one; also gzip.

    A byte that is not UTF-8 becomes half of a surrogate pair, so that its row can be named.
    """
    binary: Any = gzip.open(file) if file.suffix.lower() == ".gz" else open(file, "rb")  # noqa: SIM115
    utf_16 = binary.peek(2)[:2] in (BOM_UTF16_LE, BOM_UTF16_BE)
    return io.TextIOWrapper(binary, "utf-16" if utf_16 else "utf-8-sig", errors, newline)


def _pieces_of(file: Path) -> Iterator[str]:
    with reading(file), _open_text(file, "strict", newline="") as stream:
        while piece := stream.read(READ_CHARACTERS):
            yield piece


def _parse_json(text: str, place: str) -> Any:
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


def _read_csv(file: Path, options: RowOptions) -> RawRows:
    csv.field_size_limit(1 << 30)  # the default, 128 kB, is less than a long document
    with _open_text(file, newline="") as stream:
        rows = csv.DictReader(
            stream, strict=True, delimiter="\t" if type_of(file) == ".tsv" else ","
        )
        names = rows.fieldnames or []
        if len({*names}) < len(names):
            raise UserError(f"{file} has two columns of one name: {', '.join(map(shown, names))}.")
        for row in rows:
            place = f"{file}, line {rows.line_num}"
            if None in row or None in row.values():
                problem = "it has more or fewer cells than the first line"
                yield BadRow(f"{place}: {problem}: quote texts with separators."), place
            else:
                yield row, place


def _read_parquet(file: Path, options: RowOptions) -> RawRows:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file)
    columns, numbers = columns_of_table(table.schema_arrow.names, options, str(file)), count(1)
    for batch in table.iter_batches(columns=columns, batch_size=1024):
        yield from ((row, f"{file}, row {next(numbers)}") for row in batch.to_pylist())


READERS = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}


# ------------------------------------------------------------------------------------------ the hub


def _loading(name: str) -> contextlib.AbstractContextManager[None]:
    problem = f"--dataset {name} (its --train_split, --eval_split) is no local file, and cannot be "
    return refused_as(f"{problem}loaded from the hub", longest=200)


def _builder_of(name: str, args: Arguments, revision: str | None) -> Any:
    """Return the `datasets.DatasetBuilder` of a dataset on the hub; its hash is the commit."""
    import datasets

    if not console.on_terminal():
        datasets.disable_progress_bars()
    config = args.dataset_config
    if name == "wikitext":
        name, config = WIKITEXT, config or "wikitext-2-raw-v1"
    with _loading(name):
        return datasets.load_dataset_builder(name, config, revision=revision)


def _open_hub(name: str, args: Arguments, options: RowOptions) -> Source:
    """Download a dataset of the hub, unless it is in the cache, and open its splits."""
    revision, offline = args.dataset_revision, os.environ.get("HF_HUB_OFFLINE") == "1"
    builder = _builder_of(name, args, revision)
    # Offline, the library loads the newest commit that is in its cache.
    if revision and offline and not str(builder.hash).startswith(revision):
        raise UserError(
            f"--dataset_revision {revision} of --dataset {name} is not in the cache: run "
            "--prefetch with the same flags where there is a network, or name a commit."
        )
    with _loading(name):
        builder.download_and_prepare()
        wanted = {"train": args.train_split or "train"}
        # A split that is trained on is not evaluated on, unless it is named.
        unused = not re.search(r"\bvalidation\b", wanted["train"])
        if args.eval_split or ("validation" in builder.info.splits and unused):
            wanted["validation"] = args.eval_split or "validation"
        if evaluates_only(args) and "validation" in wanted and held_out_share(args) is None:
            del wanted["train"]
        tables = {role: builder.as_dataset(split=split) for role, split in wanted.items()}
    flag = f"--dataset {name}"
    columns = columns_of_table(next(iter(tables.values())).column_names, options, flag)
    splits: dict[str, Rows] = {}
    for role, table in tables.items():
        selected = table.select_columns(columns)
        splits[role] = partial(_rows_of_table, selected, name, f"{flag}, {role}", options)
    commits = [(role, table._fingerprint) for role, table in tables.items()]
    return Source(digest_of_json([columns, options, name == "wikitext", commits]), splits)


def _rows_of_table(
    table: Any, name: str, where: str, options: RowOptions, position: Position | None
) -> PlacedRows:
    """Yield the rows of a datasets.Dataset or IterableDataset; those of WikiText are articles."""

    def rows() -> PlacedRows:
        if position:
            table.load_state_dict(position["state"])
        is_stream, iterator = hasattr(table, "state_dict"), iter(table)
        for number in count(position["row"] if position else 0):
            place = {"row": number, "state": table.state_dict() if is_stream else None}
            if (row := next(iterator, None)) is None:
                return
            yield place, read_row(row, f"{where}, row {number + 1}", options)

    with reading(where):
        yield from join_articles(rows()) if name == "wikitext" else rows()


def join_articles(lines: PlacedRows) -> PlacedRows:
    """Join the rows of WikiText, which are lines, to one document per article.

    A line with the title of an article is ` = Title = `; that of a section is ` = = Title = = `.
    """
    begin: Position = {}
    where, article = "", list[str]()
    for position, line in lines:
        if isinstance(line, BadRow):
            yield position, line
            continue
        text = "".join(line.pieces)
        if article and re.fullmatch(r" = [^=].* = \n?", text):
            yield begin, Row(where, pieces=article)
            article = []
        if not article:
            begin, where = position, line.where
        article.append(text)
    if article:
        yield begin, Row(where, pieces=article)
