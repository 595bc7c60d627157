"""Which tokenizers have a rule of llama.cpp, and which are left to the converter's error."""

import json

import pytest
import tokenizer_zoo
from tokenizers import Regex, normalizers, pre_tokenizers

from tools.hand_over.rules import GPT2, LLAMA3, rule_of

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def content(tokenizer) -> dict:
    return json.loads(tokenizer.to_str())


def split_by(pattern):
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([words, BYTES])


def gpt2_with(pre_tokenizer=None, normalizer=None, **model) -> dict:
    tokenizer = tokenizer_zoo.gpt2()
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    found = content(tokenizer)
    found["model"].update(model)
    return found


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: content(tokenizer_zoo.gpt2()), "gpt-2"),
        (lambda: content(tokenizer_zoo.qwen()), "qwen2"),
        (lambda: gpt2_with(split_by(GPT2)), "gpt-2"),
        (lambda: gpt2_with(split_by(LLAMA3)), "smaug-bpe"),
        (lambda: gpt2_with(split_by(LLAMA3), ignore_merges=True), "llama-bpe"),
        (
            lambda: gpt2_with(
                pre_tokenizers.Sequence(
                    [
                        pre_tokenizers.Digits(individual_digits=True),
                        pre_tokenizers.ByteLevel(add_prefix_space=False),
                    ]
                )
            ),
            "starcoder",
        ),
        (lambda: content(tokenizer_zoo.llama2()), None),
        (lambda: content(tokenizer_zoo.unigram()), None),
        (lambda: gpt2_with(pre_tokenizers.ByteLevel(add_prefix_space=True)), None),
        (lambda: gpt2_with(split_by(GPT2.replace("+", "{1,4}"))), None),
        (lambda: gpt2_with(normalizer=normalizers.Lowercase()), None),
        (lambda: gpt2_with(normalizer=normalizers.NFC()), None),
        (lambda: gpt2_with(ignore_merges=True), None),
        (lambda: gpt2_with(dropout=0.1), None),
    ],
)
def test_a_rule_is_named_only_if_it_is_the_same(make, name):
    assert rule_of(make()) == name
