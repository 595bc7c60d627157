"""From --dataset to documents and examples: every source as one stream, its bad rows named by file and line.

A row of a JSON, CSV, Parquet or hub dataset is one of three:

    {"messages": [{"role": …, "content": …}, …]}      a conversation; what the assistant says is learned
    {"prompt": …, "completion": …}                    the completion is learned
    {"text": …}                                       a document, all of it is learned (another key: --text_column)

Any other file is UTF-8 text, and one document.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from support import progress
from support.errors import UserError
from support.files import sha256_of
from support.preflight import is_local_dataset

PIECE_CHARACTERS = 1 << 16  # of a text file that are read at a time
NOT_LEARNED = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")  # of a message, beside its content
WIKITEXT = "Salesforce/wikitext"  # the hub's short name for it no longer loads with `datasets` 5


class BadRow(UserError):
    """A row that cannot be used: where it is, and why; of a file that cannot be read, the file."""

    def __init__(self, text: str):
        super().__init__(text.encode(errors="replace").decode())  # it may quote bytes that are no text


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


Item = Document | Example | BadRow  # what cannot be used is passed on as well: it is counted and told
Row = tuple[object, str] | BadRow  # what a file holds, and where; before anything is made of it


@dataclass(frozen=True)
class Source:
    """A corpus before tokenisation.

    Attributes:
        name: what the user called it.
        fingerprint: changes whenever the text may have changed; cheap to compute.
        splits: "train", and "validation" where there is one; each opens a stream of items.
    """

    name: str
    fingerprint: str
    splits: dict[str, Callable[[], Iterator[Item]]]


def open_source(dataset: str, config: str | None, text_column: str | None, validation_file: str | None) -> Source:
    """Find the corpus that --dataset names, and the text of --validation_file.

    Args:
        dataset: "pydocs", "wikitext", a file, a folder, or a dataset on the hub.
        config: configuration name of a hub dataset.
        text_column: key or column that holds the text; None lets each row decide, see above.
        validation_file: a file or folder that takes the place of the corpus's own validation split.
    Raises:
        UserError: nothing there, or nothing readable.
    """
    if dataset == "pydocs":
        source = _open_pydocs()
    elif is_local_dataset(dataset):
        source = _open_files(Path(dataset).expanduser(), dataset, text_column)
    else:
        source = _open_hub(dataset, config, text_column)
    if validation_file is None:
        return source
    beside = _open_files(Path(validation_file).expanduser(), validation_file, text_column)
    digest = hashlib.sha256(f"{source.fingerprint}\0{beside.fingerprint}".encode()).hexdigest()
    return Source(source.name, digest, {**source.splits, "validation": beside.splits["train"]})


def _open_pydocs() -> Source:
    """The Python language reference that comes with every CPython; its text differs between releases."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    digest = hashlib.sha256("\0".join(topics[name] for name in names).encode()).hexdigest()
    return Source("pydocs", digest, {"train": lambda: (Document(f"pydocs, {name}", [topics[name]]) for name in names)})


# ---------------------------------------------------------------------------------------------------- rows


def kind_of(keys: Iterable[str], text_column: str | None) -> str | None:
    """What a row with these keys is: "chat", "pair" or "text"; None for none of them."""
    if text_column is None and "messages" in keys:
        return "chat"
    if text_column is None and "prompt" in keys and "completion" in keys:
        return "pair"
    return "text" if (text_column or "text") in keys else None


def _no_text(text_column: str | None, keys: Iterable) -> str:
    """What to do about a row or a table with these keys, none of which is known."""
    there = ", ".join(map(str, keys)) or "nothing"
    if text_column:
        return f"no {text_column!r}, which --text_column names; there is {there}."
    return (f"no 'text', no 'messages', no 'prompt' with 'completion'; there is {there}: rename what is learned, or "
            "name a text with --text_column.")  # fmt: skip


def read_row(row, where: str, text_column: str | None) -> Item:
    """What a row holds: a document, an example, or why it is neither."""
    if isinstance(row, str):
        row = {text_column or "text": row}
    if not isinstance(row, dict):
        return BadRow(f"{where}: neither a text nor an object with keys such as text or messages.")
    kind = kind_of(row, text_column)
    if kind is None:
        return BadRow(f"{where}: {_no_text(text_column, row)}")
    names = {"chat": ("messages",), "pair": ("prompt", "completion"), "text": (text_column or "text",)}[kind]
    try:
        if kind == "chat" and row.get("tools"):
            raise ValueError("'tools' would be lost: only messages are learned")
        if kind == "chat":
            return Example(where, [_message(message) for message in _list_of_messages(row["messages"])])
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
        raise ValueError(f"a message has {lost[0]!r}, which would be lost: only its 'content' is learned")
    if message.get("weight") not in (None, 1):
        raise ValueError(f"a message has the weight {message['weight']!r}, and all that the assistant says is learned alike")
    return {"role": message["role"], "content": _text(message.get("content"), "content", may_be_null=False)}


def _text(value, name: str, may_be_null: bool) -> str:
    if value is None and may_be_null:
        value = ""  # a null is an empty document
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is not a text but {repr(value)[:40]}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name!r} is not UTF-8 text (iconv -f LATIN1 -t UTF-8 converts a file)") from error
    return value


# ---------------------------------------------------------------------------------------------------- files


def files_of(path: Path, name: str) -> list[Path]:
    """A file, or all of a folder's that are not hidden and not empty, in order.

    Raises:
        UserError: there are none.
    """
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if _is_data_file(file, path))
    if not files:
        raise UserError(f"{name}: the folder holds no files.")
    return files


def _is_data_file(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.is_file() and not hidden and file.stat().st_size > 0


def _open_files(path: Path, name: str, text_column: str | None) -> Source:
    files = files_of(path, name)
    digest = hashlib.sha256((text_column or "").encode())
    for file in files:
        digest.update(file.suffix.encode() + bytes.fromhex(sha256_of(file)))
    return Source(name, digest.hexdigest(), {"train": partial(_items_of_files, files, text_column)})


def _items_of_files(files: list[Path], text_column: str | None) -> Iterator[Item]:
    for file in files:
        if has_rows(file):
            for row in rows_of_file(file, text_column):
                yield row if isinstance(row, BadRow) else read_row(*row, text_column)
        else:
            pieces = read_text(file)
            yield pieces if isinstance(pieces, BadRow) else Document(str(file), pieces)


def has_rows(file: Path) -> bool:
    """Whether a file holds rows; any other is one document."""
    return file.suffix.lower() in READERS


def rows_of_file(file: Path, text_column: str | None) -> Iterator[Row]:
    """The rows of a file; what of it cannot be read is a bad row."""
    # A byte that is no UTF-8 becomes half of a surrogate pair, so that the row that has it can be named.
    yield from READERS[file.suffix.lower()](file, text_column)


def read_text(file: Path) -> Iterator[str] | BadRow:
    """A text file in pieces; a file that does not begin as text, such as a picture in a folder of texts, is a bad row.

    Raises:
        UserError: while it is read, if it does not go on as text.
    """
    pieces = _pieces_of(file)
    try:
        first = next(pieces, "")
    except UserError as error:
        return BadRow(str(error))
    return itertools.chain([first], pieces)


def _pieces_of(file: Path) -> Iterator[str]:
    try:
        with open(file, encoding="utf-8-sig", newline="") as stream:
            while chunk := stream.read(PIECE_CHARACTERS):
                yield chunk
    except UnicodeDecodeError as error:
        raise _not_utf8(file) from error


def _not_utf8(file: Path) -> UserError:
    return UserError(f"{file} is not UTF-8 text: convert it first (iconv -f LATIN1 -t UTF-8), or in a folder leave it out with "
                     "--max_bad_rows.")  # fmt: skip


def _read_jsonl(file: Path, text_column: str | None) -> Iterator[Row]:
    with open(file, encoding="utf-8-sig", errors="surrogateescape") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line.rstrip("\n")), f"{file}, line {number}"
            except json.JSONDecodeError as error:
                yield BadRow(f"{file}, line {number}, column {error.colno}: not valid JSON ({error.msg}).")


def _read_json(file: Path, text_column: str | None) -> Iterator[Row]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig", errors="surrogateescape"))
    except json.JSONDecodeError as error:
        yield BadRow(f"{file}, line {error.lineno}, column {error.colno}: not valid JSON ({error.msg}).")
        return
    if isinstance(rows, dict) and kind_of(rows, text_column) is None:  # {"data": [...]}
        lists = {key: value for key, value in rows.items() if isinstance(value, list)}
        if len(lists) > 1:
            yield BadRow(f"{file} has several lists, {', '.join(lists)}: make a file of each, and see --validation_file.")
            return
        rows = next(iter(lists.values()), rows)
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        yield row, f"{file}, entry {number}"


def _read_csv(file: Path, text_column: str | None) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)  # the default is 128 kB, less than a long document
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
                    raise UserError(f"{file}, line {begin}: a quote is opened here and never closed.") from error
                yield BadRow(f"{file}, line {begin}: {error}.")
                continue
            where = f"{file}, line {rows.line_num}"
            if None in row or None in row.values():
                yield BadRow(f"{where}: not as many cells as the first line's {len(columns)}: quote a text that has commas.")
            else:
                yield row, where


def _read_parquet(file: Path, text_column: str | None) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        yield BadRow(f"{file} is not a Parquet file: {str(error).splitlines()[0]}")
        return
    columns = columns_of_text(table.schema_arrow.names, text_column, str(file))
    number = 0
    for batch in table.iter_batches(columns=columns, batch_size=1024):
        for row in batch.to_pylist():
            number += 1
            yield row, f"{file}, row {number}"


def columns_of_text(there: list[str], text_column: str | None, where: str) -> list[str]:
    """The columns to read of a table.

    Raises:
        UserError: there is none of those that are known.
    """
    kind = kind_of(there, text_column)
    if kind is None:
        raise UserError(f"{where}: {_no_text(text_column, there)}")
    names = {"chat": ["messages", "tools"], "pair": ["prompt", "completion"], "text": [text_column or "text"]}[kind]
    return [name for name in names if name in there]


READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}


# ---------------------------------------------------------------------------------------------------- the hub


def load_from_hub(dataset: str, config: str | None, **options):
    """The splits that `datasets.load_dataset` finds; "wikitext" is the corpus that guides mean by it.

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
    except Exception as error:  # the clients raise a dozen classes; the first line says what is wrong
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"--dataset {dataset} cannot be loaded from the hub, and no such file is here: {text}") from error
    if "train" not in splits:
        raise UserError(f"--dataset {dataset} has no split named train; it has {', '.join(splits)}.")
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
            digest.update(bytes.fromhex(sha256_of(Path(file))))

    def items(name: str) -> Iterator[Item]:
        rows = enumerate(splits[name].select_columns(columns), 1)
        found = (read_row(row, f"{where}, {name}, row {number}", text_column) for number, row in rows)
        return join_articles(found) if dataset == "wikitext" else found

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
