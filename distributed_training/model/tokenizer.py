"""The tokenizer of --model: read from its folder, or the embedded one, which is trained."""

import hashlib
from pathlib import Path

import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from distributed_training.errors import UserError, refused_as
from distributed_training.files.cache import Cache, cache_folder
from distributed_training.known_models import EMBEDDED_MODEL, EMBEDDED_VOCABULARY
from distributed_training.model.weights import NO_REMOTE_CODE

END_OF_TEXT = "<|endoftext|>"


def read_tokenizer(
    folder: str, what: str, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder.

    Args:
        what: what the user has given, for messages (--model NAME).
        chat_template: a file with the template of conversations; None: the tokenizer's own.
    """
    patterns = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
    if not any(file for pattern in patterns for file in Path(folder).glob(pattern)):
        raise UserError(
            f"{what}: there are no tokenizer files (tokenizer.json, or vocab.json and merges.txt)."
        )
    from distributed_training.model.library_warnings import shown_as_notices

    options = {"local_files_only": True, **NO_REMOTE_CODE}
    problem = f"{what}: its tokenizer files cannot be used; copy them again"
    with refused_as(problem), shown_as_notices():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        except Exception as error:
            from distributed_training.model.unreadable import explain_tokenizer  # after an error

            explain_tokenizer(Path(folder), what, error)
            raise
    if chat_template:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    return tokenizer


def embedded_tokenizer(cache_dir: str | None) -> str:
    """Return the folder of tiny-gpt2's tokenizer, a BPE trained on the Python reference."""
    from pydoc_data.topics import topics

    from tokenizers import ByteLevelBPETokenizer

    text = [topics[name] for name in sorted(topics)]
    digest = hashlib.sha256("\0".join(text).encode()).hexdigest()[:16]

    def train(folder: Path) -> dict:
        tokenizer = ByteLevelBPETokenizer()
        options = {"special_tokens": [END_OF_TEXT], "show_progress": False}
        tokenizer.train_from_iterator(text, EMBEDDED_VOCABULARY, min_frequency=2, **options)
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer._tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT
        ).save_pretrained(folder)
        return {}

    cache = Cache(cache_folder(cache_dir))
    # transformers 4 cannot read what transformers 5 writes.
    written_by = transformers.__version__.partition(".")[0]
    folder, _ = cache.get(f"{EMBEDDED_MODEL}-tokenizer-{written_by}-{digest}", train)
    return str(folder)
