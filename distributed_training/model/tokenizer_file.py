"""Whether a tokenizer tokenizes text as its tokenizer.json says."""

import contextlib
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from distributed_training.files.user_files import shown

# What normalizers change: capitals, accents, ligatures, wide letters, spaces; and several scripts.
SAMPLES = (
    "ABC Hello",
    "caf\u00e9 cafe\u0301",
    "\ufb01ne \uff21\uff22",
    "a  b",
    "x = 1234\n",
    "\u4eba\u5de5",
)


def disagreements(folder: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a notice if a tokenizer returns other ids than the tokenizer.json in its folder.

    transformers 5 builds some classes, such as GPT2Tokenizer, from the vocabulary only, without the
    normalizer in the file. Other programs that load the exported model may read the file.
    """
    found = None
    with contextlib.suppress(Exception):  # of the Rust library; the file need not be there
        in_file = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
        in_file.no_padding()
        in_file.no_truncation()
        for text in SAMPLES:
            ids = in_file.encode(text, add_special_tokens=False).ids
            if ids != tokenizer(text, add_special_tokens=False)["input_ids"]:
                found = text
                break
    if found is None:
        return []
    return [
        f"The class of the tokenizer ({type(tokenizer).__name__}, tokenizer_class in "
        f"tokenizer_config.json) tokenizes {shown(repr(found))} in another way than "
        "tokenizer.json. The class is used. To use the file, set tokenizer_class to "
        '"PreTrainedTokenizerFast".'
    ]
