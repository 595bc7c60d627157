"""Small tokenizers of every kind that language models use, trained in a moment, and texts that are
hard to cut.
"""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from pydoc_data.topics import topics

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHINESE = "\u4eba\u5de5\u667a\u80fd\u662f\u8ba1\u7b97\u673a\u79d1\u5b66\u7684\u4e00\u4e2a\u5206\u652f\uff0c\u6a21\u578b\u3002"
EMOJI = "\U0001f600 \U0001f468\u200d\U0001f469 \U0001f44d\U0001f3fd \u2764\ufe0f".split()
MARKS = "e\u0301 \u0301 \u0327 a\u0323\u0307 \u1100\u1161\u11a8 \ufb01 \u00e9".split()
MARKS.append("\u0930\u094d\u0915")
SPECIAL = ["<|end|>", "<mask>", "<|user|>"]
ALPHABET = [
    *"abcTHe tnio.,'\"-_=()0123456789\n\n\t",
    *("the ", " and", " of", "'s", "'ll", "  ", "    ", "\r\n", "\u00a0", "\u3000", "\u2028"),
    *("aaaa", "====", *CHINESE, *EMOJI, *MARKS, *SPECIAL),
    *("Ω", "ß", "İ", "\u0e01\u0e33", "\u200b", "\x00", "``", "''", "1,000"),
]


def training_text() -> list[str]:
    """Text that the tokenizers are trained on: English, Chinese, code, digits, spaces."""
    prose = [topics[name] for name in sorted(topics)][:8]
    code = "x = 1234567890\n    return None\n" * 50
    return [*prose, CHINESE * 20, code, "a" * 200, "\u00e9\u00df" * 30]


def _bpe(pre_tokenizer, normalizer=None, byte_level=True, **options) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**options))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    return tokenizer


def _byte_level(use_regex=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def gpt2() -> Tokenizer:
    tokenizer = _bpe(_byte_level(use_regex=True))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def llama3() -> Tokenizer:
    return _bpe(pre_tokenizers.Sequence([_split(LLAMA3), _byte_level()]), ignore_merges=True)


def qwen() -> Tokenizer:
    return _bpe(
        pre_tokenizers.Sequence([_split(LLAMA3.replace("{1,3}", "")), _byte_level()]),
        normalizers.NFC(),
    )


def _with_bytes(tokenizer: Tokenizer) -> Tokenizer:
    found = json.loads(tokenizer.to_str())
    model = found["model"]
    missing = [f"<0x{byte:02X}>" for byte in range(256)]
    model["vocab"].update(
        {token: len(model["vocab"]) + number for number, token in enumerate(missing)}
    )
    model.update(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    return Tokenizer.from_str(json.dumps(found))


def llama2() -> Tokenizer:
    """Spaces become ▁, one goes before the text, and nothing splits a document into words."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = _bpe(pre_tokenizers.Metaspace(prepend_scheme="always"), byte_level=False)
    words.normalizer, found = normalizer, words
    found = _with_bytes(found)
    found.pre_tokenizer = None
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return found


def _unigram(normalizer, pre_tokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizer,
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def xlnet() -> Tokenizer:
    steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    steps += [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    return _unigram(normalizers.Sequence(steps), pre_tokenizer)


def unigram_unsplit() -> Tokenizer:
    return _unigram(
        normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    )


KINDS = [gpt2, llama3, qwen, llama2, xlnet, unigram_unsplit]


def tokenizer_of(kind: str):
    """A transformers tokenizer of a kind, with special tokens that take the whitespace on their
    sides; a copy of its own for each caller, who may change it.
    """
    return copy.deepcopy(_tokenizer_of(kind))


@cache
def _tokenizer_of(kind: str):
    from transformers import PreTrainedTokenizerFast

    [make] = [make for make in KINDS if make.__name__ == kind]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), eos_token="<|end|>")
    tokenizer.add_tokens(
        [AddedToken("<mask>", lstrip=True), AddedToken("<|user|>", rstrip=True)],
        special_tokens=True,
    )
    added = [AddedToken("aaa"), AddedToken("of the", normalized=True)]
    tokenizer.add_tokens([*added, AddedToken("nd", single_word=True)])
    return tokenizer


def random_text(seed: int, length: int) -> str:
    """A text of an adversarial alphabet: stretches of one kind, of a few symbols, and of all of
    them.
    """
    draw, text = random.Random(seed), ""
    while len(text) < length:
        few = draw.choices(ALPHABET, k=draw.choice([1, 2, 3]))
        symbols = ALPHABET if draw.random() < 0.5 else few
        text += "".join(draw.choices(symbols, k=draw.choice([1, 5, 40, 200])))
    return text[:length]
