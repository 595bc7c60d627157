"""From --dataset to documents and examples: every source as one stream, its bad rows named by file
and line.

A row of a JSON, CSV, Parquet or hub dataset is one of three:

    {"messages": [{"role": …, "content": …}, …]}      a conversation; what the assistant says is learned
    {"prompt": …, "completion": …}                    the completion is learned
    {"text": …}                                       a document, all of it is learned (another key: --text_column)

Any other file is UTF-8 text, and one document.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import itertools
import json
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from support import progress
from support.cli.validate import is_local_dataset
from support.errors import UserError
from support.files.atomic import sha256_of
from support.files.folders import advise_include, count_types, describe_twins, files_of
from support.files.user_files import printable

PIECE_CHARACTERS = 1 << 16  # of a text file that are read at a time
LONGEST_ROW = 1 << 30  # characters; a longer one is taken for a file that is not what its name says
SHOWN_KEYS = 10  # of a row, in a message
# bytes that reading a .json file takes for each of its bytes; 2.3 were measured with rows of plain
# text
JSON_IN_MEMORY = 3
NOT_LEARNED = (
    "tool_calls",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
)  # of a message, beside its content
WIKITEXT = "Salesforce/wikitext"  # the hub's short name for it no longer loads with `datasets` 5


class BadRow(UserError):
    """A row that cannot be used: where it is, and why; of a file that cannot be read, the file."""

    def __init__(self, text: str):
        super().__init__(
            printable(text.encode(errors="replace").decode())
        )  # it may quote bytes that are no text


@dataclass(frozen=True)
class Document:
    """A text, all of which is learned.

    Attributes:
        where: its file and line.
        pieces: it, in one piece or several.
    """

    where: str
    pieces: Iterable[str]
    kind: str = "text"


@dataclass(frozen=True)
class Example:
    """A row of which a part is learned: a conversation, or a prompt and its completion.

    Attributes:
        where: its file and line.
        messages: of a conversation; None for a pair.
        prompt, completion: of a pair.
    """

    where: str
    messages: list[dict] | None = None
    prompt: str = ""
    completion: str = ""

    @property
    def kind(self) -> str:
        """ "chat" or "pair"."""
        return "pair" if self.messages is None else "chat"

    def as_json(self) -> str:
        """Its content, for a digest."""
        return json.dumps(self.messages or [self.prompt, self.completion], sort_keys=True)


@dataclass(frozen=True)
class Notice:
    """A line for the user about what is read, such as a file that is left out."""

    text: str


Item = (
    Document | Example | BadRow | Notice
)  # what cannot be used is passed on as well: it is counted and named
Row = tuple[object, str] | BadRow  # what a file holds, and where; before anything is made of it


@dataclass(frozen=True)
class Source:
    """A corpus before tokenisation.

    Attributes:
        name: what the user called it.
        fingerprint: changes whenever the text may have changed; cheap to compute.
        splits: "train", and "validation" where there is one; each opens a stream of items.
        files: for each folder a line about how many files there are of each type.
        notices: lines for the user about files that are left out.
        advice: what to add to the message about a bad row.
    """

    name: str
    fingerprint: str
    splits: dict[str, Callable[[], Iterator[Item]]]
    files: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    advice: str = ""


def open_source(
    dataset: str,
    config: str | None,
    text_column: str | None,
    validation_file: str | None,
    include: str | None = None,
) -> Source:
    """Find the corpus that --dataset names, and the text of --validation_file.

    Args:
        dataset: "pydocs", "wikitext", a file, a folder, or a dataset on the hub.
        config: configuration name of a hub dataset.
        text_column: key or column that holds the text; None lets each row decide, see above.
        validation_file: a file or folder that takes the place of the corpus's own validation split.
        include: which files of a folder are read, see `folders.files_of`.
    Raises:
        UserError: nothing there, or nothing readable.
    """
    if dataset == "pydocs":
        source = _open_pydocs()
    elif is_local_dataset(dataset):
        source = _open_files(dataset, text_column, include)
    else:
        source = _open_hub(dataset, config, text_column)
    if validation_file is None:
        return source
    other = _open_files(validation_file, text_column, include)
    digest = hashlib.sha256(f"{source.fingerprint}\0{other.fingerprint}".encode()).hexdigest()
    splits = {**source.splits, "validation": other.splits["train"]}
    return Source(
        source.name,
        digest,
        splits,
        source.files + other.files,
        source.notices + other.notices,
        source.advice or other.advice,
    )


def _open_pydocs() -> Source:
    """The Python language reference that comes with every CPython; its text differs between
    releases.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    digest = hashlib.sha256("\0".join(topics[name] for name in names).encode()).hexdigest()
    return Source(
        "pydocs",
        digest,
        {"train": lambda: (Document(f"pydocs, {name}", [topics[name]]) for name in names)},
    )


# --------------------------------------------------------------------------------------------- rows


def kind_of(keys: Iterable[str], text_column: str | None) -> str | None:
    """What a row with these keys is: "chat", "pair" or "text"; None for none of them."""
    if text_column is None and "messages" in keys:
        return "chat"
    if text_column is None and "prompt" in keys and "completion" in keys:
        return "pair"
    return "text" if (text_column or "text") in keys else None


def _no_text(text_column: str | None, keys: Iterable) -> str:
    """What to do about a row or a table with these keys, none of which is known."""
    there = shorten(keys) or "nothing"
    if text_column:
        return f"no {text_column!r}, which --text_column names; there is {there}."
    return (
        f"no 'text', no 'messages', no 'prompt' with 'completion'; there is {there}: rename what is learned, or "
        "name a text with --text_column."
    )


def shorten(keys: Iterable) -> str:
    """Keys with commas between, of which there may be millions, as long as the text around it."""
    first = [str(key)[:40] for key in itertools.islice(keys, SHOWN_KEYS + 1)]
    return ", ".join(first[:SHOWN_KEYS]) + (", …" if len(first) > SHOWN_KEYS else "")


def read_row(row, where: str, text_column: str | None) -> Document | Example | BadRow:
    """What a row holds: a document, an example, or why it is neither."""
    if isinstance(row, str):
        row = {text_column or "text": row}
    if not isinstance(row, dict):
        return BadRow(f"{where}: neither a text nor an object with keys such as text or messages.")
    kind = kind_of(row, text_column)
    if kind is None:
        return BadRow(f"{where}: {_no_text(text_column, row)}")
    names = {
        "chat": ("messages",),
        "pair": ("prompt", "completion"),
        "text": (text_column or "text",),
    }[kind]
    try:
        if kind == "chat" and row.get("tools"):
            raise ValueError("'tools' would be lost: only messages are learned")
        if kind == "chat":
            return Example(
                where, [_message(message) for message in _list_of_messages(row["messages"])]
            )
        texts = [_text(row[name], name, may_be_null=kind == "text") for name in names]
        return Document(where, texts) if kind == "text" else Example(where, None, *texts)
    except ValueError as error:
        return BadRow(f"{where}: {error}.")


def _list_of_messages(messages) -> list:
    if not isinstance(messages, list) or not messages:
        raise ValueError("'messages' is not a list of messages")
    return messages


def _message(message) -> dict:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("a message is not an object with 'role' and 'content'")
    if lost := [key for key in NOT_LEARNED if message.get(key)]:
        raise ValueError(
            f"a message has {lost[0]!r}, which would be lost: only its 'content' is learned"
        )
    if message.get("weight") not in (None, 1):
        weight = reprlib.repr(message["weight"])
        raise ValueError(
            f"a message has the weight {weight}, and all that the assistant says is learned alike"
        )
    return {
        "role": message["role"],
        "content": _text(message.get("content"), "content", may_be_null=False),
    }


def _text(value, name: str, may_be_null: bool) -> str:
    if value is None and may_be_null:
        value = ""  # a null is an empty document
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is not a text but {reprlib.repr(value)[:40]}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name!r} is not UTF-8 text (iconv -f LATIN1 -t UTF-8 converts a file)"
        ) from error
    return value


# -------------------------------------------------------------------------------------------- files


@contextlib.contextmanager
def reading(what: Path | str):
    """Report what the system refuses while `what` is read as an error of `what`, apart from errors
    of a file that is written.

    Raises:
        UserError: it cannot be read.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{what} cannot be read: {error.strerror or _first_line(error)}."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _signature(file: Path) -> tuple:
    with reading(file):
        found = file.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _open_files(name: str, text_column: str | None, include: str | None) -> Source:
    path = Path(name).expanduser()
    digest, signatures, first_with, twins = hashlib.sha256((text_column or "").encode()), {}, {}, {}
    for file in (files := files_of(path, name, include)):
        signature = _signature(file)
        with reading(file):
            content = sha256_of(file)
        if content in first_with:
            twins[file] = first_with[content]
            continue
        first_with[content], signatures[file] = file, signature
        digest.update(file.suffix.encode() + bytes.fromhex(content))
    opened = {"train": partial(_items_of_files, signatures, text_column)}
    counts = [f"{name}: {count_types(files)}"] if path.is_dir() else []
    return Source(
        name,
        digest.hexdigest(),
        opened,
        counts,
        describe_twins(twins, "content"),
        advise_include(files),
    )


def _items_of_files(signatures: dict[Path, tuple], text_column: str | None) -> Iterator[Item]:
    """What files hold, each text once.

    Args:
        signatures: the files, and what `_signature` said of them when their digests were taken.
        text_column: see `open_source`.
    """
    twins = _same_text(list(signatures), text_column)
    yield from map(Notice, describe_twins(twins, "text"))
    for file, signature in signatures.items():
        if file not in twins:
            yield from _items_of_file(file, text_column)
        if _signature(file) != signature:
            raise UserError(
                f"{file} has changed since the run started: start again when it is complete."
            )


def _items_of_file(file: Path, text_column: str | None) -> Iterator[Item]:
    if has_rows(file):
        for row in rows_of_file(file, text_column):
            yield row if isinstance(row, BadRow) else read_row(*row, text_column)
    else:
        pieces = read_text(file)
        yield pieces if isinstance(pieces, BadRow) else Document(str(file), pieces)


def _same_text(files: list[Path], text_column: str | None) -> dict[Path, Path]:
    """Files of different types that hold the same text, white space aside: each that is left out,
    and the earlier one.

    A file is read no further than the files of other types are long, so that a small one costs
    little.
    """
    sizes: dict[str, float] = {}  # of the largest file of each type
    types = {file: file.suffix.lower() if has_rows(file) else "text" for file in files}
    for file, type_ in types.items():
        size = float("inf") if type_ == ".parquet" else _signature(file)[0]  # it may be compressed
        sizes[type_] = max(sizes.get(type_, 0), size)
    if len(sizes) < 2:
        return {}
    first_with, twins = {}, {}
    for file, type_ in types.items():
        longest = max(size for other, size in sizes.items() if other != type_)
        digest = _digest_of_text(file, text_column, longest)
        first = first_with.setdefault(digest, file)
        if digest and types[first] != type_:
            twins[file] = first
    return twins


def _digest_of_text(file: Path, text_column: str | None, longest: float) -> bytes | None:
    """A digest of a file's documents without white space; None if there are none, or more than
    `longest` bytes of them.
    """
    digest, size = hashlib.sha256(), 0
    try:
        for item in _items_of_file(file, text_column):
            for piece in item.pieces if isinstance(item, Document) else ():
                text = "".join(piece.split()).encode()
                digest.update(text)
                size += len(text)
                if size > longest:
                    return None
    except UserError:  # it is raised again where the file is read in its turn
        return None
    return digest.digest() if size else None


def has_rows(file: Path) -> bool:
    """Whether a file holds rows; any other is one document."""
    return file.suffix.lower() in READERS


def rows_of_file(file: Path, text_column: str | None) -> Iterator[Row]:
    """The rows of a file; what of it cannot be read is a bad row.

    Raises:
        UserError: while it is read: the system refuses to, or the rest cannot be divided into rows.
    """
    with reading(file):
        if flaw := _foreign(file):
            yield flaw
        else:
            # A byte that is no UTF-8 becomes half of a surrogate pair, so that the row that has it
            # can be named.
            yield from READERS[file.suffix.lower()](file, text_column)


def read_text(file: Path) -> Iterator[str] | BadRow:
    """A text file in pieces; a file that does not begin as text, such as a picture in a folder of
    texts, is a bad row.

    Raises:
        UserError: while it is read, if the system refuses to, or if it does not continue as text.
    """
    with reading(file):
        if flaw := _foreign(file):
            return flaw
    pieces = _pieces_of(file)
    try:
        first = next(pieces, "")
    except NotText as error:
        return BadRow(str(error))
    return itertools.chain([first], pieces)


class NotText(UserError):
    """A file that was taken for text is none."""


def _pieces_of(file: Path) -> Iterator[str]:
    try:
        with reading(file), open(file, encoding="utf-8-sig", newline="") as stream:
            while chunk := stream.read(PIECE_CHARACTERS):
                yield chunk
    except UnicodeDecodeError as error:
        raise NotText(
            f"{file} is not UTF-8 text: convert it first (iconv -f LATIN1 -t UTF-8), or in a folder leave it out "
            "with --include or --max_bad_rows."
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
    """Why a file is not read, if its first bytes show that it is of another format than its name
    says.
    """
    with open(file, "rb") as stream:
        begin = stream.read(max(map(len, FOREIGN)))
    what = next((what for mark, what in FOREIGN.items() if begin.startswith(mark)), None)
    return BadRow(f"{file} is {what} first.") if what else None


# ------------------------------------------------------------------------------ rows of each format


def _parse_json(text: str, file: Path, line: int | None = None) -> object | BadRow:
    """A value in JSON, or why it is none that can be used; `text` is one line of the file, or all
    of it.
    """
    place = f"{file}, line {line}" if line else str(file)
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        return BadRow(
            f"{file}, line {line or error.lineno}, column {error.colno}: not valid JSON ({error.msg})."
        )
    except RecursionError:
        return BadRow(f"{place}: JSON that is nested too deeply.")
    except MemoryError:
        return BadRow(f"{place}: more JSON at a time than fits into this host's memory.")
    except ValueError as error:  # a key twice; a number of more than Python's 4,300 digits
        return BadRow(f"{place}: {_first_line(error).split(';')[0]}.")


def _object(pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {reprlib.repr(twice)} is given twice")
    return found


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
        f"{file} is read as a whole, and does not fit into this host's free memory: make it a .jsonl file "
        "(jq -c '.[]'), which is read line by line."
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
                f"{file} has several lists, {shorten(lists)}: make a file of each, and see --validation_file."
            )
            return
        rows = next(iter(lists.values()), rows)
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        yield row, f"{file}, entry {number}"


def _read_csv(file: Path, text_column: str | None) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_ROW)  # the default is 128 kB, less than a long document
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
                if "end of data" in str(error):  # not one row: all that follows is in it
                    raise UserError(
                        f"{file}, line {begin}: a quote is opened here and never closed."
                    ) from error
                yield BadRow(f"{file}, line {begin}: {error}.")
                continue
            where = f"{file}, line {rows.line_num}"
            if None in row or None in row.values():
                yield BadRow(
                    f"{where}: not as many cells as the first line's {len(columns)}: quote a text that has commas."
                )
            else:
                yield row, where


def _read_parquet(file: Path, text_column: str | None) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = columns_of_text(table.schema_arrow.names, text_column, str(file))
        if twice := [name for name in columns if table.schema_arrow.names.count(name) > 1]:
            raise UserError(f"{file}: two columns have the same name, {twice[0]}.")
        for batch in table.iter_batches(columns=columns, batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield row, f"{file}, row {number}"
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError, UserError) as error:
        if getattr(error, "errno", None):  # the system's, not of what the file holds
            raise
        if number:
            raise UserError(
                f"{file}: what follows row {number} cannot be read: {_first_line(error)}"
            ) from error
        known = isinstance(error, UserError)
        yield BadRow(
            str(error)
            if known
            else f"{file} is not a Parquet file that can be read: {_first_line(error)}"
        )


def columns_of_text(there: list[str], text_column: str | None, where: str) -> list[str]:
    """The columns to read of a table.

    Raises:
        UserError: there is none of those that are known.
    """
    kind = kind_of(there, text_column)
    if kind is None:
        raise UserError(f"{where}: {_no_text(text_column, there)}")
    names = {
        "chat": ["messages", "tools"],
        "pair": ["prompt", "completion"],
        "text": [text_column or "text"],
    }[kind]
    return [name for name in names if name in there]


READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}


# ------------------------------------------------------------------------------------------ the hub


def load_from_hub(dataset: str, config: str | None, **options):
    """The splits that `datasets.load_dataset` finds; "wikitext" is the corpus that guides mean by
    it.

    Raises:
        UserError: it cannot be loaded, or has no split to train on.
    """
    import datasets

    if not progress.on_terminal():
        datasets.disable_progress_bars()
    if dataset == "wikitext":
        dataset, config = WIKITEXT, config or "wikitext-2-raw-v1"
    try:
        splits = datasets.load_dataset(dataset, config, **options)
    except (
        Exception
    ) as error:  # the clients raise a dozen classes; the first line says what is wrong
        why = _first_line(error)
        raise UserError(
            f"--dataset {dataset} cannot be loaded from the hub, and no such file is here: {why}"
        ) from error
    if "train" not in splits:
        raise UserError(
            f"--dataset {dataset} has no split named train; it has {', '.join(splits)}."
        )
    return splits


def commit_on_hub(dataset: str) -> str | None:
    """The commit of a dataset on the hub; None if it does not say."""
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(WIKITEXT if dataset == "wikitext" else dataset).sha
    except Exception:  # the clients raise a dozen classes
        return None


def _open_hub(dataset: str, config: str | None, text_column: str | None) -> Source:
    where = f"--dataset {dataset}"
    corpus = load_from_hub(dataset, config)
    columns = columns_of_text(corpus["train"].column_names, text_column, where)
    digest = hashlib.sha256(f"{columns}\0{config}\0{dataset == 'wikitext'}".encode())
    splits = {name: corpus[name] for name in ("train", "validation") if name in corpus}
    for split in splits.values():
        for file in sorted(entry["filename"] for entry in split.cache_files):
            with reading(file):
                digest.update(bytes.fromhex(sha256_of(Path(file))))

    def items(name: str) -> Iterator[Item]:
        rows = enumerate(splits[name].select_columns(columns), 1)
        found = (
            read_row(row, f"{where}, {name}, row {number}", text_column) for number, row in rows
        )
        with reading(where):
            yield from join_articles(found) if dataset == "wikitext" else found

    return Source(dataset, digest.hexdigest(), {name: partial(items, name) for name in splits})


def begins_article(line: str) -> bool:
    """Whether a line of WikiText is a title, ` = Title = `; its sections have ` = = Section = = `."""
    return not line.startswith(" = = ") and re.fullmatch(r" = [^=].* = \n?", line) is not None


def join_articles(lines: Iterable[Item]) -> Iterator[Item]:
    """WikiText's rows are lines, and an article is a document."""
    where, article = "", []
    for line in lines:
        if isinstance(line, BadRow):
            yield line
            continue
        if begins_article(line.pieces[0]) and article:
            yield Document(where, article)
            where, article = line.where, []
        article += line.pieces
    if article:
        yield Document(where, article)
