"""Warnings of transformers and peft about tokens and weights, which a quiet run prints as well.

A run hides the warnings of the libraries. Those that say that tokens or weights are not what the
user expects become notices, once, on rank 0. Weights that are missing, have another shape, or are
tied only by config.json are reported by `weights.py`, for all versions in the same words.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator

import transformers

from distributed_training import console
from distributed_training.files.user_files import shown

# Parts of the warnings of transformers 4.51 to 5.23 and of peft 0.15 to 0.18, and what to do.
REMEDIES = {
    # Mistral's tokenizers, since transformers 4.57.2
    "incorrect regex pattern": 'set "fix_mistral_regex": true in its tokenizer_config.json',
    # transformers 4
    "not the same type as the class": "correct tokenizer_class in its tokenizer_config.json",
    "byte fallback option": "use a model folder with a tokenizer.json",
    "Could not extract SentencePiece model": "use a model folder with a tokenizer.json",
    "Could not reorder vocab": "use a model folder with a tokenizer.json",
    "missing adapter keys": "these adapters are random: copy their files again",
}
PATTERN = "|".join(REMEDIES)
LONGEST = 400  # characters of a warning
_told = set[str]()


@contextlib.contextmanager
def shown_as_notices() -> Iterator[None]:
    """Print the warnings of `REMEDIES` in this context as notices, and no others.

    It has no effect if the user sees the warnings of the libraries (--verbose).
    """
    log = transformers.utils.logging
    level = log.get_verbosity()
    if level <= logging.WARNING:
        yield
        return
    handlers = logging.getLogger("transformers").handlers
    filters = [(handler, _Filter(level)) for handler in handlers]
    for handler, one in filters:
        handler.addFilter(one)
    log.set_verbosity_warning()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("always", f"(?s).*({PATTERN})")
            show = warnings.showwarning

            def showwarning(message, *others, **named) -> None:
                if not _tell(str(message)):
                    show(message, *others, **named)

            warnings.showwarning = showwarning
            yield
    finally:
        log.set_verbosity(level)
        for handler, one in filters:
            handler.removeFilter(one)


class _Filter(logging.Filter):
    """It prints what is a notice, and hides what was below the level of the logger."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level

    def filter(self, record: logging.LogRecord) -> bool:
        return not _tell(record.getMessage()) and record.levelno >= self.level


def _tell(text: str) -> bool:
    """Print a warning of `REMEDIES` if it is new; return whether the text is one."""
    if not (found := re.search(PATTERN, text)):
        return False
    if text not in _told:
        _told.add(text)
        library = "peft" if "adapter" in found[0] else "transformers"
        said = " ".join(shown(text, LONGEST).split()).rstrip(".")
        console.warn(f"A warning of {library}: {said}. What to do: {REMEDIES[found[0]]}.")
    return True
