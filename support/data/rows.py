"""The rows of a corpus as documents and examples: from files, from the hub, or Python's reference.

Every use of a corpus reads it through one generator: the token cache, --streaming, --show_sample
and --prefetch. It yields (position before the row, row), so that a stream can continue anywhere. A
row that cannot be used is a `BadRow`.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, TextIO

from support import console as progress
from support.cli.arguments import Arguments, held_out_share
from support.cli.checks import is_local_dataset
from support.cluster.context import DistContext
from support.data.formats import BadRow, Content, Document, RowOptions, columns_of_table, read_row
from support.errors import UserError, first_line, refused_as
from support.files.atomic import sha256_of
from support.files.folders import count_types, files_of
from support.files.user_files import shown

WIKITEXT = "Salesforce/wikitext"  # its short name on the hub no longer loads with `datasets` 5
READ_CHARACTERS = 1 << 16  # a text file is read in pieces of this length
COMPARED_BYTES = 1 << 16  # of the beginning and the end of a file, in the digest of a stream
# Where a row is: {"file": number, "row": number in it}, or on the hub {"row", "state"}. JSON.
Position = dict[str, Any]
PlacedRows = Iterator[tuple[Position, Content]]
# A function from a position (None: the beginning) to the rows from there on.
Rows = Callable[[Position | None], PlacedRows]


@dataclass(frozen=True)
class Source:
    """A corpus before tokenization."""

    fingerprint: str  # a digest that changes whenever the text may have changed
    splits: Mapping[str, Rows]  # "train", and "validation" if the corpus has it
    counts: list[str] = field(default_factory=list)  # for each folder, its files of each type


def evaluates_only(args: Arguments) -> bool:
    """Return whether the training data is not needed; a resumed run compares it."""
    return bool(args.eval_only and args.resume is None)


def open_source(name: str, args: Arguments, options: RowOptions) -> Source:
    """Open a corpus ("pydocs", a file, a folder, or a dataset on the hub) and --validation_file.

    With --eval_only, only the validation data if it does not depend on the training data.

    Raises:
        UserError: the corpus does not exist or cannot be read, or has no known split or column.
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
    splits = {**corpus.splits, "validation": held_out.splits["train"]}
    return Source(digest.hexdigest(), splits, corpus.counts + held_out.counts)


def open_for_streaming(args: Arguments, options: RowOptions, ctx: DistContext) -> Source:
    """Open the training split of --dataset for --streaming; every rank must call it.

    The fingerprint covers the beginnings and ends of files, which are never read completely.

    Raises:
        UserError: the corpus does not exist or cannot be read.
    """
    name = args.dataset
    digest = hashlib.sha256(f"{args.dataset_config}\0{args.text_column}".encode())
    if args.prompt_column or args.completion_column:  # checkpoints of runs without them stay valid
        digest.update(repr(options.columns).encode())
    if not is_local_dataset(name):
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
    files = files_of(Path(name), name, args.include)
    for file in files:
        with reading(file), open(file, "rb") as stream:
            size, begin = file.stat().st_size, stream.read(COMPARED_BYTES)
            stream.seek(max(0, size - COMPARED_BYTES))
            edges = begin + stream.read(COMPARED_BYTES)
            digest.update(os.fsencode(file.name) + f"\0{size}".encode() + edges)
    return _source_of_files(name, files, digest.hexdigest(), options)


def _open_pydocs() -> Source:
    """Open the Python language reference that CPython includes; its text differs by release."""
    from pydoc_data.topics import topics

    def rows(position: Position | None) -> PlacedRows:
        for number, name in enumerate(sorted(topics)):
            yield {"file": 0, "row": number}, Document(f"pydocs, {name}", [topics[name]])

    text = "\0".join(topics[name] for name in sorted(topics))
    return Source(hashlib.sha256(text.encode()).hexdigest(), {"train": rows})


# -------------------------------------------------------------------------------------------- files


def _open_files(name: str, args: Arguments, options: RowOptions) -> Source:
    files = files_of(Path(name), name, args.include)
    digest, times = hashlib.sha256(repr(options).encode()), {}
    for file in files:
        with reading(file):
            times[file] = file.stat().st_mtime_ns
            digest.update(type_of(file).encode() + bytes.fromhex(sha256_of(file)))
    source = _source_of_files(name, files, digest.hexdigest(), options)

    def rows(position: Position | None) -> PlacedRows:
        yield from source.splits["train"](position)
        for file in files:  # the tokens are stored under the digest of what it was
            if file.stat().st_mtime_ns != times[file]:
                raise UserError(f"{file} has changed since the run started: start again.")

    return replace(source, splits={"train": rows})


def _source_of_files(name: str, files: list[Path], digest: str, options: RowOptions) -> Source:
    def rows(position: Position | None) -> PlacedRows:
        alone = len(files) == 1
        first, skip = (position["file"], position["row"]) if position else (0, 0)
        for number in range(first, len(files)):
            for row, content in enumerate(contents_of_file(files[number], options, alone)):
                if number > first or row >= skip:
                    yield {"file": number, "row": row}, content

    counts = [f"{name}: {count_types(files)}"] if Path(name).is_dir() else []
    return Source(digest, {"train": rows}, counts)


@contextlib.contextmanager
def reading(what: Path | str) -> Iterator[None]:
    """Convert an error of reading in this context to a UserError that names `what`."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"{what} is not {error.encoding.upper()} text (byte "
            f"0x{error.object[error.start]:02x}): unpack an archive, convert other text (iconv -f "
            "LATIN1 -t UTF-8), or leave the file out with --include."
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or first_line(error, 200)
        raise UserError(f"{what} cannot be read: {reason}.") from error


def type_of(file: Path) -> str:
    """Return the suffix that determines how a file is read, without .gz."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix != ".gz"), "")


def contents_of_file(file: Path, options: RowOptions, alone: bool = False) -> Iterator[Content]:
    """Yield the rows of a file, or the only document of a text file.

    Args:
        alone: whether the corpus has no other file, so that a text file cannot be left out.
    Raises:
        UserError: during iteration, also over the pieces of a document: the file cannot be read, or
            the rest of it is not of its format.
    """
    if type_of(file) in READERS:
        with reading(file):
            yield from READERS[type_of(file)](file, options)
        return
    pieces = _pieces_of(file)
    try:
        first = next(pieces, "")
    except UserError as error:
        if alone:
            raise
        yield BadRow(str(error))
    else:
        yield Document(str(file), chain([first], pieces), "text files", is_file=True)


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


def _parse_json(text: str, place: str, is_file: bool = False) -> Any:
    """Return the value of one line or of a whole file, or a BadRow."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError):
            place += f", line {error.lineno}" if is_file else ""
            place += f", column {error.colno}"
        reason = getattr(error, "msg", None) or first_line(error, 200)
        return BadRow(f"{place}: not valid JSON ({reason}).")


def _read_jsonl(file: Path, options: RowOptions) -> Iterator[Content]:
    with _open_text(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                place = f"{file}, line {number}"
                yield read_row(_parse_json(line, place), place, options)


def _read_json(file: Path, options: RowOptions) -> Iterator[Content]:
    """Yield the entries of a list, or the rows of JSON lines, which `datasets` writes as .json."""
    with _open_text(file) as stream:
        first = _parse_json(stream.readline(), "")
        if isinstance(first, dict) and any(line.strip() for line in stream):
            yield from _read_jsonl(file, options)
            return
        stream.seek(0)
        rows = _parse_json(stream.read(), str(file), is_file=True)
    if isinstance(rows, dict) and isinstance(read_row(rows, "", options), BadRow):
        lists = [value for value in rows.values() if isinstance(value, list)]
        rows = lists[0] if len(lists) == 1 else rows  # {"data": [...]}
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        yield read_row(row, f"{file}, entry {number}", options)


def _check_names(columns: Sequence[str], file: Path) -> None:
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise UserError(f"{file} has two columns with the name {shown(twice[0])}: rename one.")


def _read_csv(file: Path, options: RowOptions) -> Iterator[Content]:
    csv.field_size_limit(1 << 30)  # the default, 128 kB, is less than a long document
    delimiter, line = "\t" if type_of(file) == ".tsv" else ",", 1
    with _open_text(file, newline="") as stream:
        rows = csv.DictReader(stream, strict=True, delimiter=delimiter)
        try:
            _check_names(rows.fieldnames or (), file)
            for row in rows:
                line, cells = rows.line_num, len(rows.fieldnames or ())
                if None in row or None in row.values():
                    problem = f"it does not have {cells} cells as the first line has"
                    yield BadRow(f"{file}, line {line}: {problem}: quote texts with separators.")
                else:
                    yield read_row(row, f"{file}, line {line}", options)
        except csv.Error as error:  # the unclosed quote contains all following rows
            problem = f"{error}: a quote is not closed, or not doubled inside a text"
            raise UserError(f"{file}, after line {line}: {problem}.") from error


def _read_parquet(file: Path, options: RowOptions) -> Iterator[Content]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        _check_names(table.schema_arrow.names, file)
        columns, numbers = columns_of_table(table.schema_arrow.names, options, str(file)), count(1)
        for batch in table.iter_batches(columns=columns, batch_size=1024):
            for row in batch.to_pylist():
                yield read_row(row, f"{file}, row {next(numbers)}", options)
    except pyarrow.ArrowException as error:
        raise UserError(f"{file} cannot be read: {first_line(error, 200)}") from error


READERS = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}


# ------------------------------------------------------------------------------------------ the hub


def _builder_of(name: str, args: Arguments, revision: str | None) -> Any:
    """Return the `datasets.DatasetBuilder` of a dataset on the hub; its hash is the commit."""
    import datasets

    if not progress.on_terminal():
        datasets.disable_progress_bars()
    config = args.dataset_config
    if name == "wikitext":
        name, config = WIKITEXT, config or "wikitext-2-raw-v1"
    with _loading(name):
        return datasets.load_dataset_builder(name, config, revision=revision)


def _loading(name: str) -> contextlib.AbstractContextManager[None]:
    problem = f"--dataset {name} (its --train_split, --eval_split) is no local file, and cannot be "
    return refused_as(f"{problem}loaded from the hub", longest=200)


def _open_hub(name: str, args: Arguments, options: RowOptions) -> Source:
    """Download a dataset of the hub, unless it is in the cache, and open its splits."""
    revision = args.dataset_revision
    builder = _builder_of(name, args, revision)
    # Offline, the library loads the newest commit that is in its cache.
    offline = os.environ.get("HF_HUB_OFFLINE") == "1"
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
    digest = hashlib.sha256(repr((columns, options, name == "wikitext")).encode())
    splits: dict[str, Rows] = {}
    for role, table in tables.items():
        digest.update(f"{role}\0{table._fingerprint}".encode())  # of the commit and the split
        selected = table.select_columns(columns)
        splits[role] = partial(_rows_of_table, selected, name, f"{flag}, {role}", options)
    return Source(digest.hexdigest(), splits)


def _rows_of_table(
    table: Any, name: str, where: str, options: RowOptions, position: Position | None
) -> PlacedRows:
    """Yield the rows of a datasets.Dataset or IterableDataset; those of WikiText are articles."""

    def rows() -> PlacedRows:
        if position:
            table.load_state_dict(position["state"])
        has_state = hasattr(table, "load_state_dict")
        iterator = iter(table)
        for number in count(position["row"] if position else 0):
            state = table.state_dict() if has_state else None
            row = next(iterator, None)
            if row is None:
                return
            content = read_row(row, f"{where}, row {number + 1}", options)
            yield {"row": number, "state": state}, content

    with reading(where):
        yield from join_articles(rows()) if name == "wikitext" else rows()


def join_articles(lines: PlacedRows) -> PlacedRows:
    """Join the rows of WikiText, which are lines, to one document per article.

    A line with the title of an article is ` = Title = `; that of a section is ` = = Title = = `.
    """
    begin: Position = {}
    where, article = "", list[str]()
    for position, line in lines:
        if not isinstance(line, Document):
            yield position, line
            continue
        text = "".join(line.pieces)
        if article and re.fullmatch(r" = [^=].* = \n?", text):
            yield begin, Document(where, article)
            article = []
        if not article:
            begin, where = position, line.where
        article.append(text)
    if article:
        yield begin, Document(where, article)
