"""Conversations and prompt-completion pairs as token ids, and the prompt of --generate.

The loss counts the valid ones: those of the assistant's messages, or the completion.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import jinja2
import numpy as np

from support.data.conversations import PLAIN_TEMPLATE, Message, is_plain
from support.data.facts import DatasetFacts
from support.data.rows import Row
from support.data.special_tokens import start_of
from support.errors import UserError, first_line
from support.files.user_files import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_NOTICE = (
    "This tokenizer has no chat template, so conversations get a plain one (### User: …): "
    "use --chat_template FILE for another one."
)
LINE_BREAK_NOTICE = (
    "The chat template has a line break between an answer and the end token {token!r}: both are "
    "trained, so the model learns to write a line break and to stop."
)
NO_END_NOTICE = (
    "No answer ends with a trained end token{among}, so the model would not learn to stop: "
    "{remedy}."
)
# Stands for an assistant's text when a conversation is rendered to find the position of the text;
# the characters around the number are from Unicode's private use area.
MARK = "\ue000{}\ue001"


class Encoder:
    """An encoder of conversations and pairs into token ids, where a token t without a loss is ~t.

    {% generation %} blocks of the chat template determine the valid tokens. Without them the
    conversation is rendered a second time, with marks in place of the assistant's texts. The valid
    tokens are those at the marks, and the special token that follows and ends the turn, with the
    white space before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.marks_itself = re.search(r"\{%-?\s*generation\b", _template_of(tokenizer)) is not None
        self.special = sorted(map(str, tokenizer.get_added_vocab()), key=len, reverse=True)
        self.start = start_of(tokenizer)

    def encode(self, row: Row) -> np.ndarray:
        """Return the ids of a row, int32 [tokens].

        Raises:
            ValueError: the row cannot be used.
            UserError: the chat template has a syntax error.
        """
        if row.kind == "pair":
            return self._pair(row.prompt, row.completion)
        messages = list(row.messages)
        numbered = list(enumerate(messages))[row.context :]
        answers = [number for number, message in numbered if message["role"] == "assistant"]
        text = self.render(messages)
        self._check_all_are_rendered(messages, text)
        if self.marks_itself:
            ids = self._by_template(messages, row.context)
        else:
            ids = self._by_marks(messages, answers, text)
        says = self.marks_itself or any(messages[n]["content"].strip() for n in answers)
        if not says or not (ids[1:] >= 0).any():
            roles = ", ".join(sorted({message["role"] for message in messages}))
            raise ValueError(f"the assistant says nothing (roles: {roles})")
        return ids

    def _pair(self, prompt: str, completion: str) -> np.ndarray:
        """Encode prompt and completion separately, followed by the end-of-text token.

        The prompt is encoded alone because it is alone when the trained model is used.
        """
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        before, after = (
            self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            for text in (prompt, completion)
        )
        before = self.start + before
        ids = before + after + end
        if not after or not completion.strip() or len(ids) < 2:
            raise ValueError("the completion is empty")
        return _masked(ids, np.arange(len(ids)) >= len(before))

    def render(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation.

        Raises:
            ValueError: the template refuses the conversation.
            UserError: the template has a syntax error, so other rows fail as well.
        """
        with _errors_of_template():
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )

    def _tokenize(self, messages: list[Message], with_mask: bool) -> Mapping[str, list[int]]:
        """Return "input_ids" of a conversation; with a mask also "assistant_masks"."""
        options = {"return_assistant_tokens_mask": True} if with_mask else {}
        with _errors_of_template():
            return self.tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, **options
            )

    def _check_all_are_rendered(self, messages: list[Message], text: str) -> None:
        for number, message in enumerate(messages):
            if message["content"].strip() not in text:  # left out, or changed by the template
                mark = MARK.format(number)
                marked = [*messages]
                marked[number] = {**message, "content": mark}
                if mark not in self.render(marked):
                    role = message["role"]
                    raise ValueError(f"the template leaves out the message of the role {role!r}")

    def _by_template(self, messages: list[Message], context: int) -> np.ndarray:
        encoded = self._tokenize(messages, with_mask=True)
        ids, mask = encoded["input_ids"], np.array(encoded["assistant_masks"], dtype=bool)
        if context:
            prompt = self._tokenize(messages[:context], with_mask=False)["input_ids"]
            if ids[: len(prompt)] != prompt:
                raise ValueError("the chat template renders the prompt differently if it is alone")
            mask[: len(prompt)] = False
        return _masked(ids, mask)

    def _by_marks(self, messages: list[Message], answers: list[int], text: str) -> np.ndarray:
        marked = list(messages)
        for number in answers:
            marked[number] = {"role": "assistant", "content": MARK.format(number)}
        ranges = self._find([messages[n]["content"] for n in answers], text, self.render(marked))
        options = {"add_special_tokens": False, "return_offsets_mapping": True}
        encoded = self.tokenizer(text, verbose=False, **options)
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
            raise ValueError(
                "the chat template changes the assistant's text, so its position is unknown: use "
                "a template with {% generation %} blocks (--chat_template)"
            )
        ranges, start = [], len(around[0])
        for answer, suffix in pairs:
            ranges.append((start, start + len(answer) + self._length_of_end(suffix)))
            start += len(answer) + len(suffix)
        return ranges

    def _length_of_end(self, suffix: str) -> int:
        """Return the characters of the special token that ends the turn, at the start of a suffix.

        Llama 2's template has a space before it. Other white space is included only before a token
        that ends conversations, as the next turn may begin with another one.
        """
        blanks = len(suffix) - len(suffix.lstrip())
        ends = self.special if not suffix[:blanks].strip(" ") else self.ends_of_turns
        found = next((token for token in ends if suffix.startswith(token, blanks)), None)
        return blanks + len(found) if found else 0

    @cached_property
    def after_answer(self) -> str:
        """What the template puts after the last answer; "" if it refuses a short conversation."""
        mark = MARK.format(0)
        question = {"role": "user", "content": "a"}
        try:
            text = self.render([question, {"role": "assistant", "content": mark}])
        except ValueError:
            return ""
        return text.rpartition(mark)[2]

    @cached_property
    def ends_of_turns(self) -> list[str]:
        """The special tokens that end a conversation: the end-of-text token, and the template's."""
        suffix = self.after_answer.lstrip()
        at_end = next((token for token in self.special if suffix.startswith(token)), None)
        return [token for token in (at_end, self.tokenizer.eos_token) if token]


@contextlib.contextmanager
def _errors_of_template() -> Iterator[None]:
    """Convert the errors of a chat template in this context, as `Encoder.render` describes."""
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        problem = f"line {error.lineno}: {error.message}"
        raise UserError(f"The chat template cannot be read: {problem}.") from error
    except Exception as error:
        raise ValueError(f"the chat template refuses it: {first_line(error, 200)}") from error


def _masked(ids: list[int], mask: np.ndarray) -> np.ndarray:
    """Return ids, int32, with ~id where the mask is False."""
    array = np.array(ids, dtype=np.int32)
    return np.where(mask, array, ~array)


def _template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a tokenizer's chat template; of several, the one for conversations without tools."""
    template = tokenizer.chat_template
    return (template.get("default") if isinstance(template, dict) else template) or ""


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


def rendering_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a short conversation in the tokenizer's template; None if it has or allows none."""
    said = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    try:
        return Encoder(tokenizer).render(said) if _template_of(tokenizer) else None
    except (UserError, ValueError):
        return None


def notices_about(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return what to tell about the chat template of conversations; it is set if it is missing."""
    if use_plain_template(tokenizer):
        return [PLAIN_NOTICE]
    encoder = Encoder(tokenizer)
    suffix = encoder.after_answer
    blanks = suffix[: len(suffix) - len(suffix.lstrip())]
    if encoder.marks_itself or "\n" not in blanks or not encoder._length_of_end(suffix):
        return []
    return [LINE_BREAK_NOTICE.format(token=encoder.ends_of_turns[0])]


def no_end_notice(
    tokenizer: PreTrainedTokenizerBase, is_chat: bool, is_cut: bool, read: int | None
) -> str:
    """Return what to tell if no answer ends with a trained end token (`end_finder`).

    Args:
        is_chat: the examples are conversations, not pairs.
        is_cut: there are answers with one, but all after the first --seq_length tokens.
        read: the number of examples that were read; None: all.
    """
    eos = tokenizer.eos_token
    if is_cut:
        remedy = "--seq_length cuts off the end of all of them: use a larger one"
    elif not eos:
        remedy = "the tokenizer has no end-of-text token (eos_token): use a model that has one"
    elif is_chat and Encoder(tokenizer).marks_itself:
        remedy = (
            f"put the end token, such as {eos!r} ({{{{ eos_token }}}}), into the "
            "{% generation %} block of the chat template (--chat_template FILE)"
        )
    else:
        end = shown(repr(Encoder(tokenizer).after_answer), 40)
        remedy = (
            f"after an answer the chat template has {end}, which is no special token of this "
            f"tokenizer. End each answer with {eos!r} ({{{{ eos_token }}}}) in a --chat_template "
            "FILE, or use a model whose tokenizer has the template's end token"
        )
    among = f" (in the first {read} rows)" if read else ""
    return NO_END_NOTICE.format(among=among, remedy=remedy)


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
    is_chat = as_chat and bool(_template_of(tokenizer))
    messages, rendered = [{"role": "user", "content": text}], text
    if is_chat:
        try:
            rendered = Encoder(tokenizer).render(messages, add_generation_prompt=True)
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
