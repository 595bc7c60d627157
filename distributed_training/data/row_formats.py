"""The formats of rows: the keys that each has, and what its rows become.

To add one, write a subclass of RowFormat, and put it into FORMATS. Which file a row is from does
not matter: `file_types` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from distributed_training.data import conversations
from distributed_training.data.conversations import Content, Template, text_of
from distributed_training.data.tools import tools_of

Values = Mapping[str, object]  # of the keys of a format; None for an optional key that a row lacks


class RowFormat:
    """A format of rows, which the keys of a row determine."""

    name: str  # in messages to the user and in results.json
    required: tuple[str, ...]  # keys that a row has
    optional: tuple[str, ...] = ()  # further keys that are read
    answers: tuple[str, ...] = ()  # the keys with what a model would learn to write
    # For docs/DATA.md: (keys and their values, where the format is from, what a row becomes).
    described: tuple[tuple[str, str, str], ...]

    def content(self, row: Values, template: Template) -> Content:
        """Return what a row becomes.

        Args:
            template: the tokenizer's chat template.
        Raises:
            ValueError: the row cannot be used, or is not UTF-8.
        """
        raise NotImplementedError


class Messages(RowFormat):
    """OpenAI's conversations."""

    name, required, optional, answers = "messages", ("messages",), ("tools",), ("messages",)
    described = (
        (
            "`messages`: a list of `role` and `content`",
            "OpenAI's and TRL's conversations",
            "conversation",
        ),
    )

    def content(self, row: Values, template: Template) -> Content:
        return conversations.conversation(row, conversations.messages_of(row, "messages"))


class ShareGPT(RowFormat):
    """Conversations with `from` and `value` instead of `role` and `content`."""

    name, required, optional = "ShareGPT (conversations)", ("conversations",), ("system", "tools")
    answers = ("conversations",)
    described = (("`conversations`: a list of `from` and `value`", "ShareGPT", "conversation"),)

    def content(self, row: Values, template: Template) -> Content:
        return conversations.conversation(row, conversations.messages_of(row, "conversations"))


class PromptAndCompletion(RowFormat):
    """A prompt and its completion: two texts, or two lists of messages."""

    name, required, optional = "prompt and completion", ("prompt", "completion"), ("tools",)
    answers = ("completion",)
    described = (
        (
            "`prompt`, `completion`: two lists of messages",
            "TRL's conversational prompt and completion",
            "conversation",
        ),
        ("`prompt`, `completion`: two texts", "TRL's prompt and completion", "pair"),
    )

    def content(self, row: Values, template: Template) -> Content:
        if isinstance(row["prompt"], list) or isinstance(row["completion"], list):
            asked = conversations.messages_of(row, "prompt")
            answered = conversations.messages_of(row, "completion")
            content = conversations.conversation(row, asked + answered)
            name = "prompt and completion, each a list of messages"
            return {**content, "format": name, "context": len(asked)}
        if tools_of(row.get("tools")):
            raise ValueError("'tools' needs conversations: a pair of texts has no place for it")
        prompt, completion = text_of(row, "prompt"), text_of(row, "completion")
        return {"kind": "pair", "prompt": prompt, "completion": completion}


class Alpaca(RowFormat):
    """An instruction, an optional input for it, and the output."""

    name = "Alpaca (instruction, input, output)"
    required, optional, answers = ("instruction", "output"), ("input", "system"), ("output",)
    described = (
        (
            "`instruction`, `output`, optional `input`",
            "Alpaca",
            "conversation, or pair without a chat template",
        ),
    )

    def content(self, row: Values, template: Template) -> Content:
        as_chat = bool(template) and not conversations.is_plain(template)
        return conversations.instruction(row, as_chat)


class Text(RowFormat):
    """A document."""

    name, required = "text", ("text",)
    described = (("`text`", "text", "document"),)

    def content(self, row: Values, template: Template) -> Content:
        return {"kind": "text", "pieces": [text_of(row, "text")]}


# The first that fits is used.
FORMATS = (Messages(), ShareGPT(), PromptAndCompletion(), Alpaca(), Text())
