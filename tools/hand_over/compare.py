"""Compares an engine's answers with those of transformers, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tools.hand_over.engines import Answer, Engine
from tools.hand_over.prompt import NEW_TOKENS, Prompt
from tools.hand_over.reference import Expected, Reference, comparable

END = -1  # in a list of ids: the answer ends


class Difference(NamedTuple):
    """The first difference of an answer."""

    position: int  # number of equal tokens before it
    gap: float  # between the two best logits there, in transformers
    at_end: bool  # one of the two answers ends there, and the other does not
    rounding: float = 0.0  # what a cache in 16 bits may change of this gap, if the engine has one


class Result(NamedTuple):
    """A prompt, what transformers answers, and what the engine answers."""

    prompt: Prompt
    ids: list[int]  # of the prompt, as in training
    expected: Expected
    answer: Answer
    difference: Difference | None

    def differs(self, near_tie: float) -> bool:
        """Return whether the answers differ where rounding does not explain it."""
        found = self.difference
        return found is not None and found.gap > max(near_tie, found.rounding)

    @property
    def equal_tokens(self) -> int:
        """The tokens of the expected answer up to the first difference."""
        count = len(self.expected.tokens)
        return min(count, self.difference.position) if self.difference else count


def ask(engine: Engine, reference: Reference, prompt: Prompt) -> Result:
    """Let both continue a prompt, or answer it if it is a conversation."""
    answer = engine.chat(prompt) if prompt.is_chat else engine.complete(prompt)
    return result_of(engine, reference, prompt, answer)


def result_of(engine: Engine, reference: Reference, prompt: Prompt, answer: Answer) -> Result:
    """Compare an engine's answer with that of transformers."""
    expected, ids = reference.answer(prompt), reference.ids_of(prompt)
    if answer.stopped:
        expected = _up_to_special_token(expected, answer, reference, prompt)
    if answer.tokens is not None:
        found = _by_ids(expected, answer, reference.ends | reference.special_ids)
    else:
        found = _by_text(expected, answer, lambda tokens: reference.text_of(prompt, tokens))
    if found and engine.cache_in_16_bits and found.gap > engine.near_tie:
        found = found._replace(rounding=reference.rounding(prompt, found.position))
    return Result(prompt, ids, expected, answer, found)


def _up_to_special_token(
    expected: Expected, answer: Answer, reference: Reference, prompt: Prompt
) -> Expected:
    """Return the answer up to a special token at which the engine ended its own; else all of it.

    llama.cpp ends at tokens with certain names, such as <|endoftext|>, whatever the generation
    configuration says, and no setting changes it. What a special token begins is no answer.
    """
    for position, token in enumerate(expected.tokens):
        if token in reference.special_ids:
            before = expected.tokens[:position]
            if answer.tokens is not None:
                ended_here = answer.tokens in (before, [*before, token])
            else:
                text = reference.text_of(prompt, before)
                ended_here = comparable(answer.text).strip() == text.strip()
            if ended_here:
                return Expected(before, True, expected.gaps[: position + 1])
    return expected


def _by_ids(expected: Expected, answer: Answer, ends: set[int]) -> Difference | None:
    got, want = [*(answer.tokens or [])][:NEW_TOKENS], [*expected.tokens]
    if answer.stopped:
        if got and got[-1] in ends:  # some engines return the token that ended the answer
            got.pop()
        got.append(END)
    if expected.stops:
        want.append(END)
    for position, token in enumerate(want):
        other = got[position] if position < len(got) else None
        if token != other:
            at_end = END in (token, other)
            return Difference(position, expected.gaps[position], at_end)
    return None


def _by_text(
    expected: Expected, answer: Answer, text_of: Callable[[list[int]], str]
) -> Difference | None:
    """Compare texts, of an engine that returns no ids.

    Some servers strip an answer, so white space at its ends does not count.
    """
    text, tokens = comparable(answer.text).strip(), expected.tokens
    texts = [text_of(tokens[:count]).strip() for count in range(len(tokens) + 1)]
    count = max(n for n, each in enumerate(texts) if text.startswith(each))
    has_more = len(text) > len(texts[count])
    if count == len(tokens) and not expected.stops:
        return None
    if count == len(tokens) and answer.stopped and not has_more:
        return None
    # Tokens without a visible text may differ before this position.
    first = texts.index(texts[count])
    gap = min(expected.gaps[first : count + 1])
    ends_early = count < len(tokens) and answer.stopped and not has_more
    return Difference(count, gap, ends_early or count == len(tokens))
