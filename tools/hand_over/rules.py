"""The name of a tokenizer's pre-tokenization rule in llama.cpp.

llama.cpp splits text into words by a rule that the GGUF file names. Its converter finds the name by
a hash of the tokens of a fixed text, which depends on the vocabulary. A tokenizer that was trained
on other text is therefore unknown to it, even if its rule is one that llama.cpp implements.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from distributed_training.files.json_types import JsonObject

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2, LLAMA3 = _WORDS.format(r"\p{N}"), _WORDS.format(r"\p{N}{1,3}")
# What the rules treat differently: digits, spaces, contractions, line breaks, letters and marks.
TEST_TEXT = (
    "Hello world, it's 1234567 o'clock; THEY'RE 3.14 and\u00a0we'll  see\n\n  x = [10, 20]\t# end"
    "\r\n \u4eba\u5de5\u667a\u80fd cafe\u0301 na\u00efve \u0928\u092e\u0938\u094d\u0924\u0947 "
    "\U0001f680!!! ... \u00b2\u00bd\u2167 a_b-c@d.e   "
)
BYTES = ("ByteLevel", False, False)  # after a Split: bytes only


class Rule(NamedTuple):
    """A rule of llama.cpp, and the parts of a tokenizer.json that mean the same."""

    name: str  # tokenizer.ggml.pre
    parts: tuple[tuple[object, ...], ...]  # see `parts_of`
    ignores_merges: bool = False  # a word of the vocabulary is one token
    normalizers: tuple[object, ...] = (None,)  # those that the models of this rule have


# src/llama-vocab.cpp of llama.cpp. smaug-bpe is the rule of Llama 3 with merges.
RULES = (
    Rule("gpt-2", (("ByteLevel", False, True),)),
    Rule("gpt-2", (("Split", GPT2, "Isolated", False), BYTES)),
    Rule("starcoder", (("Digits", True), ("ByteLevel", False, True))),
    # llama.cpp does not normalize; its converter gives this name to Qwen2, which does.
    Rule("qwen2", (("Split", QWEN2, "Isolated", False), BYTES), normalizers=(None, "NFC")),
    Rule("llama-bpe", (("Split", LLAMA3, "Isolated", False), BYTES), ignores_merges=True),
    Rule("smaug-bpe", (("Split", LLAMA3, "Isolated", False), BYTES)),
)


def parts_of(pre_tokenizer: JsonObject | None) -> tuple[tuple[object, ...], ...]:
    """Return the steps of a pre-tokenizer, without what does not change the tokens."""
    if pre_tokenizer is None:
        return ()
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return sum(map(parts_of, pre_tokenizer["pretokenizers"]), ())
    if kind == "ByteLevel":
        return ((kind, pre_tokenizer["add_prefix_space"], pre_tokenizer.get("use_regex", True)),)
    if kind == "Split":
        pattern = pre_tokenizer["pattern"].get("Regex")
        return ((kind, pattern, pre_tokenizer["behavior"], pre_tokenizer["invert"]),)
    if kind == "Digits":
        return ((kind, pre_tokenizer["individual_digits"]),)
    return ((json.dumps(pre_tokenizer, sort_keys=True),),)


def rule_of(tokenizer: JsonObject) -> str | None:
    """Return the name of the rule in llama.cpp that splits text as a tokenizer does.

    Args:
        tokenizer: the content of its tokenizer.json.
    Returns:
        The name; None if no known rule is shown to be the same.
    """
    model, normalizer = tokenizer["model"], tokenizer.get("normalizer")
    changed = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model.get("type") != "BPE" or any(model.get(key) for key in changed):
        return None
    kind = normalizer and normalizer["type"]
    parts, ignores = parts_of(tokenizer.get("pre_tokenizer")), bool(model.get("ignore_merges"))
    for rule in RULES:
        known = (rule.parts, rule.ignores_merges) == (parts, ignores)
        if known and kind in rule.normalizers and _splits_equally(tokenizer, rule):
            return rule.name
    return None


def _splits_equally(tokenizer: JsonObject, rule: Rule) -> bool:
    """Return whether a tokenizer splits a test text into the same words as a rule."""
    from tokenizers import Tokenizer

    own = Tokenizer.from_str(json.dumps(tokenizer)).pre_tokenizer
    return own.pre_tokenize_str(TEST_TEXT) == _pre_tokenizer(rule).pre_tokenize_str(TEST_TEXT)


def _pre_tokenizer(rule: Rule):
    from tokenizers import Regex, pre_tokenizers

    made: list[pre_tokenizers.PreTokenizer] = []
    for kind, *options in rule.parts:
        if kind == "ByteLevel":
            space, regex = map(bool, options)
            made.append(pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=regex))
        elif kind == "Digits":
            made.append(pre_tokenizers.Digits(individual_digits=bool(options[0])))
        else:
            made.append(pre_tokenizers.Split(Regex(str(options[0])), "isolated"))
    return pre_tokenizers.Sequence(made)
