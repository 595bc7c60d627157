"""Small tokenizers of the kinds that language models use, trained in a moment."""

import copy
import json
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

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHINESE = "\u4eba\u5de5\u667a\u80fd\u662f\u8ba1\u7b97\u673a\u79d1\u5b66\u7684\u4e00\u4e2a\u5206\u652f\uff0c\u6a21\u578b\u3002"
SPECIAL = ["<|end|>", "<mask>", "<|user|>"]
OPTIONS = {"special_tokens": ["<unk>"], "show_progress": False}


def training_text() -> list[str]:
    """Text that the tokenizers are trained on: English, Chinese, code, digits, spaces."""
    prose = [topics[name] for name in sorted(topics)][:8]
    code = "x = 1234567890\n    return None\n" * 50
    return [*prose, CHINESE * 20, code, "a" * 200, "\u00e9\u00df" * 30]


def _bpe(pre_tokenizer, byte_level=True) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, **OPTIONS)
    tokenizer.train_from_iterator(training_text(), trainer)
    return tokenizer


def gpt2() -> Tokenizer:
    tokenizer = _bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def qwen() -> Tokenizer:
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer = _bpe(pre_tokenizers.Sequence([words, in_bytes]))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def llama2() -> Tokenizer:
    """Spaces become ▁, one goes before the text, and nothing splits a document into words."""
    words = _bpe(pre_tokenizers.Metaspace(prepend_scheme="always"), byte_level=False)
    content = json.loads(words.to_str())
    model = content["model"]
    for byte in range(256):
        model["vocab"][f"<0x{byte:02X}>"] = len(model["vocab"])
    model.update(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    tokenizer = Tokenizer.from_str(json.dumps(content))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Sequence(spaces), None
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def unigram() -> Tokenizer:
    """Its best tokens may depend on distant words."""
    tokenizer, words = Tokenizer(models.Unigram()), pre_tokenizers.WhitespaceSplit()
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.Metaspace()])
    trainer = trainers.UnigramTrainer(vocab_size=500, unk_token="<unk>", **OPTIONS)
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


KINDS = [gpt2, qwen, llama2, unigram]


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
    special = [AddedToken("<mask>", lstrip=True), AddedToken("<|user|>", rstrip=True)]
    tokenizer.add_tokens(special, special_tokens=True)
    added = [AddedToken("aaa"), AddedToken("of the", normalized=True)]
    tokenizer.add_tokens([*added, AddedToken("nd", single_word=True)])
    return tokenizer


def with_gap(number: int, token: str = "<|far|>"):
    """A tokenizer of bytes with an added token of this id; those before it have no token."""
    from transformers import PreTrainedTokenizerFast

    content = json.loads(gpt2().to_str())
    added = {"id": number, "content": token, "special": True, "single_word": False}
    content["added_tokens"].append({**added, **dict.fromkeys(("lstrip", "rstrip"), False)})
    content["added_tokens"][-1]["normalized"] = False
    content["model"]["vocab"][token] = number
    tokenizer = Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<unk>")
