"""Special tokens: those that begin a text or separate documents, and those that end an answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def start_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that a tokenizer puts before each text, such as Llama's <s>; usually none.

    What some tokenizers append (an end-of-text token) is not used: each kind of data determines
    how it ends.
    """
    text = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a")["input_ids"]
    for start in range(len(ids) - len(text) + 1):
        if text and ids[start : start + len(text)] == text:
            return ids[:start]
    return []


def number_of_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id that a tokenizer can return + 1: the rows that an embedding needs.

    It is more than `len(tokenizer)` if the ids of added tokens leave a gap.
    """
    known = tokenizer.get_vocab().values()
    return max([*known, *tokenizer.added_tokens_decoder, *start_of(tokenizer)], default=-1) + 1


def document_start(tokenizer: PreTrainedTokenizerBase, is_first: bool) -> list[int]:
    """Return the ids before a document: the end of the document before it, and `start_of`.

    If a model uses one token for both (OPT's </s>), it occurs once, as if the documents were
    tokenized one by one and joined.

    Args:
        is_first: no document precedes it.
    """
    start, end = start_of(tokenizer), tokenizer.eos_token_id
    return start if is_first or end is None or start[:1] == [end] else [end, *start]


def end_finder(
    tokenizer: PreTrainedTokenizerBase, ends_of_turns: Iterable[str]
) -> Callable[[np.ndarray], int]:
    """Return a function from the stored ids of an example to where its first answer ends.

    It returns the number of tokens up to the first trained token that ends an answer, and includes
    it; 0 if no answer ends with such a token, so that a model trained on it would not stop. An
    answer is a series of trained tokens. Its last one, apart from white space, must be the
    end-of-text token, a special token such as <|im_end|> (those at which a generation configuration
    stops are special), or one of `ends_of_turns`. Other tokens that were added to the vocabulary
    may be a part of answers: Gemma's has line breaks and HTML.
    """
    added = tokenizer.added_tokens_decoder.items()
    ends = {tokenizer.eos_token_id, *(number for number, token in added if token.special)}
    ends |= set(tokenizer.convert_tokens_to_ids(list(ends_of_turns)))

    @cache
    def not_end_but_blank(token: int) -> bool:
        return token not in ends and not tokenizer.decode([token]).strip()

    def find(stored: np.ndarray) -> int:
        trained = np.append(stored >= 0, False)
        for last in np.flatnonzero(trained[:-1] & ~trained[1:]).tolist():
            while last > 0 and trained[last - 1] and not_end_but_blank(int(stored[last])):
                last -= 1
            if int(stored[last]) in ends:
                return last + 1
        return 0

    return find


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a SHA-256 hex digest of everything that determines the token ids of a text."""
    if tokenizer.is_fast:
        text = tokenizer.backend_tokenizer.to_str()
    else:
        text = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{text}\0{tokenizer.eos_token_id}".encode()).hexdigest()
