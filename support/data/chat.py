"""From a conversation, or a prompt and its completion, to token ids and a mask of those that are
learned.
"""

from __future__ import annotations

import re

import jinja2
import numpy as np

from support.data.sources import BadRow, Example
from support.data.templates import EndlessTemplate, check_length, limits
from support.errors import UserError

# For tokenizers that bring no chat template, such as GPT-2's: plain headings, and the end-of-text
# token after each answer.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}### Assistant:\n{{ message['content'] + eos_token }}\n\n"
    "{% else %}### {{ message['role'] | capitalize }}:\n{{ message['content'] }}\n\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
PLAIN_NOTICE = (
    "This tokenizer has no chat template, so conversations get a plain one (### User: …): --chat_template FILE "
    "changes it."
)
# Stand for the assistant's texts while a conversation is rendered, to find where they go; of
# Unicode's private use.
MARK = "\ue000{}\ue001"


def template_of(tokenizer) -> str | None:
    """A tokenizer's chat template; of several, the one for conversations without tools."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


class Encoder:
    """Turns examples into ids and what is learned of them.

    The mask of a conversation comes from the template itself where it has {% generation %} blocks.
    Otherwise the conversation is rendered a second time with a mark in place of each of the
    assistant's texts: what stands where a mark was is learned, and the special token that follows
    it, which ends the turn.

    Args:
        tokenizer: a Hugging Face tokenizer of the fast kind; for conversations with a chat
            template.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.marks_itself = (
            re.search(r"\{%-?\s*generation\b", template_of(tokenizer) or "") is not None
        )
        self.special = sorted(map(str, tokenizer.get_added_vocab()), key=len, reverse=True)

    def encode(self, examples: list[Example]) -> list[tuple[np.ndarray, np.ndarray] | BadRow]:
        """(ids, learned) of each example, two arrays of the same length; or why it cannot be used."""
        if examples[0].kind == "pair":
            found = self._encode_pairs(examples)
        elif self.marks_itself:
            found = [self._by_template(example) for example in examples]
        else:
            found = self._by_marks(examples)
        return [
            self._if_learned(example, row) for example, row in zip(examples, found, strict=True)
        ]

    def _if_learned(self, example: Example, row: tuple | BadRow) -> tuple | BadRow:
        """The row, unless there is nothing to learn in it; an end of turn alone is nothing."""
        said = [
            message["content"].strip()
            for message in example.messages or ()
            if message["role"] == "assistant"
        ]
        something = (
            example.completion.strip() if example.kind == "pair" else self.marks_itself or any(said)
        )
        if isinstance(row, BadRow) or (row[1][1:].any() and something):
            return row
        if example.kind == "pair":
            return BadRow(f"{example.where}: the completion is empty.")
        roles = ", ".join(sorted({message["role"] for message in example.messages}))
        return BadRow(
            f"{example.where}: there is nothing to learn, because the assistant says nothing (roles: {roles})."
        )

    def _encode_pairs(self, examples: list[Example]) -> list:
        """Prompt and completion by themselves, as a prompt will be when the model is used; then the
        end-of-text token.
        """
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        prompts = self.tokenizer(
            [e.prompt for e in examples], add_special_tokens=True, verbose=False
        )["input_ids"]
        completions = self.tokenizer(
            [e.completion for e in examples], add_special_tokens=False, verbose=False
        )["input_ids"]
        rows = []
        for prompt, completion in zip(prompts, completions, strict=True):
            if end and prompt[-1:] == end:  # some tokenizers end every text with it
                prompt = prompt[:-1]
            completion = completion + end if completion else []
            rows.append(
                (np.array(prompt + completion), np.repeat([0, 1], [len(prompt), len(completion)]))
            )
        return rows

    def _by_template(self, example: Example) -> tuple | BadRow:
        try:
            self._text_of(example.messages)  # within the limits; tokenizing may take more
            encoded = self.tokenizer.apply_chat_template(
                example.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as error:
            return _refused(example, error)
        return np.array(encoded["input_ids"]), np.array(encoded["assistant_masks"])

    def _by_marks(self, examples: list[Example]) -> list:
        rendered = [self._render(example) for example in examples]
        texts = [found[0] for found in rendered if not isinstance(found, BadRow)]
        if not texts:
            return rendered
        encoded = self.tokenizer(
            texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        rows = iter(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))
        return [
            found if isinstance(found, BadRow) else _learned(*next(rows), found[1])
            for found in rendered
        ]

    def _render(self, example: Example) -> tuple[str, list[tuple[int, int]]] | BadRow:
        """The whole text, and the ranges of characters that are learned."""
        said = [
            message["content"] for message in example.messages if message["role"] == "assistant"
        ]
        marked, number = [], 0
        for message in example.messages:
            if message["role"] == "assistant":
                message, number = {**message, "content": MARK.format(number)}, number + 1
            marked.append(message)
        try:
            text = self._text_of(example.messages)
            around = re.split("\ue000\\d+\ue001", self._text_of(marked))
        except Exception as error:
            return _refused(example, error)
        for texts in (
            said,
            [one.strip() for one in said],
        ):  # many templates strip what they are given
            if len(around) == len(texts) + 1 and _join(around, texts) == text:
                return text, self._ranges(around, texts)
        return BadRow(
            f"{example.where}: the chat template changes what the assistant says, so it cannot be found again: use a "
            "template with {% generation %} blocks (--chat_template)."
        )

    def _text_of(self, messages: list[dict]) -> str:
        with limits():
            return check_length(
                self.tokenizer.apply_chat_template(messages, tokenize=False), messages
            )

    def _ranges(self, around: list[str], texts: list[str]) -> list[tuple[int, int]]:
        ranges, at = [], 0
        for before, text, after in zip(around, texts, around[1:], strict=False):
            start = at + len(before)
            blanks = len(after) - len(after.lstrip(" "))  # Llama 2 has one before it
            end_of_turn = next(
                (blanks + len(token) for token in self.special if after.startswith(token, blanks)),
                0,
            )
            at = start + len(text)
            ranges.append((start, at + end_of_turn))
        return ranges


def _join(around: list[str], texts: list[str]) -> str:
    return around[0] + "".join(text + after for text, after in zip(texts, around[1:], strict=True))


def _learned(
    ids: list[int], offsets: list[tuple[int, int]], ranges: list[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    mask = np.zeros(len(ids), dtype=np.uint8)
    starts, ends = np.array(offsets).reshape(-1, 2).T
    for start, end in ranges:
        mask |= ((starts < end) & (ends > start)).astype(np.uint8)
    return np.array(ids), mask


def _refused(example: Example, error: Exception) -> BadRow:
    """Why a template, which may do anything, did not render a row.

    Raises:
        UserError: no row can be rendered, or the next one may take as long.
    """
    if isinstance(error, jinja2.TemplateSyntaxError):
        raise UserError(
            f"The chat template cannot be read: line {error.lineno}: {error.message}."
        ) from error
    if isinstance(error, EndlessTemplate):
        raise UserError(
            f"The chat template does not end: {error} for {example.where} (--chat_template FILE)."
        ) from error
    name, lines = type(error).__name__, str(error).splitlines()
    what = {
        "MemoryError": "it takes more memory than a row may have",
        "RecursionError": "it is nested too deeply",
    }.get(name)
    return BadRow(f"{example.where}: the chat template refuses it: {what or (lines or [name])[0]}")


def use_plain_template(tokenizer, kind: str | None) -> bool:
    """Give a tokenizer without a chat template PLAIN_TEMPLATE where there are conversations;
    whether it needed it.

    Raises:
        UserError: the tokenizer cannot say which characters a token stands for.
    """
    if kind != "chat":
        return False
    if not tokenizer.is_fast:
        raise UserError(
            "Conversations need a fast tokenizer (tokenizer.json): this model has a slow one only."
        )
    if tokenizer.chat_template in (None, PLAIN_TEMPLATE):
        tokenizer.chat_template = PLAIN_TEMPLATE
        return True
    return False
