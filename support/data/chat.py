"""Conversations and prompt-completion pairs as token ids, of which some are valid.

The loss counts the valid tokens: the assistant's messages, or the completion.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
# What a template raises for a row that it does not accept: jinja2's errors, and Python's for the
# operations in it.
TEMPLATE_ERRORS: tuple[type[Exception], ...] = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)


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
    ends the turn. The first `Example.context` messages have no valid tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        template = template_of(tokenizer) or ""
        self.marks_itself = re.search(r"\{%-?\s*generation\b", template) is not None
        self.special = sorted(map(str, tokenizer.get_added_vocab()), key=len, reverse=True)

    def encode(self, examples: list[Example]) -> list[np.ndarray | BadRow]:
        """Return for each example, all of one kind, its ids, int32 [tokens], or a BadRow.

        Raises:
            UserError: the chat template has a syntax error.
        """
        if examples[0].kind == "pair":
            return self._encode_pairs(examples)
        return [self._encode_chat(example, example.messages or []) for example in examples]

    def _encode_pairs(self, examples: list[Example]) -> list[np.ndarray | BadRow]:
        """Encode prompt and completion separately, followed by the end-of-text token.

        The prompt is encoded alone because it is alone when the trained model is used.
        """
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        prompts = self.tokenizer([e.prompt for e in examples], verbose=False)["input_ids"]
        completions = self.tokenizer(
            [e.completion for e in examples], add_special_tokens=False, verbose=False
        )["input_ids"]
        rows: list[np.ndarray | BadRow] = []
        for example, prompt, completion in zip(examples, prompts, completions, strict=True):
            if end and prompt[-1:] == end:  # some tokenizers append it to every text
                prompt = prompt[:-1]
            completion = completion + end if completion and example.completion.strip() else []
            row = _masked(prompt + completion, np.arange(len(prompt + completion)) >= len(prompt))
            usable = (row[1:] >= 0).any()
            rows.append(row if usable else BadRow(f"{example.where}: the completion is empty."))
        return rows

    def _encode_chat(self, example: Example, messages: list[dict]) -> np.ndarray | BadRow:
        try:
            text = self.render(messages)
            for number, message in enumerate(messages):
                # A message that is not in the text is missing, or the template changes it.
                kept = message["content"].strip() in text
                if not kept and MARK.format(number) not in self.render(messages, [number]):
                    role = message["role"]
                    raise BadRow(f"the template leaves out the message of the role {role!r}")
            encode = self._by_template if self.marks_itself else self._by_marks
            row = encode(example, messages, text)
        except BadRow as flaw:
            return BadRow(f"{example.where}: {flaw}")
        says = self.marks_itself or any(messages[n]["content"].strip() for n in example.answers)
        if says and (row[1:] >= 0).any():
            return row
        roles = ", ".join(sorted({message["role"] for message in messages}))
        return BadRow(f"{example.where}: the assistant says nothing (roles: {roles}).")

    def render(self, messages: list[dict], marked: Sequence[int] = (), **options: Any) -> Any:
        """Return the text of a conversation, with marks in place of the messages `marked`.

        Raises:
            BadRow: the template refuses the conversation.
            UserError: the template has a syntax error, so other rows fail as well.
        """
        messages = [
            {**message, "content": MARK.format(number)} if number in marked else message
            for number, message in enumerate(messages)
        ]
        try:
            return self.tokenizer.apply_chat_template(messages, **({"tokenize": False} | options))
        except jinja2.TemplateSyntaxError as error:
            problem = f"line {error.lineno}: {error.message}"
            raise UserError(f"The chat template cannot be read: {problem}.") from error
        except TEMPLATE_ERRORS as error:
            reason = first_line(error, 200)
            raise BadRow(f"the chat template refuses it: {reason}") from error

    def _by_template(self, example: Example, messages: list[dict], text: str) -> np.ndarray:
        encoded = self.render(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = encoded["input_ids"], np.array(encoded["assistant_masks"], dtype=bool)
        if example.context:
            prompt = self.render(messages[: example.context], tokenize=True, return_dict=True)
            if ids[: len(prompt["input_ids"])] != prompt["input_ids"]:
                raise BadRow("the chat template renders the prompt differently if it is alone.")
            mask[: len(prompt["input_ids"])] = False
        return _masked(ids, mask)

    def _by_marks(self, example: Example, messages: list[dict], text: str) -> np.ndarray:
        answers = [messages[number]["content"] for number in example.answers]
        ranges = self._find(answers, text, self.render(messages, example.answers))
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        starts, ends = np.array(encoded["offset_mapping"]).reshape(-1, 2).T
        mask = np.zeros(len(starts), dtype=bool)
        for start, end in ranges:
            mask |= (starts < end) & (ends > start)
        return _masked(encoded["input_ids"], mask)

    def _find(self, answers: list[str], text: str, marked: str) -> list[tuple[int, int]]:
        """Return the character ranges of the valid tokens in a text; `marked` has the marks."""
        around = re.split("\ue000\\d+\ue001", marked)
        # Many templates strip the messages.
        for texts in (answers, [answer.strip() for answer in answers]):
            pairs = list(zip([*texts, ""], around[1:], strict=False))
            if len(around) == len(texts) + 1 and around[0] + "".join(map("".join, pairs)) == text:
                break
        else:
            raise BadRow(
                "the chat template changes the assistant's text, so its position is unknown: use "
                "a template with {% generation %} blocks (--chat_template)."
            )
        ranges, start = [], len(around[0])
        for answer, suffix in pairs:
            # Llama 2's template has a space before the special token that ends the turn.
            blanks = len(suffix) - len(suffix.lstrip(" "))
            ends = (blanks + len(t) for t in self.special if suffix.startswith(t, blanks))
            ranges.append((start, start + len(answer) + next(ends, 0)))
            start += len(answer) + len(suffix)
        return ranges


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
    messages, rendered = [{"role": "user", "content": text}], text
    if is_chat:
        try:
            rendered = Encoder(tokenizer).render(messages, add_generation_prompt=True)
        except UserError as error:
            raise UserError(f"--generate: {error}: use another --chat_template FILE.") from error
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    if not ids:
        raise UserError(f"--generate {text!r}: this model's tokenizer returns no token for it.")
    return Prompt(ids, is_chat)


def use_plain_template(tokenizer: Any, kind: str | None) -> bool:
    """Set PLAIN_TEMPLATE on a tokenizer without a template, and return whether it is needed.

    Args:
        kind: of the rows, "chat", "pair" or "text"; None if there are no rows.
    Raises:
        UserError: the tokenizer is a slow one, which does not give the characters of a token.
    """
    if kind == "chat" and not tokenizer.is_fast:
        raise UserError("Conversations need a model with a fast tokenizer (tokenizer.json).")
    if kind != "chat" or tokenizer.chat_template not in (None, PLAIN_TEMPLATE):
        return False
    tokenizer.chat_template = PLAIN_TEMPLATE
    return True
