"""The rows of a corpus: documents, conversations and pairs of prompt and completion.

Every use of a corpus reads it through one generator (`Rows`): the token cache, --streaming,
--show_sample and --prefetch. It yields (position before the row, row), so that a stream can
continue anywhere. The keys of a row determine its format (`row_formats`); a file without rows is
text, and one document. A row that cannot be used is a `BadRow`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from distributed_training.console import printable
from distributed_training.data import refused_rows
from distributed_training.data.facts import Kinds
from distributed_training.data.row_formats import FORMATS, RowFormat
from distributed_training.errors import UserError
from distributed_training.files.user_files import shown
from distributed_training.settings.data import DataSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distributed_training.data.conversations import Content, Message, Template
    from distributed_training.data.tools import Tool

# Keys whose values would not be trained on. A row with a value of one of them that its format does
# not read cannot be used, except a text.
UNSUPPORTED = (
    "tools",
    "functions",
    "history",
    "images",
    "image",
    "videos",
    "video",
    "audios",
    "audio",
)


class BadRow(UserError):
    """A row that cannot be used, with its place and the reason."""

    def __init__(self, text: str) -> None:
        # The text may quote bytes that are not UTF-8.
        super().__init__(printable(text.encode(errors="replace").decode()))


class NotUnicode(BadRow):
    """A row with half of a surrogate pair: an escape of JSON, or a byte that is not UTF-8."""

    def __init__(self, where: str, half: str) -> None:
        super().__init__(
            f"{where}: {half!r} in it is half of a surrogate pair, which is no character (of an "
            "emoji that was cut in two, for example): correct the row."
        )
        self.where = where


@dataclass(frozen=True)
class Row:
    """A document, a conversation, or a prompt and its completion."""

    where: str  # its file and line
    kind: str = "text"  # or "chat", whose answers have a loss, or "pair", whose completion has one
    format: str = "text"  # name of its format, for the user
    pieces: Iterable[str] = ()  # of a document: the text, in one or more pieces
    is_file: bool = False  # whether the document is a text file, of any length
    messages: Sequence[Message] = ()  # of a conversation
    tools: Sequence[Tool] = ()  # that the assistant may call
    untrained: Sequence[int] = ()  # numbers of the messages with the weight 0
    context: int = 0  # messages at the beginning of a conversation that have no loss
    prompt: str = ""
    completion: str = ""
    trains_all: bool = False  # all tokens of a conversation or a pair have a loss

    def as_json(self) -> str:
        """Return the content of a conversation or a pair as JSON, for a digest."""
        content = [self.prompt, self.completion] if self.kind == "pair" else self.messages
        if self.tools or self.untrained:
            return json.dumps([content, self.context, self.tools, self.untrained], sort_keys=True)
        return json.dumps([content, self.context] if self.context else content, sort_keys=True)


class Position(TypedDict, total=False):
    """Where a row is, as JSON."""

    file: int  # the number of the file, if there are files
    row: int  # its number in the file, or in the table of the hub
    state: dict | None  # of the hub's stream; None if the table is no stream


PlacedRows = Iterator[tuple[Position, Row | BadRow]]
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
    chat_template: Template = None  # of the tokenizer
    train_on: str = "assistant"  # --train_on

    @classmethod
    def of(cls, data: DataSettings, tokenizer: PreTrainedTokenizerBase) -> RowOptions:
        """Return the options for a run's flags and tokenizer."""
        columns = {
            "text": data.text_column,
            "prompt": data.prompt_column,
            "completion": data.completion_column,
        }
        named = tuple((key, name) for key, name in columns.items() if name)
        return cls(named, tokenizer.chat_template, data.train_on)

    def for_digest(self) -> list[object]:
        """Return what the fingerprint of a corpus contains, as JSON.

        A default of a later version is left out, so that checkpoints of earlier streams resume.
        """
        return [self.columns, self.chat_template, *[self.train_on] * (self.train_on != "assistant")]

    def __repr__(self) -> str:
        """Return the same as text, in the form of earlier versions."""
        names = ("columns", "chat_template", "train_on")
        values = zip(names, self.for_digest(), strict=False)
        return f"RowOptions({', '.join(f'{name}={value!r}' for name, value in values)})"


# ---------------------------------------------------------------------------------- formats of rows


def formats_of(
    keys: Collection[str], options: RowOptions
) -> Iterator[tuple[RowFormat, dict[str, str]]]:
    """Yield each format that fits, and {key: its column} of the keys that it reads."""
    columns = dict(options.columns)
    for row_format in FORMATS:
        required = row_format.required
        read = {key: columns.get(key, key) for key in (*required, *row_format.optional)}
        if columns.keys() <= set(required) and {read[key] for key in required} <= set(keys):
            yield row_format, read


def format_of(keys: Collection[str], options: RowOptions) -> tuple[RowFormat, dict[str, str]]:
    """Return the first of `formats_of`.

    Raises:
        ValueError: a row or table with these keys has no known format.
    """
    if found := next(formats_of(keys, options), None):
        return found
    columns = dict(options.columns)
    wanted = [
        " with ".join(repr(columns.get(key, key)) for key in row_format.required)
        for row_format in FORMATS
        if columns.keys() <= set(row_format.required)
    ]
    raise ValueError(
        f"no {', no '.join(wanted)}, but {shown(', '.join(map(str, keys))) or 'nothing'}: rename "
        "a key, or name one with --text_column, --prompt_column or --completion_column"
    )


def columns_of_table(columns: list[str], options: RowOptions, where: str) -> list[str]:
    """Return the columns of a table's format, and those that it must not have.

    Args:
        where: the table, for messages.
    """
    try:
        found, read = _format_of_keys(dict.fromkeys(columns, "a value"), options)
    except ValueError as error:
        raise UserError(f"{where}: {error}.") from error
    also = UNSUPPORTED if found.answers else ()
    wanted = dict.fromkeys((*read.values(), *also))
    return [column for column in wanted if column in columns]


def columns_to_read(columns: list[str], options: RowOptions, where: str) -> list[str]:
    """Return the columns of a table that are read.

    A row may have nulls in the columns of the first format, and values in those of another one.
    """
    wanted = dict.fromkeys(columns_of_table(columns, options, where))
    has_answers = False
    for row_format, read in formats_of(columns, options):
        has_answers |= bool(row_format.answers)
        wanted |= dict.fromkeys(column for column in read.values() if column in columns)
    if has_answers:
        wanted |= dict.fromkeys(filter(refused_rows.is_checked, columns))
        wanted |= dict.fromkeys(column for column in UNSUPPORTED if column in columns)
    return list(wanted)


def row_of_table(row: dict[str, object]) -> dict[str, object]:
    """Return a row of a table without the keys inside its values that are None.

    A table gives all objects of a column the same keys, so an argument that a tool call does not
    have is None there.
    """
    return {column: _without_nulls(value) for column, value in row.items()}


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def read_row(row: object, where: str, options: RowOptions) -> Row | BadRow:
    """Convert a text or an object with the keys of a format; `where` is its place, for messages."""
    if isinstance(row, BadRow):
        return row
    text_column = dict(options.columns).get("text", "text")
    if isinstance(row, str):
        row = {text_column: row}
    try:
        if not isinstance(row, dict):
            raise ValueError("neither a text nor an object with keys such as text or messages")
        present = {key: value for key, value in row.items() if not is_null(value)}
        if row and not present and text_column not in row:
            raise ValueError(f"all its values are null ({shown(', '.join(row))})")
        first = next(formats_of(row, options), None)
        if text_column in row and first and not first[0].answers:
            present.setdefault(text_column, "")  # a document without text
        return _read_object(present, where, options)
    except UnicodeEncodeError as error:
        return NotUnicode(where, error.object[error.start])
    except ValueError as error:
        return BadRow(f"{where}: {error}.")


def is_null(value: object) -> bool:
    """Return whether a value is missing: None, or the NaN that pandas writes for it."""
    return value is None or (isinstance(value, float) and isnan(value))


def _format_of_keys(
    row: dict[str, object], options: RowOptions
) -> tuple[RowFormat, dict[str, str]]:
    """Do what `format_of` does; the error names what the row has instead of a format."""
    try:
        return format_of(row, options)
    except ValueError as error:
        refused_rows.check_is_no_pair(row)
        raise ValueError(f"{error}{refused_rows.advice_without_format(row)}") from error


def _read_object(row: dict[str, object], where: str, options: RowOptions) -> Row:
    """Convert an object without nulls.

    Raises:
        ValueError: it cannot be used.
    """
    row_format, columns = _format_of_keys(row, options)
    values = {key: row.get(column) for key, column in columns.items()}
    if row_format.answers:
        _check_answers(row, row_format, columns)
    elif not isinstance(values["text"], str):
        raise ValueError(
            f"'text' is not a string but {shown(values['text'], 40)}{refused_rows.advice_for(row)}"
        )
    content: Content = {
        "format": row_format.name,
        **row_format.content(values, options.chat_template),
    }
    trains_all = bool(row_format.answers) and options.train_on == "all"
    return Row(where, **content, trains_all=trains_all)


def _check_answers(
    row: dict[str, object], row_format: RowFormat, columns: Mapping[str, str]
) -> None:
    """Check that a row with an answer has nothing that its format does not read.

    Args:
        columns: {key of the format: its column}.
    Raises:
        ValueError: it has.
    """
    if advice := refused_rows.advice_for(row):
        raise ValueError(f"not one row but many{advice}")
    used = set(columns.values())
    refused_rows.check_is_good(row, used, [columns[key] for key in row_format.answers])
    refused_rows.check_tools(row, used)
    if lost := [key for key in UNSUPPORTED if row.get(key) and key not in used]:
        raise ValueError(f"{lost[0]!r} is not supported: only text is trained on")


def check_kind(row: Row | BadRow, kinds: Kinds) -> Row | BadRow:
    """Return the row, or a BadRow if it is of another kind than the rows before it.

    Args:
        kinds: of the rows before it; the row is added.
    """
    if isinstance(row, BadRow):
        return row
    kinds["kind"] = kinds["kind"] or row.kind
    if row.kind != kinds["kind"]:
        return BadRow(f"{row.where}: of kind {row.kind} among rows of kind {kinds['kind']}.")
    if row.format not in kinds["formats"]:
        kinds["formats"].append(row.format)
    return row
