"""Conversations and prompt-completion pairs as token ids, and the prompt of --generate.

The loss counts the valid ones: those of the assistant's messages, or the completion.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from distributed_training.data.chat_template import Chat, ChatTemplate, answer, text_of
from distributed_training.data.conversations import Message
from distributed_training.data.document_tokenizer import DocumentTokenizer
from distributed_training.data.facts import DatasetFacts
from distributed_training.data.rows import Row
from distributed_training.data.special_tokens import end_finder, start_of
from distributed_training.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Example(NamedTuple):
    """A conversation or a pair as token ids."""

    ids: np.ndarray  # int32 [tokens]; a token t without a loss is ~t
    end: int  # tokens up to the end of the first answer that has a trained end token; 0: none has


class Encoder:
    """An encoder of conversations and pairs into token ids.

    {% generation %} blocks of the chat template determine the tokens of the assistant's messages.
    Without them, `ChatTemplate.ranges_of` finds their characters.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.template = tokenizer, ChatTemplate(tokenizer)
        self.start, self.documents = start_of(tokenizer), DocumentTokenizer(tokenizer)

    def encode(self, row: Row) -> Example:
        """Return a row as token ids.

        Raises:
            ValueError: the row cannot be used.
            UserError: the chat template has a syntax error.
        """
        if row.kind == "pair":
            ids = self._pair(row)
            return Example(ids, self._end_of_completion(ids))
        chat = Chat(row.messages, row.tools)
        text = self.template.render(chat)
        self.template.check_nothing_is_left_out(chat, text)
        roles = [message["role"] for message in row.messages]
        answers = {number for number, role in enumerate(roles) if role == "assistant"}
        if row.trains_all:
            return self._whole(chat, text, answers, set(row.untrained))
        trained = answers - set(row.untrained) - set(range(row.context))
        if answers & set(row.untrained) and not trained:
            raise ValueError("each message of the assistant has the weight 0 or 'train': false")
        ids = _masked(*self._answers(chat, text, trained))
        blocks = self.template.has_blocks(bool(chat.tools))
        says = blocks or any(_says(row.messages[number]) for number in trained)
        if not says or not (ids[1:] >= 0).any():
            raise ValueError(f"the assistant says nothing (roles: {', '.join(sorted({*roles}))})")
        return Example(ids, self._end_of_answer(ids))

    def _pair(self, row: Row) -> np.ndarray:
        """Encode prompt and completion separately, followed by the end-of-text token.

        The prompt is encoded alone because it is alone when the trained model is used.
        """
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        before, after = map(self._ids, (row.prompt, row.completion))
        before = self.start + before
        ids = before + after + end
        if not after or not row.completion.strip() or len(ids) < 2:
            raise ValueError("the completion is empty")
        return _masked(ids, (np.arange(len(ids)) >= len(before)) | row.trains_all)

    def _ids(self, text: str) -> list[int]:
        pieces = list(self.documents.pieces([text]))
        encoded = self.documents.encode(pieces) if pieces else []
        return [token for ids in encoded for token in ids.tolist()]

    def _answers(self, chat: Chat, text: str, numbers: Set[int]) -> tuple[list[int], np.ndarray]:
        """Return the ids of a conversation, and which belong to the messages `numbers`."""
        if self.template.has_blocks(bool(chat.tools)):
            return self._by_blocks(chat, text, numbers)
        ranges = self.template.ranges_of(chat, numbers, text)
        ids, starts, ends = self.documents.encode_with_places(text)
        return ids, _mask_of(ranges, starts, ends)

    def _by_blocks(self, chat: Chat, text: str, numbers: Set[int]) -> tuple[list[int], np.ndarray]:
        ids, starts, ends = self.documents.encode_with_places(text)
        if (ranges := self.template.ranges_of_blocks(chat, text)) is not None:
            mask = _mask_of(ranges, starts, ends)
        else:
            encoded = self.template.tokenize(chat, with_mask=True)
            ids, mask = encoded["input_ids"], np.array(encoded["assistant_masks"], dtype=bool)
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant" or (
                number in numbers and "tool_calls" not in message
            ):
                continue
            start, end = (self._length(chat, count, text, starts) for count in (number, number + 1))
            if number not in numbers:
                mask[start:end] = False
            elif not mask[start:end].any():
                raise ValueError(
                    "the {% generation %} blocks of the chat template leave out tool calls: "
                    "extend them (--chat_template FILE)"
                )
        return ids, mask

    def _length(self, chat: Chat, count: int, text: str, starts: np.ndarray) -> int:
        """Return the tokens of the first messages, with which the conversation must begin.

        The last of them may have characters of the next message, such as "?" with a line break.

        Args:
            starts: places in `text` at which its tokens begin.
        """
        begin = self.template.render(chat.begin(count)) if count else ""
        if not text.startswith(begin):
            raise ValueError(
                "the chat template renders the first messages differently if they are alone, so a "
                "message without a loss is not found"
            )
        return int((starts < len(begin)).sum())

    def _whole(self, chat: Chat, text: str, answers: Set[int], untrained: Set[int]) -> Example:
        """Encode a conversation of which all tokens are trained, except some answers."""
        if untrained - answers:
            raise ValueError(
                "a message that is not the assistant's has the weight 0 or 'train': false: with "
                "--train_on all only the assistant's can be left out"
            )
        ids = self._ids(text)
        mask = np.ones(len(ids), dtype=bool)
        if untrained:
            left_out = self._answers(chat, text, untrained)[1]
            if not left_out.any():
                raise ValueError(
                    "the chat template does not show where a message without a loss is"
                )
            mask = ~left_out
        if not mask[1:].any():
            raise ValueError("no token is trained")
        return Example(_masked(ids, mask), self._end_in_whole(chat, text, answers - untrained))

    def _end_in_whole(self, chat: Chat, text: str, trained: Set[int]) -> int:
        """Return `Example.end` where what follows an answer is trained, whatever it is."""
        end = self.template.end_after_answer
        if not trained or not end:
            return 0
        try:
            ids, mask = self._answers(chat, text, trained)
        except ValueError:  # the template changes the answers: use the first end token
            ids = self._ids(text)
            mask = np.ones(len(ids), dtype=bool)
        first = int(mask.argmax())
        is_end = np.array(ids[first:]) == self.tokenizer.convert_tokens_to_ids(end)
        return first + int(is_end.argmax()) + 1 if is_end.any() else 0

    @cached_property
    def _end_of_answer(self) -> Callable[[np.ndarray], int]:
        return end_finder(self.tokenizer, self.template.ends_of_turns)

    @cached_property
    def _end_of_completion(self) -> Callable[[np.ndarray], int]:
        return end_finder(self.tokenizer, ())


def _mask_of(ranges: list[tuple[int, int]], starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return which tokens have a character in one of the ranges."""
    mask = np.zeros(len(starts), dtype=bool)
    for start, end in ranges:
        mask |= (starts < end) & (ends > start)
    return mask


def _says(message: Message) -> bool:
    return bool(text_of(message).strip()) or "tool_calls" in message


def _masked(ids: list[int], mask: np.ndarray) -> np.ndarray:
    """Return ids, int32, with ~id where the mask is False."""
    array = np.array(ids, dtype=np.int32)
    return np.where(mask, array, ~array)


def rendering_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a short conversation in the tokenizer's template; None if it has or allows none."""
    template = ChatTemplate(tokenizer)
    try:
        said = Chat([{"role": "user", "content": "a"}, answer("a")])
        return template.render(said) if template.source() else None
    except (UserError, ValueError):
        return None


class Prompt(NamedTuple):
    """What --generate continues."""

    ids: list[int]  # its token ids
    is_chat: bool  # whether they are a conversation with the text as the user's message
    start: int = 0  # the number of ids at the beginning that the tokenizer adds to a text


def prompt_of(text: str, tokenizer: PreTrainedTokenizerBase, as_chat: bool) -> Prompt:
    """Return the token ids of --generate.

    Args:
        as_chat: render it with the tokenizer's chat template, if it has one.
    Raises:
        UserError: the template refuses the text, or the tokenizer returns no token.
    """
    template, rendered = ChatTemplate(tokenizer), text
    is_chat = as_chat and bool(template.source())
    if is_chat:
        try:
            asked = Chat([{"role": "user", "content": text}])
            rendered = template.render(asked, add_generation_prompt=True)
        except (UserError, ValueError) as error:
            raise UserError(f"--generate: {error}: use another --chat_template FILE.") from error
    # A chat template writes the token that begins a text itself.
    start = [] if is_chat else start_of(tokenizer)
    ids = start + tokenizer(rendered, add_special_tokens=False)["input_ids"]
    if not ids:
        raise UserError(f"--generate {text!r}: this model's tokenizer returns no token for it.")
    return Prompt(ids, is_chat, len(start))


def prompt_for(
    text: str, tokenizer: PreTrainedTokenizerBase, dataset: DatasetFacts, eval_only: bool
) -> Prompt:
    """Return the prompt of --generate: in the chat template if conversations were trained.

    Base models have a chat template, too, so an evaluation only is the other case that uses it.

    Args:
        dataset: the dataset's entry in results.json.
    """
    kind = dataset.get("kind")  # None before a stream's first row
    return prompt_of(text, tokenizer, kind == "chat" or (eval_only and kind != "pair"))
