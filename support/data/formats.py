"""The formats of a row: how each is recognized, and the document or example that a row becomes.

A row has the keys of one of FORMATS. Any file without rows is text, and one document. A row that
cannot be used is a `BadRow`, which names its file and line.
"""

from __future__ import annotations

import itertools
import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.cli.arguments import Arguments
from support.errors import UserError
from support.files.user_files import printable

# Keys of a row, and of a message, whose values would not be trained on: only text is. A row in
# which one of them has a value cannot be used. For "text" they are not read.
UNSUPPORTED = ("tools", "functions", "images", "image", "videos", "video", "audios", "audio")
UNSUPPORTED_IN_MESSAGE = (
    *("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"),
    *("images", "image", "audio"),
)
# ShareGPT's names of the roles that chat templates know; its other names are kept.
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
TOOL_ROLES = ("function_call", "function_response", "function", "observation", "tool_call", "tool")
# The prompt of the Alpaca dataset (github.com/tatsu-lab/stanford_alpaca), for models without a chat
# template. The completion follows without a space, as in the project's own training script.
ALPACA_PREAMBLE = (
    "Below is an instruction that describes a task{}. "
    "Write a response that appropriately completes the request."
)
ALPACA_INPUT = ", paired with an input that provides further context"


class BadRow(UserError):
    """A row that cannot be used, with its place and the reason."""

    def __init__(self, text: str) -> None:
        # The text may quote bytes that are not UTF-8.
        super().__init__(printable(text.encode(errors="replace").decode()))


@dataclass(frozen=True)
class Document:
    """A text; the loss counts all of it."""

    where: str  # its file and line
    pieces: Iterable[str]  # the text, in one or more pieces
    format: str = "text"  # name of its format, for the user
    is_file: bool = False  # a whole text file, of any length
    kind: str = "text"


@dataclass(frozen=True)
class Example:
    """A conversation, or a prompt and its completion; the loss counts a part of it."""

    where: str  # its file and line
    messages: list[dict] | None = None  # the conversation; None for a pair
    prompt: str = ""
    completion: str = ""
    # Number of messages at the beginning that the loss does not count, also not the assistant's.
    context: int = 0
    format: str = ""

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
        """The end of a prompt and the start of its completion, if nothing separates their words."""
        apart = self.prompt[-1:].isspace() or self.completion[:1].isspace()
        both = self.prompt and self.completion and not apart
        return self.prompt[-12:] + self.completion[:12] if both else None

    def as_json(self) -> str:
        """Return its content as JSON, for a digest."""
        content = [self.prompt, self.completion] if self.messages is None else self.messages
        return json.dumps([content, self.context] if self.context else content, sort_keys=True)


Content = Document | Example | BadRow


@dataclass
class OneKind:
    """A check that all rows of a corpus are of one kind."""

    kind: str | None = None  # "text", "chat" or "pair", as the first usable row; None before it
    formats: list[str] = field(default_factory=list)  # of the rows, in the order of appearance

    def check(self, row: Content) -> Content:
        """Return the row, or a BadRow if it is of another kind than the rows before it."""
        if isinstance(row, BadRow):
            return row
        self.kind = self.kind or row.kind
        if row.kind != self.kind:
            return BadRow(f"{row.where}: of kind {row.kind} among rows of kind {self.kind}.")
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
        return cls(tuple((key, name) for key, name in columns.items() if name), chat_template)


# A format's name, the keys that its rows have, and further keys that are read. The first that fits
# is used.
FORMATS = (
    ("messages", ("messages",), ()),
    ("ShareGPT (conversations)", ("conversations",), ("system",)),
    ("prompt and completion", ("prompt", "completion"), ()),
    (
        "Alpaca (instruction, input, output)",
        ("instruction", "output"),
        ("input", "system", "history"),
    ),
    ("text", ("text",), ()),
)


def format_of(keys: Iterable[str], options: RowOptions) -> tuple[str, dict[str, str]]:
    """Return the name of the format that fits, and {key: its column} of the keys that it reads.

    Raises:
        ValueError: a row or table with these keys has no known format.
    """
    found, columns, wanted = set(keys), dict(options.columns), []
    for name, required, optional in FORMATS:
        if columns.keys() <= set(required):
            names = [columns.get(key, key) for key in required]
            if found.issuperset(names):
                return name, {key: columns.get(key, key) for key in (*required, *optional)}
            wanted.append(" with ".join(map(repr, names)))
    first = [str(key)[:40] for key in itertools.islice(keys, 10)]
    raise ValueError(
        f"no {', no '.join(wanted)}, but {', '.join(first) or 'nothing'}: rename a key, or name "
        "one with --text_column, --prompt_column or --completion_column"
    )


def columns_of_table(columns: list[str], options: RowOptions, where: str) -> list[str]:
    """Return the columns of a table that are read; `where` is the table, for messages."""
    try:
        name, read = format_of(columns, options)
    except ValueError as error:
        raise UserError(f"{where}: {error}.") from error
    also = () if name == "text" else UNSUPPORTED
    return [column for column in (*read.values(), *also) if column in columns]


def read_row(row: Any, where: str, options: RowOptions) -> Content:
    """Convert a row, a text or an object with the keys of a format, to what it is.

    Returns:
        A document or an example; a BadRow with the reason if it is neither.
    """
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
            text = "" if values["text"] is None else _text(values, "text")
            return Document(where, [text])  # null is an empty document
        _refuse_unsupported(row, UNSUPPORTED)
        return Example(where, **{"format": name, **_convert(values, options)})
    except ValueError as error:
        return BadRow(f"{where}: {error}.")


def _convert(row: dict[str, Any], options: RowOptions) -> dict[str, Any]:
    """Return the fields of the Example of a row; raise a ValueError if it cannot be used."""
    system: list[dict] = []
    if row.get("system"):
        system = [{"role": "system", "content": _text(row, "system")}]
    for key in ("messages", "conversations"):
        if key in row:
            return {"messages": system + _messages(row, key)}
    if "prompt" in row:
        if not isinstance(row["prompt"], list) and not isinstance(row["completion"], list):
            return {key: _text(row, key) for key in ("prompt", "completion")}
        prompt, completion = _messages(row, "prompt"), _messages(row, "completion")
        name = "prompt and completion, each a list of messages"
        return {"messages": prompt + completion, "context": len(prompt), "format": name}
    if row["history"]:
        raise ValueError("'history' is not supported: write the conversation as 'messages'")
    task, answer = _text(row, "instruction"), _text(row, "output")
    context = _text(row, "input") if row["input"] else ""
    if options.chat_template:
        content = "\n".join(part for part in (task, context) if part)
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        return {"messages": system + turns}
    preamble = ALPACA_PREAMBLE.format(ALPACA_INPUT if context else "")
    preamble = _text(row, "system") if system else preamble
    heading = f"\n\n### Input:\n{context}" if context else ""
    question = f"{preamble}\n\n### Instruction:\n{task}{heading}\n\n### Response:"
    return {"prompt": question, "completion": answer}


def _messages(row: Mapping[str, Any], name: str) -> list[dict]:
    if not isinstance(row[name], list) or not row[name]:
        raise ValueError(f"{name!r} is not a list of messages")
    return [_message(message) for message in row[name]]


def _message(message: Any) -> dict:
    """Return a message with `role` and `content` (ShareGPT: `from` and `value`)."""
    if not isinstance(message, dict):
        message = {}
    sharegpt = message.get("role") is None and "from" in message
    role = message.get("from" if sharegpt else "role")
    if not isinstance(role, str):
        raise ValueError("a message is not an object with 'role' and 'content'")
    _refuse_unsupported(message, UNSUPPORTED_IN_MESSAGE)
    if message.get("weight") not in (None, 1):
        weight = reprlib.repr(message["weight"])
        raise ValueError(f"a message has the weight {weight}: only 1 is supported")
    if sharegpt and role in TOOL_ROLES:
        raise ValueError(f"a message is from {role!r}: tools are not supported")
    name = "value" if sharegpt else "content"
    content = message.get(name)
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = reprlib.repr(part.get("type") if isinstance(part, dict) else part)
            raise ValueError(f"a message has a part of type {kind}: only text is trained on")
    text = "".join(_text(part, "text", name) for part in parts)
    return {"role": ROLES.get(role, role) if sharegpt else role, "content": text}


def _refuse_unsupported(row: dict, keys: tuple[str, ...]) -> None:
    if lost := [key for key in keys if row.get(key)]:
        raise ValueError(f"{lost[0]!r} is not supported: only text is trained on")


def _text(row: Mapping[str, Any], key: str, name: str = "") -> str:
    """Return the text of a key, which messages call `name`."""
    value, name = row.get(key), name or key
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is not a text but {reprlib.repr(value)[:40]}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        problem = "is not UTF-8 text (iconv -f LATIN1 -t UTF-8 converts a file)"
        raise ValueError(f"{name!r} {problem}") from error
    return value
