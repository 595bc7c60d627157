"""The verdict of a comparison, with the most likely cause of a difference.

What comes first in the engine decides: the tokens of texts, then the chat template, then where
answers end, then the weights. What comes later differs as well if an earlier part is wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from distributed_training.data.special_tokens import number_of_ids
from tools.hand_over.compare import Result, ask, result_of
from tools.hand_over.engines import Engine
from tools.hand_over.prompt import Prompt
from tools.hand_over.reference import Reference

EQUAL, NEAR_TIES, DIFFERENT = "equal", "equal up to near-ties", "different"
MOST_CHECKED = 4  # conversations that are sent again as text


class Cause(NamedTuple):
    """Why an engine answers differently."""

    name: str  # "template", "stop token", "BOS twice", "BOS missing", "tokenizer", "weights", ...
    explanation: str  # what was seen, and what to do


class Verdict(NamedTuple):
    """The result of a comparison."""

    status: str  # EQUAL, NEAR_TIES or DIFFERENT
    results: list[Result]
    near_tie: float  # the largest difference of two logits that counts as one
    cause: Cause | None = None

    @property
    def tokens(self) -> int:
        """The compared tokens: those of the answers of transformers."""
        return sum(len(result.expected.tokens) for result in self.results)

    @property
    def equal_tokens(self) -> int:
        """Those up to the first difference of each answer."""
        return sum(result.equal_tokens for result in self.results)


def verify(
    engine: Engine,
    reference: Reference,
    prompts: list[Prompt],
    load_base: Callable[[], Reference | None] = lambda: None,
) -> Verdict:
    """Ask an engine and transformers the same, and compare prompts, answers and ends.

    Args:
        load_base: returns the base model of adapters; it is called if it may explain a difference.
    """
    results = [ask(engine, reference, prompt) for prompt in prompts]
    cause = _cause(engine, reference, results, load_base)
    if cause:
        return Verdict(DIFFERENT, results, engine.near_tie, cause)
    status = NEAR_TIES if any(result.difference for result in results) else EQUAL
    return Verdict(status, results, engine.near_tie)


def _cause(
    engine: Engine,
    reference: Reference,
    results: list[Result],
    load_base: Callable[[], Reference | None],
) -> Cause | None:
    """Return why an engine differs; None if it does not."""
    wrong = [result for result in results if result.differs(engine.near_tie)]
    texts = [result for result in results if not result.prompt.is_chat]
    chats = [result for result in results if result.prompt.is_chat]
    return (
        _of_text_tokens(reference, texts, bool(wrong))
        or _of_template(engine, reference, chats)
        or _of_chat_tokens(engine, reference, chats, bool(wrong))
        or (_of_answers(engine, reference, wrong, load_base) if wrong else None)
    )


# ------------------------------------------------------------------------------ tokens of prompts


def _of_text_tokens(reference: Reference, texts: list[Result], some_wrong: bool) -> Cause | None:
    """Return the cause if texts have other tokens than in training."""
    kinds = {kind for result in texts if (kind := _tokens_differ(result, reference))}
    if not kinds - {"equal"}:
        return None
    if len(kinds) == 1:
        return _of_bos(kinds.pop(), reference) or _tokenizer(texts, reference)
    # Numbers of tokens may be counted in another way, if nothing else differs.
    has_ids = any(result.answer.prompt_tokens is not None for result in texts)
    return _tokenizer(texts, reference) if has_ids or some_wrong else None


def _tokens_differ(result: Result, reference: Reference) -> str | None:
    """Return how the engine's tokens of a prompt differ: "equal", "more", "less" or "other".

    None: the engine does not report them.
    """
    want, got, count = result.ids, result.answer.prompt_tokens, result.answer.prompt_count
    if got is not None:
        starts = {*want[:1], reference.tokenizer.bos_token_id, reference.tokenizer.eos_token_id}
        if got[1:] == want and got[0] in starts:
            return "more"
        return "equal" if got == want else "less" if got == want[1:] else "other"
    if count is None:
        return None
    return {0: "equal", 1: "more", -1: "less"}.get(count - len(want), "other")


def _of_bos(kind: str, reference: Reference) -> Cause | None:
    """Return the cause if all prompts have one token more or less."""
    token = reference.tokenizer.bos_token or "the first token"
    if kind == "more":
        advice = "let either the engine or the template add it (tokenizer.ggml.add_bos_token)"
        if reference.start:
            return Cause(
                "BOS twice", f"the engine puts {token} before a prompt that has it: {advice}."
            )
        return Cause("BOS twice", f"the engine adds {token}, and the training did not: {advice}.")
    if kind == "less":
        advice = "let the engine add it (tokenizer.ggml.add_bos_token)"
        return Cause("BOS missing", f"prompts do not begin with {token}: {advice}.")
    return None


def _tokenizer(results: list[Result], reference: Reference) -> Cause:
    """Return the cause of a text that is split into other tokens, with an example."""
    different = [r for r in results if _tokens_differ(r, reference) not in ("equal", None)]
    example, got = different[0], different[0].answer.prompt_tokens
    shown = f"{len(example.ids)} tokens instead of {example.answer.prompt_count}"
    if got is not None:
        pairs = zip(got, example.ids, strict=False)
        place = next(
            (n for n, (a, b) in enumerate(pairs) if a != b), min(len(got), len(example.ids))
        )
        names = [
            reference.tokenizer.convert_ids_to_tokens(ids[place : place + 3])
            for ids in (got, example.ids)
        ]
        shown = f"{names[0]} instead of {names[1]}"
    return Cause(
        "tokenizer",
        f"{len(different)} of {len(results)} prompts have other tokens, for example {shown}: "
        "convert the model again, with the rule of its tokenizer (tokenizer.ggml.pre).",
    )


def _of_template(engine: Engine, reference: Reference, chats: list[Result]) -> Cause | None:
    """Return the cause if an engine writes conversations differently, and says so."""
    for result in chats:
        text = engine.rendered(result.prompt.messages)
        if text is not None and _without_start(text, reference) != _without_start(
            result.prompt.text, reference
        ):
            return _template(f"it writes {text!r} instead of {result.prompt.text!r}")
    return None


def _of_chat_tokens(
    engine: Engine, reference: Reference, chats: list[Result], some_wrong: bool
) -> Cause | None:
    """Return the cause if conversations have other tokens, although texts have not."""
    kinds = {kind for result in chats if (kind := _tokens_differ(result, reference))}
    if not kinds - {"equal"}:
        return None
    has_bos = bool(reference.start) or reference.tokenizer.bos_token_id is not None
    is_bos = len(kinds) == 1 and has_bos
    if is_bos and (cause := _of_bos({*kinds}.pop(), reference)):
        return cause
    if engine.rendered(chats[0].prompt.messages) is not None:  # it is right, see _of_template
        return _tokenizer(chats, reference)
    has_ids = any(result.answer.prompt_tokens is not None for result in chats)
    return _template("its conversations have other tokens") if has_ids or some_wrong else None


def _template(seen: str) -> Cause:
    return Cause("template", f"{seen}: give the engine the chat template of the exported folder.")


def _without_start(text: str, reference: Reference) -> str:
    """Return a prompt without the start token, which the engine or the template adds."""
    tokens = reference.tokenizer.convert_ids_to_tokens(reference.start)
    start = "".join(tokens) or (reference.tokenizer.bos_token or "")
    return text.removeprefix(start) if start else text


# ------------------------------------------------------------------------------------- answers


def _of_answers(
    engine: Engine,
    reference: Reference,
    wrong: list[Result],
    load_base: Callable[[], Reference | None],
) -> Cause:
    """Return the cause of answers that differ after the same prompts."""
    chats = [result for result in wrong if result.prompt.is_chat]
    can_ask = engine.continues_texts and len(chats) == len(wrong)
    if can_ask and _right_as_text(engine, reference, chats[:MOST_CHECKED]):
        return _template("its answers are right if it gets the conversation as text")
    if all(result.difference and result.difference.at_end for result in wrong):
        names = reference.tokenizer.convert_ids_to_tokens(sorted(reference.ends))
        return Cause(
            "stop token",
            f"{len(wrong)} answers end at another token: they should end at "
            f"{' or '.join(names)} only. Set the engine's end or stop tokens.",
        )
    if _base_explains(engine, reference, wrong, load_base):
        return Cause(
            "adapters not merged",
            "the answers are those of the base model: merge the adapters, and convert again.",
        )
    tokens = sum(len(result.expected.tokens) - result.equal_tokens for result in wrong)
    is_quantized = f"they are quantized ({engine.quantization}), " if engine.quantization else ""
    unknown = all(result.answer.prompt_count is None for result in wrong)
    others = "tokenizer" if engine.continues_texts else "template or the tokenizer"
    hint = f" The engine does not report tokens, so the {others} may differ as well." * unknown
    return Cause(
        "weights",
        f"{is_quantized}{tokens} tokens of {len(wrong)} answers differ after the same prompts: "
        f"compare with a conversion that is not quantized, or convert again.{hint}",
    )


def _right_as_text(engine: Engine, reference: Reference, chats: list[Result]) -> bool:
    """Return whether an engine answers conversations correctly that it gets as text."""
    for result in chats:
        text = result.prompt.text
        if reference.start:  # the engine adds it to a text
            text = _without_start(text, reference)
        answer = engine.complete(result.prompt._replace(text=text))
        if result_of(engine, reference, result.prompt, answer).differs(engine.near_tie):
            return False
    return True


def _base_explains(
    engine: Engine,
    reference: Reference,
    wrong: list[Result],
    load_base: Callable[[], Reference | None],
) -> bool:
    """Return whether the answers are those of the base model, without the adapters."""
    if (base := load_base()) is None:
        return False
    if base.model.get_input_embeddings().weight.shape[0] < number_of_ids(reference.tokenizer):
        return False
    other = dataclasses.replace(reference, model=base.model, _answers={})
    # Two results suffice that one wrong weight would not give by chance.
    found = (result_of(engine, other, each.prompt, each.answer) for each in wrong)
    return not any(result.differs(engine.near_tie) for result in found)
