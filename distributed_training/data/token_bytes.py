"""The bytes of the text that tokens stand for, from which bits per byte are computed.

A loss in nats per token depends on the tokenizer: with a larger vocabulary a text has fewer tokens,
each of which is harder to predict. Bits per byte, loss · tokens / (bytes · ln 2), are comparable
between tokenizers, because the text has the same bytes.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import numpy as np

from distributed_training.data.special_tokens import number_of_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def bytes_by_id(tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, bool]:
    """Return the bytes of each token's own text, and whether these are the bytes of any text.

    A tokenizer of bytes (GPT-2, Llama 3, Qwen) writes each byte as one character. One with byte
    fallback (Llama 2, Mistral, Gemma) writes a space as "▁", and a byte without a token of its own
    as <0xNN>; some add a space before a text. The tokens of all others may differ from the text:
    normalized characters, unknown words, markers of subwords.

    Returns:
        int64 [largest id + 1], 0 for special tokens; and whether the tokenizer is of one of these
        two kinds.
    """
    added, vocabulary = tokenizer.added_tokens_decoder, tokenizer.get_vocab()
    content = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    of_bytes = '"ByteLevel"' in json.dumps(content.get("pre_tokenizer"))
    falls_back = bool((content.get("model") or {}).get("byte_fallback"))
    sizes = np.zeros(number_of_ids(tokenizer), np.int64)
    for token, number in vocabulary.items():
        if number in added:
            sizes[number] = 0 if added[number].special else len(added[number].content.encode())
        elif of_bytes:
            sizes[number] = len(token)
        elif re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            sizes[number] = 1
        else:
            sizes[number] = len(token.replace("▁", " ").encode())
    return sizes, of_bytes or falls_back
