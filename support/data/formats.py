"""The formats of a row: how each is recognized, and the document or example that a row becomes.

A row has the keys of one of FORMATS. Any file without rows is text, and one document. A row that
cannot be used is a `BadRow`, which names its file and line.
"""

from __future__ import annotations

import itertools
import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.cli.arguments import Arguments
from support.errors import UserError
from support.files.user_files import printable

SHOWN_KEYS = 10  # keys of a row that a message lists
# Keys of a row, and of a message, whose values would not be trained on: only text is. A row in
# which one of them has a value cannot be used. For "text" they are not read.
UNSUPPORTED_KEYS = ("tools", "functions", "images", "image", "videos", "video", "audios", "audio")
UNSUPPORTED_IN_MESSAGE = (
    *("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"),
    *("images", "image", "audio"),
)
# ShareGPT's names of the roles that chat templates know; its other names are kept.
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
TOOL_ROLES = ("function_call", "function_response", "function", "observation", "tool_call", "tool")
# The prompt of the Alpaca dataset (github.com/tatsu-lab/stanford_alpaca), for models without a chat
# template. The completion follows without a space, as in the project's own training script.
ALPACA_PREAMBLE = "Below is an instruction that describes a task{}. {}"
ALPACA_TASK = "Write a response that appropriately completes the request."
ALPACA_INPUT = ", paired with an input that provides further context"


class BadRow(UserError):
    """A row that cannot be used, with its place and the reason; or a file that cannot be read."""

    def __init__(self, text: str, whole_file: bool = False):
        # The text may quote bytes that are not UTF-8.
        super().__init__(printable(text.encode(errors="replace").decode()))
        self.whole_file = whole_file  # nothing of the file can be used


@dataclass(frozen=True)
class Document:
    """A text; the loss counts all of it."""

    where: str  # its file and line
    pieces: Iterable[str]  # the text, in one or more pieces
    format: str = "text"  # name of its format, for the user
    kind: str = "text"


class TextFile(Document):
    """A text file, which is one document of any length."""


@dataclass(frozen=True)
class Example:
    """A conversation, or a prompt and its completion; the loss counts a part of it."""

    where: str  # its file and line
    messages: list[dict] | None = None  # the conversation; None for a pair
    # The pair; empty for a conversation.
    prompt: str = ""
    completion: str = ""
    # Number of messages at the beginning that the loss does not count, although some may be the
    # assistant's.
    context: int = 0
    format: str = ""  # name of its format, for the user

    @property
    def kind(self) -> str:
        """The kind of the row: "chat" or "pair"."""
        return "pair" if self.messages is None else "chat"

    @property
    def answers(self) -> list[int]:
        """The numbers of the messages that the loss counts: the assistant's after `context`."""
        messages = enumerate(self.messages or ())
        return [n for n, m in messages if m["role"] == "assistant" and n >= self.context]

    @property
    def joined(self) -> str | None:
        """The end of a prompt and the begin of its completion, if nothing separates their words."""
        apart = self.prompt[-1:].isspace() or self.completion[:1].isspace()
        both = self.prompt and self.completion and not apart
        return self.prompt[-12:] + self.completion[:12] if both else None

    def as_json(self) -> str:
        """Return its content as JSON, for a digest."""
        content = [self.prompt, self.completion] if self.messages is None else self.messages
        return json.dumps([content, self.context] if self.context else content, sort_keys=True)


@dataclass
class OneKind:
    """A check that all rows of a corpus are of one kind."""

    kind: str | None = None  # "text", "chat" or "pair", as the first usable row; None before it
    formats: list[str] = field(default_factory=list)  # of the rows, in the order of appearance

    def check(self, row: Document | Example | BadRow) -> Document | Example | BadRow:
        """Return the row, or a BadRow if it is of another kind than the rows before it."""
        if isinstance(row, BadRow):
            return row
        self.kind = self.kind or row.kind
        if row.kind != self.kind:
            return BadRow(
                f"{row.where}: of kind {row.kind} among rows of kind {self.kind}: "
                "a corpus has one kind of rows."
            )
        if row.format not in self.formats:
            self.formats.append(row.format)
        return row


@dataclass(frozen=True)
class RowOptions:
    """How rows are read."""

    # (key of a format, the user's column for it): --text_column, --prompt_column and
    # --completion_column. Only formats with these keys are considered.
    columns: tuple[tuple[str, str], ...] = ()
    chat_template: bool = True  # whether the tokenizer has a chat template

    @classmethod
    def of(cls, args: Arguments, chat_template: bool) -> RowOptions:
        """Return the options that the flags set."""
        columns = {key: getattr(args, f"{key}_column") for key in ("text", "prompt", "completion")}
        given = tuple((key, column) for key, column in columns.items() if column)
        return cls(given, chat_template)


# ------------------------------------------------------------------------------------- the formats

# A function from a row with the keys of its format, and the options, to fields of a Document (with
# "pieces") or an Example. Raises a ValueError with the reason if the row cannot be used.
Convert = Callable[[Mapping[str, Any], RowOptions], dict]


def _from_pair(row: Mapping[str, Any], options: RowOptions) -> dict:
    if isinstance(row["prompt"], list) or isinstance(row["completion"], list):
        prompt, completion = _messages(row, "prompt"), _messages(row, "completion")
        name = "prompt and completion, each a list of messages"
        return {"messages": prompt + completion, "context": len(prompt), "format": name}
    return {key: _text(row, key) for key in ("prompt", "completion")}


def _from_alpaca(row: Mapping[str, Any], options: RowOptions) -> dict:
    """Return a conversation, or Alpaca's prompt if the tokenizer has no chat template."""
    if row.get("history"):
        raise ValueError("'history' is not supported: write the conversation as 'messages'")
    instruction, output = _text(row, "instruction"), _text(row, "output")
    context = _text(row, "input") if row.get("input") else ""
    if options.chat_template:
        content = "\n".join(part for part in (instruction, context) if part)
        turns = [("user", content), ("assistant", output)]
        messages = [{"role": role, "content": content} for role, content in turns]
        return {"messages": _system_message(row) + messages}
    preamble = ALPACA_PREAMBLE.format(ALPACA_INPUT if context else "", ALPACA_TASK)
    headings = f"\n\n### Instruction:\n{instruction}"
    headings += f"\n\n### Input:\n{context}" if context else ""
    system = _text(row, "system") if row.get("system") else preamble
    return {"prompt": f"{system}{headings}\n\n### Response:", "completion": output}


@dataclass(frozen=True)
class Format:
    """A format of rows."""

    name: str  # for the user, with the keys
    keys: tuple[str, ...]  # the keys that a row of this format has
    convert: Convert
    optional: tuple[str, ...] = ()  # further keys that are read

    def columns(self, options: RowOptions) -> dict[str, str]:
        """Return the column of each key."""
        return {key: dict(options.columns).get(key, key) for key in (*self.keys, *self.optional)}

    def fits(self, keys: Iterable[str], options: RowOptions) -> bool:
        """Return whether a row or table with these keys is of this format."""
        columns, keys = self.columns(options), set(keys)
        named = all(key in self.keys for key, _ in options.columns)
        return named and all(columns[key] in keys for key in self.keys)


# The first format that fits is used.
FORMATS = (
    Format("messages", ("messages",), lambda row, _: {"messages": _messages(row, "messages")}),
    Format(
        "ShareGPT (conversations)",
        ("conversations",),
        lambda row, _: {"messages": _system_message(row) + _messages(row, "conversations")},
        ("system",),
    ),
    Format("prompt and completion", ("prompt", "completion"), _from_pair),
    Format(
        "Alpaca (instruction, input, output)",
        ("instruction", "output"),
        _from_alpaca,
        ("input", "system", "history"),
    ),
    # null is an empty document
    Format(
        "text",
        ("text",),
        lambda row, _: {"pieces": ["" if row["text"] is None else _text(row, "text")]},
    ),
)


def is_row(keys: Iterable[str], options: RowOptions) -> bool:
    """Return whether an object with these keys is a row of a known format."""
    return any(known.fits(keys, options) for known in FORMATS)


def columns_of_table(columns: list[str], options: RowOptions, where: str) -> list[str]:
    """Return the columns of a table that are read.

    Args:
        where: the table, for messages.
    """
    known = next((known for known in FORMATS if known.fits(columns, options)), None)
    if known is None:
        raise UserError(f"{where}: {_no_format(columns, options)}")
    unsupported = () if known.name == "text" else UNSUPPORTED_KEYS
    read = (*known.columns(options).values(), *unsupported)
    return [name for name in read if name in columns]


def read_row(row: Any, where: str, options: RowOptions) -> Document | Example | BadRow:
    """Convert a row to a document or an example, or to a BadRow with the reason why it is neither.

    Args:
        row: a text, or an object with the keys of a format.
    """
    if isinstance(row, str):
        row = {dict(options.columns).get("text", "text"): row}
    if not isinstance(row, dict):
        return BadRow(f"{where}: neither a text nor an object with keys such as text or messages.")
    known = next((known for known in FORMATS if known.fits(row, options)), None)
    if known is None:
        return BadRow(f"{where}: {_no_format(row, options)}")
    columns = known.columns(options).items()
    try:
        if known.name != "text":
            _refuse_unsupported(row, UNSUPPORTED_KEYS)
        fields = known.convert({key: row.get(column) for key, column in columns}, options)
    except ValueError as error:
        reason = str(error)
        for key, column in columns:  # the user's name of a column
            reason = reason.replace(f"{key!r} is ", f"{column!r} is ")
        return BadRow(f"{where}: {reason}.")
    row_type = Document if known.name == "text" else Example
    return row_type(where, **{"format": known.name, **fields})


def _no_format(keys: Iterable, options: RowOptions) -> str:
    """Return a message for a row or table whose keys are those of no format."""
    key_list = shorten(keys) or "nothing"
    if options.columns:
        flags = [f"{column!r}, which --{key}_column names" for key, column in options.columns]
        if len(options.columns) == 1 and options.columns[0][0] != "text":
            other = "completion" if options.columns[0][0] == "prompt" else "prompt"
            flags.append(f"{other!r} (--{other}_column)")
        return f"no {', or no '.join(flags)}, but {key_list}."
    return (
        "no 'text', no 'messages' or 'conversations', no 'prompt' with 'completion', and no "
        f"'instruction' with 'output', but {key_list}: rename a key, or name the text with "
        "--text_column, or a prompt and its completion with --prompt_column and "
        "--completion_column."
    )


def shorten(keys: Iterable) -> str:
    """Join the first SHOWN_KEYS keys with commas for a message; a broken file may have millions."""
    first = [str(key)[:40] for key in itertools.islice(keys, SHOWN_KEYS + 1)]
    return ", ".join(first[:SHOWN_KEYS]) + (", …" if len(first) > SHOWN_KEYS else "")


# ------------------------------------------------------------------------------- parts of the rows


def _messages(row: Mapping[str, Any], name: str) -> list[dict]:
    if not isinstance(row[name], list) or not row[name]:
        raise ValueError(f"{name!r} is not a list of messages")
    return [_message(message) for message in row[name]]


def _message(message: Any) -> dict:
    """Return a message with `role` and `content` (ShareGPT: `from` and `value`)."""
    is_object = isinstance(message, dict)
    sharegpt = is_object and message.get("role") is None and "from" in message
    role = message.get("from" if sharegpt else "role") if is_object else None
    if not isinstance(role, str):
        raise ValueError("a message is not an object with 'role' and 'content'")
    _refuse_unsupported(message, UNSUPPORTED_IN_MESSAGE, "a message has ")
    if message.get("weight") not in (None, 1):
        weight = reprlib.repr(message["weight"])
        raise ValueError(
            f"a message has the weight {weight}, which is not supported: every answer has weight 1"
        )
    if sharegpt and role in TOOL_ROLES:
        raise ValueError(f"a message is from {role!r}, which is not supported: tools are not")
    name = "value" if sharegpt else "content"
    content = message.get(name)
    content = _join_parts(content) if isinstance(content, list) else _text(message, name)
    return {"role": ROLES.get(role, role) if sharegpt else role, "content": content}


def _join_parts(parts: list) -> str:
    """Join the parts of a content, {"type": "text", "text": …}."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(
                f"a message has a part of type {reprlib.repr(kind)}, which is not supported: only "
                "text is trained on"
            )
    return "".join(_text(part, "text") for part in parts)


def _system_message(row: Mapping[str, Any]) -> list[dict]:
    """Return the message of the optional key "system", if it has a text."""
    return [{"role": "system", "content": _text(row, "system")}] if row.get("system") else []


def _refuse_unsupported(row: dict, keys: tuple[str, ...], prefix: str = "") -> None:
    if lost := [key for key in keys if row.get(key)]:
        raise ValueError(
            f"{prefix}{lost[0]!r}, which is not supported: only the text of messages, and of "
            "prompts and completions, is trained on"
        )


def _text(row: Mapping[str, Any], name: str) -> str:
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
