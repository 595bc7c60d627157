"""Conversations and prompt-completion pairs as token ids, of which some are valid.

The loss counts the valid tokens: the assistant's messages, or the completion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np

from support.data.formats import BadRow, Example
from support.errors import UserError, first_line

# For tokenizers without a chat template, such as GPT-2's: plain headings, and the end-of-text token
# (if the tokenizer has one) after each answer.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}### Assistant:\n"
    "{{ message['content'] }}{{ eos_token }}\n\n"
    "{% else %}### {{ message['role'] | capitalize }}:\n{{ message['content'] }}\n\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
PLAIN_NOTICE = (
    "This tokenizer has no chat template, so conversations get a plain one (### User: …): "
    "use --chat_template FILE for another one."
)
# Replaces an assistant's text when a conversation is rendered to find the text's position; the two
# characters around the number are from Unicode's private use area.
MARK = "\ue000{}\ue001"


def template_of(tokenizer: Any) -> str | None:
    """Return a tokenizer's chat template; of several, the one for conversations without tools."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def has_own_template(tokenizer: Any) -> bool:
    """Return whether a tokenizer has a chat template other than PLAIN_TEMPLATE."""
    return template_of(tokenizer) not in (None, "", PLAIN_TEMPLATE)


class Encoder:
    """An encoder of examples into token ids, where a token t without a loss is ~t.

    If the chat template has {% generation %} blocks, they determine the valid tokens. Otherwise the
    conversation is rendered a second time with a mark in place of each of the assistant's texts.
    The valid tokens are those at the positions of the marks, and the special token that follows and
    ends the turn. The assistant's messages among the first `Example.context` messages have no valid
    tokens.

    Args:
        tokenizer: a fast Hugging Face tokenizer; for conversations, one with a chat template.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.marks_itself = (
            re.search(r"\{%-?\s*generation\b", template_of(tokenizer) or "") is not None
        )
        self.special = sorted(map(str, tokenizer.get_added_vocab()), key=len, reverse=True)

    def encode(self, examples: list[Example]) -> list[np.ndarray | BadRow]:
        """Encode examples, all of the same kind.

        Returns:
            For each example its ids, int32 [tokens]; or a BadRow with the reason why it cannot be
            used.
        Raises:
            UserError: the chat template has a syntax error.
        """
        encoded: Sequence[np.ndarray | BadRow]
        if examples[0].kind == "pair":
            encoded = self._encode_pairs(examples)
        else:
            encode = self._by_template if self.marks_itself else self._by_marks
            encoded = [_or_bad_row(encode, example) for example in examples]
        return [self._if_learned(*pair) for pair in zip(examples, encoded, strict=True)]

    def _if_learned(self, example: Example, row: np.ndarray | BadRow) -> np.ndarray | BadRow:
        """Return the row, or a BadRow if it has no valid token other than an end of turn."""
        if isinstance(row, BadRow):
            return row
        has_target = bool((row[1:] >= 0).any())
        if example.messages is None:
            if has_target and example.completion.strip():
                return row
            return BadRow(f"{example.where}: the completion is empty.")
        answers = [example.messages[number]["content"].strip() for number in example.answers]
        if has_target and (self.marks_itself or any(answers)):
            return row
        roles = ", ".join(sorted({message["role"] for message in example.messages}))
        return BadRow(
            f"{example.where}: it has no token to train on, because the assistant says nothing "
            f"(roles: {roles})."
        )

    def _encode_pairs(self, examples: list[Example]) -> list[np.ndarray]:
        """Encode prompt and completion separately, followed by the end-of-text token.

        The prompt is encoded alone because it is alone when the trained model is used.
        """
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        prompts = self.tokenizer([e.prompt for e in examples], verbose=False)
        completions = self.tokenizer(
            [e.completion for e in examples], add_special_tokens=False, verbose=False
        )
        rows = []
        for prompt, completion in zip(prompts["input_ids"], completions["input_ids"], strict=True):
            if end and prompt[-1:] == end:  # some tokenizers append it to every text
                prompt = prompt[:-1]
            completion = completion + end if completion else []
            mask = np.repeat([False, True], [len(prompt), len(completion)])
            rows.append(_masked(prompt + completion, mask))
        return rows

    def _by_template(self, example: Example) -> np.ndarray:
        assert example.messages is not None
        encoded = self.tokenizer.apply_chat_template(
            example.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        text = self.tokenizer.apply_chat_template(example.messages, tokenize=False)
        self._check_all_are_rendered(text, example.messages)
        mask = np.array(encoded["assistant_masks"], dtype=bool)
        context = sum(m["role"] == "assistant" for m in example.messages) - len(example.answers)
        if context:
            # Each answer is a run of valid tokens.
            begins = np.flatnonzero(np.diff(mask.astype(int), prepend=0) == 1)
            if len(begins) != context + len(example.answers):
                raise BadRow(
                    f"{example.where}: the {{% generation %}} blocks of the chat template do not "
                    "distinguish the answers of the prompt from the completion."
                )
            mask[: [*begins, len(mask)][context]] = False
        return _masked(encoded["input_ids"], mask)

    def _by_marks(self, example: Example) -> np.ndarray:
        text, ranges = self._render(example)
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        starts, ends = np.array(encoded["offset_mapping"]).reshape(-1, 2).T
        mask = np.zeros(len(starts), dtype=bool)
        for start, end in ranges:
            mask |= (starts < end) & (ends > start)
        return _masked(encoded["input_ids"], mask)

    def _render(self, example: Example) -> tuple[str, list[tuple[int, int]]]:
        """Return the whole text, and the character ranges of the valid tokens."""
        assert example.messages is not None
        answers, marked = [], list(example.messages)
        for number in example.answers:
            answers.append(example.messages[number]["content"])
            marked[number] = _marked(example.messages[number], number)
        text = self.tokenizer.apply_chat_template(example.messages, tokenize=False)
        self._check_all_are_rendered(text, example.messages)
        with_marks = self.tokenizer.apply_chat_template(marked, tokenize=False)
        around = re.split("\ue000\\d+\ue001", with_marks)
        # Many templates strip the messages.
        for texts in (answers, [answer.strip() for answer in answers]):
            if len(around) == len(texts) + 1 and _join(around, texts) == text:
                return text, self._ranges(around, texts)
        raise BadRow(
            f"{example.where}: the chat template changes the assistant's text, so its position is "
            "unknown: use a template with {% generation %} blocks (--chat_template)."
        )

    def _check_all_are_rendered(self, text: str, messages: list[dict]) -> None:
        """Check that the template leaves out no message.

        Some templates know a few roles only, and ignore a message of another one.
        """
        for number, message in enumerate(messages):
            if message["content"].strip() in text:
                continue
            # It is missing, or the template changes it.
            marked = [*messages[:number], _marked(message, number), *messages[number + 1 :]]
            rendered = self.tokenizer.apply_chat_template(marked, tokenize=False)
            if MARK.format(number) not in rendered:
                raise ValueError(f"it leaves out the message of the role {message['role']!r}")

    def _ranges(self, around: list[str], texts: list[str]) -> list[tuple[int, int]]:
        ranges, position = [], 0
        for prefix, text, suffix in zip(around, texts, around[1:], strict=False):
            start = position + len(prefix)
            # Llama 2's template has a space before the special token that ends the turn.
            blanks = len(suffix) - len(suffix.lstrip(" "))
            end_of_turn = next(
                (blanks + len(token) for token in self.special if suffix.startswith(token, blanks)),
                0,
            )
            position = start + len(text)
            ranges.append((start, position + end_of_turn))
        return ranges


# What a template raises for a row that it does not accept, or by a mistake in it.
TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError, MemoryError),
)


def _or_bad_row(encode: Callable[[Example], np.ndarray], example: Example) -> np.ndarray | BadRow:
    """Encode an example; return the reason if its chat template refuses it.

    Raises:
        UserError: the template has a syntax error, so other rows fail as well.
    """
    try:
        return encode(example)
    except BadRow as flaw:
        return flaw
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"The chat template cannot be read: line {error.lineno}: {error.message}."
        ) from error
    except TEMPLATE_ERRORS as error:
        reason = first_line(error, 200)
        return BadRow(f"{example.where}: the chat template refuses it: {reason}")


def _marked(message: dict, number: int) -> dict:
    return {**message, "content": MARK.format(number)}


def _join(around: list[str], texts: list[str]) -> str:
    return around[0] + "".join(
        text + suffix for text, suffix in zip(texts, around[1:], strict=True)
    )


def _masked(ids: list[int], mask: np.ndarray) -> np.ndarray:
    """Return ids, int32, with ~id where the mask is False."""
    array = np.array(ids, dtype=np.int32)
    return np.where(mask, array, ~array)


@dataclass(frozen=True)
class Prompt:
    """What --generate continues."""

    ids: list[int]  # its token ids
    is_chat: bool  # whether they are a conversation with the text as the user's message


def prompt_of(text: str, tokenizer: Any, as_chat: bool) -> Prompt:
    """Return the token ids of --generate.

    Args:
        as_chat: render it with the tokenizer's chat template, if it has one.
    Raises:
        UserError: the template refuses the text, or the tokenizer returns no token.
    """
    is_chat = as_chat and template_of(tokenizer) is not None
    rendered = text
    if is_chat:
        messages = [{"role": "user", "content": text}]
        try:
            rendered = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except TEMPLATE_ERRORS as error:
            raise UserError(
                f"--generate: the chat template refuses it ({first_line(error, 200)}): use another "
                "one with --chat_template FILE."
            ) from error
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    if not ids:
        raise UserError(f"--generate {text!r}: this model's tokenizer returns no token for it.")
    return Prompt(ids, is_chat)


def use_plain_template(tokenizer: Any, kind: str | None) -> bool:
    """Set PLAIN_TEMPLATE on a tokenizer without a chat template, if the rows are conversations.

    Args:
        kind: "chat", "pair" or "text"; None if there are no rows.
    Returns:
        Whether the conversations get PLAIN_TEMPLATE.
    Raises:
        UserError: the tokenizer is a slow one, which does not give the characters of a token.
    """
    if kind != "chat":
        return False
    if not tokenizer.is_fast:
        raise UserError(
            "Conversations need a fast tokenizer (tokenizer.json), but this model has only a slow "
            "one."
        )
    if tokenizer.chat_template in (None, PLAIN_TEMPLATE):
        tokenizer.chat_template = PLAIN_TEMPLATE
        return True
    return False
