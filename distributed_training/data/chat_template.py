"""A tokenizer's chat template: conversations as text, and the position of the assistant's messages.

An assistant's message is what the template writes for it after the generation prompt: its text and
its tool calls, what precedes them (such as an empty think block), and the special token that ends
its turn, with the white space before it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import jinja2

from distributed_training.data.conversations import PLAIN_TEMPLATE, Message, is_plain
from distributed_training.data.special_tokens import start_of
from distributed_training.data.tools import Tool, ToolCall
from distributed_training.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands for a text when a conversation is rendered to find the position of the text; the characters
# around the number are from Unicode's private use area.
MARK = "\ue000{}\ue001"
# Begin and end of a {% generation %} block, rendered for the same purpose.
BLOCK_BEGIN, BLOCK_END = "\ue002", "\ue003"
BLOCK_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
UNKNOWN_POSITION = (
    "the chat template changes the assistant's {}, so its position is unknown: use a template with "
    "{{% generation %}} blocks (--chat_template FILE, such as recipes/chat_with_tools.jinja)"
)
OTHER = (
    "use another --chat_template FILE, such as recipes/chat_with_tools.jinja, or a model whose "
    "template writes all parts"
)
# A tool and its call, to find out which form of the arguments a template expects. Mistral's checks
# the length of the id.
EXAMPLE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "a",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
EXAMPLE_CALL: ToolCall = {
    "type": "function",
    "function": {"name": "f", "arguments": {"a": "b"}},
    "id": "a" * 9,
}


class Chat(NamedTuple):
    """A conversation, and the tools that the assistant may call."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()

    def begin(self, count: int) -> Chat:
        """Return the conversation up to its first `count` messages."""
        return self._replace(messages=self.messages[:count])

    def replace(self, others: Mapping[int, Message]) -> Chat:
        """Return a copy with other messages at these numbers."""
        changed = [others.get(n, message) for n, message in enumerate(self.messages)]
        return self._replace(messages=changed)


QUESTION = Chat([{"role": "user", "content": "a"}])  # shows what a template writes around answers


def text_of(message: Message) -> str:
    """Return the text of a message, which one with tool calls may not have."""
    return message.get("content", "")


def answer(text: str) -> Message:
    """Return a message of the assistant."""
    return {"role": "assistant", "content": text}


class ChatTemplate:
    """The chat template of a tokenizer.

    Attributes:
        special: the tokens that were added to the vocabulary, the longest first.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.special = sorted(map(str, tokenizer.get_added_vocab()), key=len, reverse=True)

    # ----------------------------------------------------------------------- as text and as tokens

    def source(self, with_tools: bool = False) -> str:
        """Return the text of the template; of several by name, the one that is used."""
        template = self.tokenizer.chat_template
        if isinstance(template, dict):
            default = template.get("default")
            template = template.get("tool_use", default) if with_tools else default
        return template or ""

    def has_blocks(self, with_tools: bool = False) -> bool:
        """Return whether {% generation %} blocks determine what is trained."""
        return re.search(r"\{%-?\s*generation\b", self.source(with_tools)) is not None

    def render(self, chat: Chat, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation.

        Raises:
            ValueError: the template refuses the conversation.
            UserError: the template has a syntax error, so other rows fail as well.
        """
        return self._render(chat, self._messages(chat), add_generation_prompt)

    def _messages(self, chat: Chat) -> list[object]:
        if any("tool_calls" in message for message in chat.messages) and not self._takes_objects:
            return [_with_text_arguments(message) for message in chat.messages]
        return list(chat.messages)

    def _render(
        self, chat: Chat, messages: list[object], add_generation_prompt: bool, source: str = ""
    ) -> str:
        with _errors_of_template():
            return self.tokenizer.apply_chat_template(
                messages,
                tools=list(chat.tools) or None,
                chat_template=source or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )

    def tokenize(self, chat: Chat, with_mask: bool = False) -> Mapping[str, list[int]]:
        """Return "input_ids" of a conversation; with a mask also "assistant_masks"."""
        options = {"return_assistant_tokens_mask": True} if with_mask else {}
        messages, tools = self._messages(chat), list(chat.tools) or None
        with _errors_of_template():
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, **options
            )

    @cached_property
    def _takes_objects(self) -> bool:
        """Whether the arguments of a tool call are an object for the template, not JSON text.

        Most templates write an object as JSON. Others refuse it, or write it as Python does.
        """
        called: Message = {"role": "assistant", "tool_calls": [EXAMPLE_CALL]}
        chat = Chat([{"role": "user", "content": "a"}, called], [EXAMPLE_TOOL])
        texts = []
        for messages in (chat.messages, map(_with_text_arguments, chat.messages)):
            try:
                texts.append(self._render(chat, list(messages), add_generation_prompt=False))
            except ValueError:
                texts.append("")
        of_object, of_text = texts
        return not of_text or (bool(of_object) and "{'a': 'b'}" not in of_object)

    # ------------------------------------------------------------------ what a template leaves out

    def check_nothing_is_left_out(self, chat: Chat, text: str) -> None:
        """Check that the template writes every message, tool call and tool.

        Args:
            text: of the conversation.
        Raises:
            ValueError: it leaves one out. A model would be trained on answers without their cause.
        """
        texts = [text_of(message).strip() for message in chat.messages]
        for number, message in enumerate(chat.messages):
            # If it is not there as it is, the template leaves it out, or changes it. What another
            # message repeats may be there without it.
            repeated = any(texts[number] in other for n, other in enumerate(texts) if n != number)
            if texts[number] and (repeated or texts[number] not in text):
                self._check_writes({number: {**message, "content": MARK.format(number)}}, chat)
        self._check_tools(chat, text)

    def _check_writes(self, marked: Mapping[int, Message], chat: Chat) -> None:
        text = self.render(chat.replace(marked))
        for message in marked.values():
            calls, role = message.get("tool_calls", ()), message["role"]
            if text_of(message) not in text:
                part = (
                    "the text next to tool calls" if calls else f"the message of the role {role!r}"
                )
                raise ValueError(f"the template leaves out {part}: {OTHER}")
            if any(call["function"]["name"] not in text for call in calls):
                raise ValueError(f"the template leaves out tool calls: {OTHER}")

    def _check_tools(self, chat: Chat, text: str) -> None:
        """Check what the text of other messages may repeat, so that finding it is not enough."""
        marked = {
            number: _marked(message, number)
            for number, message in enumerate(chat.messages)
            if message["role"] == "tool" or "tool_calls" in message
        }
        if marked:
            self._check_writes(marked, chat)
        if chat.tools:
            try:
                without = self.render(chat._replace(tools=()))
            except ValueError:
                return  # it needs them
            if without == text:
                raise ValueError(f"the template leaves out 'tools': {OTHER}")

    # ------------------------------------------------------------------------------------ positions

    def ranges_of(self, chat: Chat, numbers: Collection[int], text: str) -> list[tuple[int, int]]:
        """Return the ranges [start, end) of characters of the assistant's messages `numbers`.

        The conversation is rendered with marks in place of their texts; of a message with tool
        calls, with a text in place of the message. So no tag of a template needs to be known.

        Args:
            text: of the conversation.
        Raises:
            ValueError: the template changes a text, or writes a message where it is not found.
        """
        calling = [number for number in numbers if "tool_calls" in chat.messages[number]]
        texts = sorted(set(numbers) - set(calling))
        marked = self.render(chat.replace({n: answer(MARK.format(n)) for n in texts}))
        ranges = self._find([text_of(chat.messages[n]) for n in texts], text, marked)
        ranges += [self._range_of_calls(chat, number, text) for number in calling]
        return [
            (self._start_of_answer(chat, number, text[:start]), end)
            for number, (start, end) in zip([*texts, *calling], ranges, strict=True)
        ]

    def ranges_of_blocks(self, chat: Chat, text: str) -> list[tuple[int, int]] | None:
        """Return the ranges [start, end) of characters of the {% generation %} blocks.

        transformers' own mask has a block up to the end of the conversation if the last character
        of the block has no token.

        Args:
            text: of the conversation.
        Returns:
            The ranges; None if the template changes what is in its blocks.
        """
        source = BLOCK_TAG.sub(_with_mark, self.source(bool(chat.tools)))
        marked = self._render(chat, self._messages(chat), False, source)
        pieces = re.split(f"([{BLOCK_BEGIN}{BLOCK_END}])", marked)
        if "".join(pieces[::2]) != text:
            return None
        ranges, place, start = list[tuple[int, int]](), 0, 0
        for piece in pieces:
            if piece == BLOCK_BEGIN:
                start = place
            elif piece == BLOCK_END:
                ranges.append((start, place))
            else:
                place += len(piece)
        return ranges

    def _start_of_answer(self, chat: Chat, number: int, before: str) -> int:
        """Return where the message of the assistant begins: right after the generation prompt.

        Some templates write more before the text, such as an empty think block (Qwen3) or the name
        of a channel (gpt-oss), which the model must write as well.

        Args:
            before: the conversation up to the text or the calls of the message.
        """
        prompt = self.generation_prompt
        if prompt == "":
            return len(before)
        for between in (self.before_answer, "") if prompt else ():
            if before.endswith(f"{prompt}{between}"):
                return len(before) - len(between)
        with contextlib.suppress(ValueError):
            asked = self.render(chat.begin(number), add_generation_prompt=True)
            if before.startswith(asked):
                return len(asked)
        return len(before)

    def _find(self, answers: list[str], text: str, marked: str) -> list[tuple[int, int]]:
        around = re.split("\ue000\\d+\ue001", marked)
        # Many templates strip the messages.
        for texts in (answers, [answer.strip() for answer in answers]):
            pairs = list(zip([*texts, ""], around[1:], strict=False))
            if len(around) == len(texts) + 1 and around[0] + "".join(map("".join, pairs)) == text:
                break
        else:
            raise ValueError(UNKNOWN_POSITION.format("text"))
        ranges, start = [], len(around[0])
        for found, suffix in pairs:
            ranges.append((start, start + len(found) + self.length_of_end(suffix)))
            start += len(found) + len(suffix)
        return ranges

    def _range_of_calls(self, chat: Chat, number: int, text: str) -> tuple[int, int]:
        """Return the range of a message with tool calls.

        What precedes and follows a text in its place is compared with the text of the conversation.
        If the template does not allow a text there (Mistral's), or writes it in another way, the
        range is what the message adds to the conversation before it, up to a special token.
        """
        for bounds in (self._bounds_by_mark, self._bounds_by_begin):
            with contextlib.suppress(ValueError):
                before, after = bounds(chat, number, text)
                end = len(text) - len(after)
                if text.startswith(before) and text.endswith(after) and len(before) < end:
                    return len(before), end + self.length_of_end(after)
        raise ValueError(UNKNOWN_POSITION.format("tool calls"))

    def _bounds_by_mark(self, chat: Chat, number: int, text: str) -> tuple[str, str]:
        mark = MARK.format(number)
        before, found, after = self.render(chat.replace({number: answer(mark)})).partition(mark)
        if not found:
            raise ValueError("the template leaves out a text in place of the tool calls")
        return before, after

    def _bounds_by_begin(self, chat: Chat, number: int, text: str) -> tuple[str, str]:
        before = self.render(chat.begin(number), add_generation_prompt=True)
        whole = self.render(chat.begin(number + 1)).rstrip()
        end = next((token for token in self.special if whole.endswith(token)), None)
        if end is None or not whole.startswith(before) or not text.startswith(whole):
            raise ValueError("the beginning is not found in the conversation, or has no end token")
        return before, text[len(whole) - len(end) :]

    def length_of_end(self, suffix: str) -> int:
        """Return the characters of the special token that ends the turn, at the start of a suffix.

        Llama 2's template has a space before it. Other white space is included only before a token
        that ends conversations, as the next turn may begin with another one.
        """
        blanks = len(suffix) - len(suffix.lstrip())
        ends = self.special if not suffix[:blanks].strip(" ") else self.ends_of_turns
        found = next((token for token in ends if suffix.startswith(token, blanks)), None)
        return blanks + len(found) if found else 0

    # --------------------------------------------------------------- before and after an answer

    @cached_property
    def generation_prompt(self) -> str | None:
        """What the template adds to a question as the prompt of the answer.

        "" if it does not use add_generation_prompt, None if it refuses a short conversation.
        """
        try:
            asked = self.render(QUESTION)
            prompted = self.render(QUESTION, add_generation_prompt=True)
        except ValueError:
            return None
        return prompted[len(asked) :] if prompted.startswith(asked) else None

    @cached_property
    def before_answer(self) -> str:
        """What the template puts between the generation prompt and the text of an answer."""
        before, prompt = self._around_answer[0], self.generation_prompt
        if prompt is None:
            return ""
        asked = prompt or self.render(QUESTION)
        return before.rpartition(asked)[2] if asked in before else ""

    @cached_property
    def after_answer(self) -> str:
        """What the template puts after the last answer; "" if it refuses a short conversation."""
        return self._around_answer[1]

    @cached_property
    def _around_answer(self) -> tuple[str, str]:
        mark = MARK.format(0)
        try:
            text = self.render(Chat([*QUESTION.messages, answer(mark)]))
        except ValueError:
            return "", ""
        before, _, after = text.rpartition(mark)
        return before, after

    @cached_property
    def ends_of_turns(self) -> list[str]:
        """The special tokens that end a conversation: the end-of-text token, and the template's."""
        suffix = self.after_answer.lstrip()
        at_end = next((token for token in self.special if suffix.startswith(token)), None)
        return [token for token in (at_end, self.tokenizer.eos_token) if token]

    @cached_property
    def end_after_answer(self) -> str | None:
        """The first special token after the last answer, also after other text."""
        after, known = self.after_answer, [*self.special, self.tokenizer.eos_token or ""]
        places = [(after.find(end), -len(end), end) for end in known if end.strip()]
        return min((place for place in places if place[0] >= 0), default=(0, 0, None))[-1]


def _with_mark(tag: re.Match[str]) -> str:
    """Return a tag of a {% generation %} block with a mark inside of the block.

    `set` renders nothing, and trims the white space around it as the tag did.
    """
    left, end, right = tag.groups()
    if end:
        mark = f"{{%{left} set block_mark = 0 %}}{{{{ '{BLOCK_END}' }}}}"
        return f"{mark}{{% endgeneration {right}%}}"
    mark = f"{{{{ '{BLOCK_BEGIN}' }}}}{{% set block_mark = 0 {right}%}}"
    return f"{{%{left} generation %}}{mark}"


def _marked(message: Message, number: int) -> Message:
    """Return a copy of a message with marks in place of its text and the names of its calls."""
    marked: Message = {**message}
    if text_of(message).strip():
        marked["content"] = MARK.format(f"{number}.0")
    if "tool_calls" in message:
        marked["tool_calls"] = calls = list[ToolCall]()
        for place, call in enumerate(message["tool_calls"], 1):
            mark, arguments = MARK.format(f"{number}.{place}"), call["function"]["arguments"]
            calls.append({**call, "function": {"name": mark, "arguments": arguments}})
    return marked


def _with_text_arguments(message: Message) -> dict[str, object]:
    """Return a copy of a message whose tool calls have their arguments as JSON text."""
    calls = []
    for call in message.get("tool_calls", ()):
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls} if calls else {**message}


@contextlib.contextmanager
def _errors_of_template() -> Iterator[None]:
    """Convert the errors of a chat template in this context, as `ChatTemplate.render` describes."""
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        problem = f"line {error.lineno}: {error.message}"
        raise UserError(f"The chat template cannot be read: {problem}.") from error
    except Exception as error:
        raise ValueError(f"the chat template refuses it: {first_line(error, 200)}") from error


def use_plain_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Set a plain template on a tokenizer without a template; return whether it has this one.

    Conversations then begin as the tokenizer begins other texts.

    Raises:
        UserError: the tokenizer is a slow one, which does not give the characters of a token.
    """
    if not tokenizer.is_fast:
        raise UserError("Conversations need a model with a fast tokenizer (tokenizer.json).")
    if not tokenizer.chat_template:
        start = "".join(tokenizer.convert_ids_to_tokens(start_of(tokenizer)))
        begin = f"{{{{ {json.dumps(start)} }}}}" if start else ""
        tokenizer.chat_template = begin + PLAIN_TEMPLATE
    return is_plain(tokenizer.chat_template)
