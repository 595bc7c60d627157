"""Notices about the chat template of conversations, and about answers that do not end."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from distributed_training.data.chat_template import (
    QUESTION,
    Chat,
    ChatTemplate,
    answer,
    use_plain_template,
)
from distributed_training.files.user_files import shown

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
PROMPT_NOTICE = (
    "The chat template writes {text} before an answer and not into the generation prompt: the "
    "model must write it, and is not trained to without --train_on all. Write it where "
    "add_generation_prompt is set, or into a {{% generation %}} block (--chat_template FILE)."
)


def notices_about(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return what to tell about the chat template of conversations; it is set if it is missing."""
    if use_plain_template(tokenizer):
        return [PLAIN_NOTICE]
    template = ChatTemplate(tokenizer)
    suffix, found = template.after_answer, []
    blanks = suffix[: len(suffix) - len(suffix.lstrip())]
    if not template.has_blocks() and "\n" in blanks and template.length_of_end(suffix):
        found.append(LINE_BREAK_NOTICE.format(token=template.ends_of_turns[0]))
    if untrained := _untrained_before_answer(template).strip():
        found.append(PROMPT_NOTICE.format(text=shown(repr(untrained), 40)))
    return found


def _untrained_before_answer(template: ChatTemplate) -> str:
    """Return what a template writes after the generation prompt and before the trained tokens."""
    if not template.before_answer.strip():
        return ""
    if not template.has_blocks():
        return "" if template.generation_prompt else template.before_answer
    said = Chat([*QUESTION.messages, answer("a")])
    encoded, tokenizer = template.tokenize(said, with_mask=True), template.tokenizer
    if 1 not in encoded["assistant_masks"]:
        return ""
    before = encoded["input_ids"][: encoded["assistant_masks"].index(1)]
    prompt = template.render(QUESTION, add_generation_prompt=True)
    prompted = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(before, prompted, strict=False))
    return tokenizer.decode(before[len(list(equal)) :])


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
    elif is_chat and ChatTemplate(tokenizer).has_blocks():
        remedy = (
            f"put the end token, such as {eos!r} ({{{{ eos_token }}}}), into the "
            "{% generation %} block of the chat template (--chat_template FILE)"
        )
    else:
        end = shown(repr(ChatTemplate(tokenizer).after_answer), 40)
        remedy = (
            f"after an answer the chat template has {end}, which is no special token of this "
            f"tokenizer. End each answer with {eos!r} ({{{{ eos_token }}}}) in a --chat_template "
            "FILE, or use a model whose tokenizer has the template's end token"
        )
    among = f" (in the first {read} rows)" if read else ""
    return NO_END_NOTICE.format(among=among, remedy=remedy)
