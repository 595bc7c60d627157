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
import itertools
import json
import os
import re
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from support import progress
from support.cli.arguments import Arguments, held_out_share
from support.cli.paths import is_local_dataset
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
from support.errors import UserError, first_line, refused_as
from support.files.atomic import sha256_of
from support.files.folders import advise_include, count_types, describe_twins, files_of
from support.files.user_files import unique_keys

WIKITEXT = "Salesforce/wikitext"  # its short name on the hub no longer loads with `datasets` 5
READ_CHARACTERS = 1 << 16  # a text file is read in pieces of this length
COMPARED_BYTES = 1 << 16  # read at the beginning and at the end of a file to compare it
# Where a row is: {"file": number, "row": number in it}, or on the hub {"row", "state"}. JSON.
Position = dict[str, Any]
Content = Document | Example | BadRow
# A function from a position (None: the beginning) to the rows from there on.
Rows = Callable[[Position | None], Iterator[tuple[Position, Content]]]
# A row as it is in the file, with its place for messages; or a part that cannot be read.
RawRow = tuple[object, str] | BadRow


@dataclass(frozen=True)
class Source:
    """A corpus before tokenization."""

    # A digest that changes whenever the text may have changed. With --streaming, which never reads
    # the text completely, it covers the beginnings and ends of the files.
    fingerprint: str
    splits: Mapping[str, Rows]  # "train", and "validation" if the corpus has it
    counts: list[str] = field(default_factory=list)  # for each folder, its files of each type
    notices: list[str] = field(default_factory=list)  # about files that are not used
    advice: str = ""  # added to the message about a bad row
    one_file: bool = False  # a bad row that is the whole file leaves nothing


def evaluates_only(args: Arguments) -> bool:
    """Return whether the training data is not needed; a resumed run compares it."""
    return bool(args.eval_only and args.resume is None)


def open_source(name: str, args: Arguments, options: RowOptions) -> Source:
    """Open a corpus, and the text of --validation_file.

    With --eval_only, only the validation data if it does not depend on the training data.

    Args:
        name: "pydocs", "wikitext", a file, a folder, or a dataset on the hub.
        args: --validation_file, --include; for the hub --dataset_config, --dataset_revision,
            --train_split, --eval_split.
    Raises:
        UserError: the corpus does not exist or cannot be read, or has no training split or no known
            column.
    """
    if args.validation_file is not None:
        validation = _open_files(args.validation_file, args, options)
        held_out = {"validation": validation.splits["train"]}
        if evaluates_only(args):
            digest = hashlib.sha256(f"only\0{validation.fingerprint}".encode())
            return replace(validation, fingerprint=digest.hexdigest(), splits=held_out)
    if name == "pydocs":
        source = _open_pydocs()
    elif is_local_dataset(name):
        source = _open_files(name, args, options)
    else:
        source = _open_hub(name, args, options)
    if args.validation_file is None:
        return source
    digest = hashlib.sha256(f"{source.fingerprint}\0{validation.fingerprint}".encode())
    return replace(
        source,
        fingerprint=digest.hexdigest(),
        splits={**source.splits, **held_out},
        counts=source.counts + validation.counts,
        notices=source.notices + validation.notices,
        advice=source.advice or validation.advice,
    )


def open_for_streaming(args: Arguments, options: RowOptions, commit: str | None) -> Source:
    """Open the training split of --dataset for --streaming.

    Args:
        commit: of the dataset on the hub, the same on every rank; None for files.
    Raises:
        UserError: the corpus does not exist or cannot be read, or its columns have no known format.
    """
    digest = hashlib.sha256(f"{args.dataset_config}\0{args.text_column}".encode())
    if args.prompt_column or args.completion_column:  # checkpoints of runs without them stay valid
        digest.update(repr(options.columns).encode())
    if not is_local_dataset(args.dataset):
        digest.update(f"{args.dataset}\0{commit}".encode())
        if args.train_split:
            digest.update(f"\0{args.train_split}".encode())
        table = _stream_from_hub(args, commit)
        columns_of_table(list(next(iter(table.take(1)), {})), options, f"--dataset {args.dataset}")
        rows = partial(_rows_of_table, table, args.dataset, f"--dataset {args.dataset}", options)
        return Source(digest.hexdigest(), {"train": rows})
    found = files_of(Path(args.dataset), args.dataset, args.include)
    files, twins = distinct_files(found)
    for file in files:
        size, edges = _edges(file)
        digest.update(os.fsencode(file.name) + f"\0{size}".encode() + edges)
    return _source_of_files(args.dataset, digest.hexdigest(), files, twins, options)


def _open_pydocs() -> Source:
    """Open the Python language reference that CPython includes; its text differs by release."""
    from pydoc_data.topics import topics

    def rows(position: Position | None) -> Iterator[tuple[Position, Content]]:
        for number, name in enumerate(sorted(topics)):
            yield {"file": 0, "row": number}, Document(f"pydocs, {name}", [topics[name]])

    text = "\0".join(topics[name] for name in sorted(topics))
    return Source(hashlib.sha256(text.encode()).hexdigest(), {"train": rows})


# -------------------------------------------------------------------------------------------- files


@contextlib.contextmanager
def reading(what: Path | str) -> Iterator[None]:
    """Convert an error of reading in this context to a UserError that names `what`."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{what} {_not_text(error)}") from error
    except MemoryError as error:
        advice = "make it a .jsonl file (jq -c '.[]'), which is read line by line"
        raise UserError(f"{what} has a row that does not fit into memory: {advice}.") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or first_line(error, 200)
        raise UserError(f"{what} cannot be read: {reason}.") from error


def _not_text(error: UnicodeDecodeError) -> str:
    encoding = error.encoding.upper()
    return (
        f"is not {encoding} text (byte 0x{error.object[error.start]:02x}): unpack an archive, "
        "convert other text (iconv -f LATIN1 -t UTF-8), or leave the file out with --include."
    )


def type_of(file: Path) -> str:
    """Return the suffix that determines how a file is read, without .gz."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix != ".gz"), "")


def has_rows(file: Path) -> bool:
    """Return whether a file has rows; any other file is one document."""
    return type_of(file) in READERS


def distinct_files(files: list[Path]) -> tuple[list[Path], dict[Path, Path]]:
    """Return the files with each content once, and {other file: the first one with its content}.

    Only files with the same size, beginning and end are read completely.
    """
    alike: dict[tuple, list[Path]] = {}
    for file in files:
        size, edges = _edges(file)
        alike.setdefault((size, hashlib.sha256(edges).digest()), []).append(file)
    first_with: dict[str, Path] = {}
    twins = {}
    for file in (file for group in alike.values() if len(group) > 1 for file in group):
        with reading(file):
            first = first_with.setdefault(sha256_of(file), file)
        if first != file:
            twins[file] = first
    return [file for file in files if file not in twins], twins


def _edges(file: Path) -> tuple[int, bytes]:
    """Return a file's size in bytes, and its first and last COMPARED_BYTES joined."""
    with reading(file), open(file, "rb") as stream:
        size = file.stat().st_size
        begin = stream.read(COMPARED_BYTES)
        stream.seek(max(0, size - COMPARED_BYTES))
        return size, begin + stream.read(COMPARED_BYTES)


def _open_files(name: str, args: Arguments, options: RowOptions) -> Source:
    files, twins = distinct_files(files_of(Path(name), name, args.include))
    digest, states = hashlib.sha256(repr(options).encode()), {}
    for file in files:
        with reading(file):
            states[file] = _state_of(file)
            digest.update(type_of(file).encode() + bytes.fromhex(sha256_of(file)))
    source = _source_of_files(name, digest.hexdigest(), files, twins, options)

    def rows(position: Position | None) -> Iterator[tuple[Position, Content]]:
        yield from source.splits["train"](position)
        for file, state in states.items():
            with reading(file):
                if _state_of(file) != state:
                    raise UserError(
                        f"{file} has changed since the run started: start again when it is "
                        "complete."
                    )

    return replace(source, splits={"train": rows})


def _state_of(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _source_of_files(
    name: str, fingerprint: str, files: list[Path], twins: dict[Path, Path], options: RowOptions
) -> Source:
    is_folder = Path(name).is_dir()
    return Source(
        fingerprint,
        {"train": partial(_rows_of_files, files, options)},
        [f"{name}: {count_types([*files, *twins])}"] if is_folder else [],
        describe_twins(twins, "content"),
        advise_include(files),
        one_file=len(files) == 1,
    )


def _rows_of_files(
    files: list[Path], options: RowOptions, position: Position | None
) -> Iterator[tuple[Position, Content]]:
    first, skip = (position["file"], position["row"]) if position else (0, 0)
    for number in range(first, len(files)):
        for row, content in enumerate(contents_of_file(files[number], options)):
            if number > first or row >= skip:
                yield {"file": number, "row": row}, content


def contents_of_file(file: Path, options: RowOptions) -> Iterator[Content]:
    """Yield the rows of a file as documents and examples, or the only document of a text file.

    Raises:
        UserError: during iteration, also over the pieces of a document: the file cannot be read, or
            the rest of it is not of its format.
    """
    with reading(file):
        if has_rows(file):
            for row in READERS[type_of(file)](file, options):
                yield row if isinstance(row, BadRow) else read_row(*row, options)
            return
        pieces = _pieces_of(file)
        try:
            first = next(pieces, "")
        except UnicodeDecodeError as error:
            yield BadRow(f"{file} {_not_text(error)}", whole_file=True)
        else:
            text = itertools.chain([first], _guarded(pieces, file))
            yield TextFile(str(file), text, "text files")


def _open_text(file: Path, errors: str = "surrogateescape", newline: str | None = None) -> TextIO:
    """Open a file as text: UTF-8, also with a byte-order mark, or UTF-16 with one; also gzip.

    Args:
        errors: the default decodes a byte that is not UTF-8 to half of a surrogate pair, so that
            the row with this byte can be named.
    """
    binary: Any = gzip.open(file) if file.suffix.lower() == ".gz" else open(file, "rb")  # noqa: SIM115
    utf_16 = binary.peek(2)[:2] in (BOM_UTF16_LE, BOM_UTF16_BE)
    return io.TextIOWrapper(binary, "utf-16" if utf_16 else "utf-8-sig", errors, newline)


def _pieces_of(file: Path) -> Iterator[str]:
    with _open_text(file, "strict", newline="") as stream:
        while piece := stream.read(READ_CHARACTERS):
            yield piece


def _guarded(pieces: Iterator[str], file: Path) -> Iterator[str]:
    with reading(file):
        yield from pieces


def _parse_json(text: str, place: str, line: int | None = None) -> object | BadRow:
    """Parse one row, or a whole file."""
    place = f"{place}, line {line}" if line else place
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        where = place if line else f"{place}, line {error.lineno}"
        return BadRow(f"{where}, column {error.colno}: not valid JSON ({error.msg}).")
    except RecursionError:
        return BadRow(f"{place}: JSON that is nested too deeply.")
    except ValueError as error:  # a duplicate key; a number with more than Python's 4,300 digits
        return BadRow(f"{place}: {first_line(error, 200).split(';')[0]}.")


def _read_jsonl(file: Path, options: RowOptions) -> Iterator[RawRow]:
    with _open_text(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                row = _parse_json(line, str(file), number)
                yield row if isinstance(row, BadRow) else (row, f"{file}, line {number}")


def _read_json(file: Path, options: RowOptions) -> Iterator[RawRow]:
    """Yield the entries of a list, or the rows of JSON lines, which `datasets` writes as .json."""
    with _open_text(file) as stream:
        first = stream.readline()
        more = first.startswith("{") and any(line.strip() for line in stream)
    if more and not isinstance(_parse_json(first, str(file)), BadRow):
        yield from _read_jsonl(file, options)
        return
    with _open_text(file) as stream:
        rows = _parse_json(stream.read(), str(file))
    if isinstance(rows, dict) and not is_row(rows, options):  # {"data": [...]}
        lists = {key: value for key, value in rows.items() if isinstance(value, list)}
        if len(lists) > 1:
            rows = BadRow(
                f"{file} has several lists, {shorten(lists)}: write each to its own file, and name "
                "one with --validation_file."
            )
        else:
            rows = next(iter(lists.values()), rows)
    if isinstance(rows, BadRow):
        rows.whole_file = True
        yield rows
        return
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        yield row, f"{file}, entry {number}"


def _read_csv(file: Path, options: RowOptions) -> Iterator[RawRow]:
    csv.field_size_limit(1 << 30)  # the default, 128 kB, is less than a long document
    with _open_text(file, newline="") as stream:
        delimiter = "\t" if type_of(file) == ".tsv" else ","
        rows = csv.DictReader(stream, strict=True, delimiter=delimiter)
        while True:
            begin = rows.line_num + 1
            try:
                columns = rows.fieldnames or []
                if len(set(columns)) < len(columns):
                    yield BadRow(f"{file}, line 1: two columns have the same name.", True)
                    return
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                if "end of data" in str(error):  # the unclosed quote contains all following rows
                    problem = "a quote is opened here and not closed"
                    raise UserError(f"{file}, line {begin}: {problem}.") from error
                yield BadRow(f"{file}, line {begin}: {error}.")
                continue
            place = f"{file}, line {rows.line_num}"
            if None in row or None in row.values():
                yield BadRow(
                    f"{place}: it does not have {len(columns)} cells as the first line has: "
                    f"quote a text that has {'tabs' if delimiter != ',' else 'commas'}."
                )
            else:
                yield row, place


def _read_parquet(file: Path, options: RowOptions) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        names = table.schema_arrow.names
        columns = columns_of_table(names, options, str(file))
        if duplicates := [name for name in columns if names.count(name) > 1]:
            raise UserError(f"{file}: two columns have the same name, {duplicates[0]}.")
        for batch in table.iter_batches(columns=columns, batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield row, f"{file}, row {number}"
    except UserError as error:
        yield BadRow(str(error), whole_file=True)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if getattr(error, "errno", None):  # an error of the system, not of the file's content
            raise
        if number:
            raise UserError(
                f"{file}: what follows row {number} cannot be read: {first_line(error, 200)}"
            ) from error
        reason = first_line(error, 200)
        yield BadRow(f"{file} is not a Parquet file that can be read: {reason}", whole_file=True)


READERS = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}


# ------------------------------------------------------------------------------------------ the hub


def _builder_of(name: str, args: Arguments, revision: str | None) -> Any:
    """Return the `datasets.DatasetBuilder` of a dataset on the hub."""
    import datasets

    if not progress.on_terminal():
        datasets.disable_progress_bars()
    config = args.dataset_config
    if name == "wikitext":
        name, config = WIKITEXT, config or "wikitext-2-raw-v1"
    return datasets.load_dataset_builder(name, config, revision=revision)


def _loading(name: str) -> contextlib.AbstractContextManager[None]:
    problem = f"--dataset {name} is not a local file or folder, and cannot be loaded from the hub"
    return refused_as(problem, longest=200)


def _open_hub(name: str, args: Arguments, options: RowOptions) -> Source:
    """Download a dataset of the hub, unless it is in the cache, and open its splits."""
    with _loading(name):
        builder = _builder_of(name, args, args.dataset_revision)
        builder.download_and_prepare()
        wanted = {"train": args.train_split or "train"}
        # A split that is trained on is not evaluated on, unless it is named.
        unused = not re.search(r"\bvalidation\b", wanted["train"])
        if args.eval_split or ("validation" in builder.info.splits and unused):
            wanted["validation"] = args.eval_split or "validation"
        for flag, split in zip(("train_split", "eval_split"), wanted.values(), strict=False):
            for part in split.split("+"):
                _check_split(name, flag, part.partition("[")[0], builder.info.splits)
        if evaluates_only(args) and "validation" in wanted and held_out_share(args) is None:
            del wanted["train"]
        tables = {role: builder.as_dataset(split=split) for role, split in wanted.items()}
    flag = f"--dataset {name}"
    columns = columns_of_table(next(iter(tables.values())).column_names, options, flag)
    _check_revision(name, args.dataset_revision, list(tables.values()))
    digest = hashlib.sha256(repr((columns, options, name == "wikitext")).encode())
    splits: dict[str, Rows] = {}
    for role, table in tables.items():
        digest.update(f"{role}\0{table._fingerprint}".encode())  # of the commit and the split
        selected = table.select_columns(columns)
        splits[role] = partial(_rows_of_table, selected, name, f"{flag}, {role}", options)
    return Source(digest.hexdigest(), splits)


def _check_split(name: str, flag: str, split: str, known: Iterable[str]) -> None:
    if split not in known:
        raise UserError(
            f"--dataset {name} has no split named {split}; it has {', '.join(known)}: "
            f"choose one with --{flag}."
        )


def _check_revision(name: str, revision: str | None, tables: list[Any]) -> None:
    """Check that tables are of --dataset_revision if the hub cannot tell.

    Offline, the library loads the newest revision that is in its cache, in a folder with the name
    of the commit.
    """
    offline = revision and os.environ.get("HF_HUB_OFFLINE") == "1"
    files = [Path(entry["filename"]) for table in tables for entry in table.cache_files]
    if offline and not all(file.parent.name.startswith(str(revision)) for file in files):
        raise UserError(
            f"--dataset_revision {revision} of --dataset {name} cannot be told from others in "
            "the cache without the hub: run --prefetch with the same flags where there is a "
            "network, or name a commit."
        )


def _stream_from_hub(args: Arguments, commit: str | None) -> Any:
    """Return --train_split of the dataset on the hub as a datasets.IterableDataset."""
    split = args.train_split or "train"
    with _loading(args.dataset):
        splits = _builder_of(args.dataset, args, commit).as_streaming_dataset()
        _check_split(args.dataset, "train_split", split, splits)
        return splits[split]


def commit_on_hub(name: str, revision: str | None) -> str | None:
    """Return the commit hash of a dataset on the hub; None if the hub cannot be asked."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    unreachable: tuple[type[Exception], ...] = (HfHubHTTPError, OfflineModeIsEnabled, OSError)
    try:
        import httpx  # of huggingface_hub 1.0 and newer; before, its HTTP errors were OSErrors

        unreachable += (httpx.HTTPError,)
    except ImportError:
        pass
    try:
        return HfApi().dataset_info(WIKITEXT if name == "wikitext" else name, revision=revision).sha
    except unreachable:
        return None


def _rows_of_table(
    table: Any, name: str, where: str, options: RowOptions, position: Position | None
) -> Iterator[tuple[Position, Content]]:
    """Yield the rows of a datasets.Dataset or IterableDataset; those of WikiText are articles."""

    def rows() -> Iterator[tuple[Position, Content]]:
        number = position["row"] if position else 0
        if position:
            table.load_state_dict(position["state"])
        has_state = hasattr(table, "load_state_dict")
        iterator = iter(table)
        while True:
            state = table.state_dict() if has_state else None
            row = next(iterator, None)
            if row is None:
                return
            number += 1
            content = read_row(row, f"{where}, row {number}", options)
            yield {"row": number - 1, "state": state}, content

    with reading(where):
        yield from join_articles(rows()) if name == "wikitext" else rows()


def begins_article(line: str) -> bool:
    """Return whether a line of WikiText is the title of an article.

    A title is ` = Title = `; the heading of a section is ` = = Section = = `.
    """
    return not line.startswith(" = = ") and re.fullmatch(r" = [^=].* = \n?", line) is not None


def join_articles(lines: Iterable[tuple[Position, Content]]) -> Iterator[tuple[Position, Content]]:
    """Join the rows of WikiText, which are lines, to one document per article."""
    begin: Position = {}
    where, article = "", list[str]()
    for position, line in lines:
        if not isinstance(line, Document):
            yield position, line
            continue
        text = "".join(line.pieces)
        if begins_article(text) and article:
            yield begin, Document(where, article)
            article = []
        if not article:
            begin, where = position, line.where
        article.append(text)
    if article:
        yield begin, Document(where, article)
