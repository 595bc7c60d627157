"""Tokenized corpora in the cache: a corpus is tokenized once, and its tokens stay on disk.

A split is a flat array of token ids, `<split>.bin`. Documents become one long stream, with an
end-of-text token between them, and before each what the tokenizer puts before a text. Examples
follow each other; a token t without a loss is stored as ~t, and `<split>.index.bin` has [start,
end, first target, end of the first answer that ends with a trained end token] of each example; the
last is start if there is none. Neither depends on the length of a sequence, so one cached corpus
serves every --seq_length. `<split>.bytes.bin` has the bytes of the text that each token id stands
for: exactly if the tokenizer keeps all bytes, else on average over the documents of the split.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from distributed_training import console
from distributed_training.data import special_tokens
from distributed_training.data.facts import TokenizedSplit
from distributed_training.data.rows import BadRow, RowOptions, Source
from distributed_training.data.sources import open_source
from distributed_training.errors import UserError
from distributed_training.files.cache import Cache, cache_folder
from distributed_training.ranks.context import DistContext, require_equal_on_all_ranks
from distributed_training.settings.data import DataSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHE_VERSION = 13  # increase it when the layout of the cache or the tokenization changes


class TokenizedCorpus(TypedDict):
    """A folder of the cache with tokens, as JSON."""

    folder: str
    end_of_text: int | None  # the id of the tokenizer's end-of-text token
    bad_rows: list[str]  # a line about each
    splits: dict[str, TokenizedSplit]


def tokenize_corpus(
    data: DataSettings,
    ctx: DistContext,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    eval_only: bool,
) -> TokenizedCorpus:
    """Read and tokenize a corpus once per node, unless the cache has it; all ranks must call it.

    Args:
        eval_only: as for `sources.open_source`.
    Raises:
        UserError: see `tokenize_once`.
        TrainingError: the text of the dataset differs between nodes.
    """

    def tokenize() -> TokenizedCorpus:
        source = open_source(name, data, RowOptions.of(data, tokenizer), eval_only)
        cache = Cache(cache_folder(data.cache_dir))
        with console.bar("Tokenizing", unit="characters") as bar:
            return tokenize_once(source, tokenizer, cache, bar.update, data.max_bad_rows)

    prepared: TokenizedCorpus = ctx.once_per_node(f"dataset {name}", tokenize)
    require_equal_on_all_ranks(ctx.all_gather(prepared["splits"]), "The text of the dataset")
    for row in prepared["bad_rows"]:
        console.warn(f"Left out: {row}")
    return prepared


def tokenize_once(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    cache: Cache,
    advance: Callable[[int], object],
    max_bad_rows: int,
) -> TokenizedCorpus:
    """Tokenize a corpus, unless the cache has it from an earlier run.

    Args:
        tokenizer: gets PLAIN_TEMPLATE if it needs a template and has none.
        advance: called from time to time with the number of characters done since the last call.
        max_bad_rows: maximum number of rows that cannot be used.
    Raises:
        UserError: the cache or the text cannot be read, or there are too many bad rows.
    """

    def write(folder: Path) -> dict:
        from distributed_training.data.tokenize import write_split  # not if the cache has it

        bad: list[str] = []

        def refuse(row: BadRow) -> None:
            bad.append(str(row))
            check_bad_rows(bad, max_bad_rows)

        splits = {
            name: write_split(folder / name, rows(None), tokenizer, advance, refuse)
            for name, rows in source.splits.items()
        }
        return {"bad_rows": bad, "splits": splits}

    folder, facts = cache.get(_key_of(source, tokenizer), write)
    # The run that wrote the cache may have had a larger --max_bad_rows.
    check_bad_rows(facts["bad_rows"], max_bad_rows)
    return {
        "folder": str(folder),
        "end_of_text": tokenizer.eos_token_id,
        "bad_rows": facts["bad_rows"],
        "splits": facts["splits"],
    }


def _key_of(source: Source, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the key of a corpus in the cache: a digest of what determines its tokens."""
    texts = [
        str(CACHE_VERSION),
        source.fingerprint,
        special_tokens.tokenizer_fingerprint(tokenizer),
        json.dumps(tokenizer.chat_template),
        # The fingerprint of a slow tokenizer does not have the tokens that it adds to a text.
        repr(special_tokens.start_of(tokenizer)),
    ]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def check_bad_rows(bad: Sequence[str], allowed: int) -> None:
    """Raise a UserError that names the first row beyond the maximum, if there are more bad rows."""
    if len(bad) > allowed:
        raise UserError(f"{bad[allowed]} --max_bad_rows N leaves out up to N rows, now {allowed}.")
