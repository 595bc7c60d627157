"""Tokenize a corpus once, and keep the result on disk.

Documents become one long stream of token ids with an end-of-text token between them. Examples
(conversations, or prompts and their completions) are stored one after the other, with a loss mask.
Neither depends on the length of a sequence, so one cached corpus serves every --seq_length.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from support.cluster.context import DistContext, require_equal_on_all_ranks
from support.data.chat import (
    PLAIN_NOTICE,
    PLAIN_TEMPLATE,
    Encoder,
    has_own_template,
    template_of,
    use_plain_template,
)
from support.data.formats import BadRow, Document, Example, OneKind, RowOptions
from support.data.long_documents import DocumentTokenizer
from support.data.sources import Item, Notice, Source, open_source
from support.errors import UserError
from support.files.cache import Cache
from support.files.hub_cache import cache_folder

CACHE_VERSION = 7  # increase it when the layout of the cache or the tokenization changes
BATCH_EXAMPLES = 256
WRITTEN_TOKENS = 1 << 16  # minimum number of tokens of a document file in one write
BAD_ROWS = "bad_rows.json"  # file in a folder of the cache
SHOWN_BAD_ROWS = 10


def tokenize_corpus(args, ctx: DistContext, tokenizer, name: str) -> dict:
    """Read and tokenize a corpus once per node, unless the cache has it from an earlier run.

    The first rank of each node does the work; every rank must call this function.

    Returns:
        What `tokenize_once` returns, and on rank 0 under "bad_rows" the lines of `bad_rows_in` (an
        empty list on other ranks).
    Raises:
        UserError: see `sources.open_source` and `tokenize_once`.
        TrainingError: the text of the dataset differs between nodes.
    """

    def tokenize() -> dict:
        source = open_source(name, args, RowOptions.of(args, has_own_template(tokenizer)))
        print_files(source.files, source.notices, ctx)
        cache = Cache(cache_folder(args.cache_dir), ctx.temporary, ctx.console.print)
        with ctx.console.bar("Tokenizing", unit="characters") as bar:
            return tokenize_once(source, tokenizer, cache, bar.update, args.max_bad_rows)

    prepared = ctx.once_per_node(f"dataset {name}", tokenize)
    print_files([], prepared["notices"], ctx)
    require_equal_on_all_ranks(ctx.all_gather(prepared["splits"]), "The text of the dataset")
    prepared["bad_rows"] = bad_rows_in(prepared["folder"]) if ctx.is_main else []
    print_bad_rows(prepared["bad_rows"], ctx)
    return prepared


def print_files(counts: list[str], notices: list[str], ctx: DistContext) -> None:
    """Print how many files there are of each type, and which files are not used."""
    for line in counts:
        ctx.console.print0(f"📂 {line}")
    for line in notices:
        ctx.console.warn(line)


def print_bad_rows(bad: list[str], ctx: DistContext) -> None:
    """Print the first SHOWN_BAD_ROWS rows that are not used, and the number of the others."""
    for row in bad[:SHOWN_BAD_ROWS]:
        ctx.console.warn(f"Left out: {row}")
    if len(bad) > SHOWN_BAD_ROWS:
        ctx.console.warn(
            f"Left out: {len(bad) - SHOWN_BAD_ROWS} more rows, all named in results.json under "
            "dataset.bad_rows."
        )


def print_splits(ctx: DistContext, args, facts: dict[str, dict], tokenizer) -> None:
    """Print one line for each split of the corpus.

    Args:
        facts: split -> its counts; see batches.open_split.
        tokenizer: gets a chat template if the corpus has conversations and it has no template.
    Raises:
        UserError: the corpus has conversations and the tokenizer is not a fast one.
    """
    if "chat" in [split_facts.get("kind") for split_facts in facts.values()] and use_plain_template(
        tokenizer, "chat"
    ):
        ctx.console.warn(PLAIN_NOTICE)
    found = [format for split_facts in facts.values() for format in split_facts.get("formats", ())]
    print_format(ctx, found, facts["train" if "train" in facts else "validation"]["kind"])
    for name, split_facts in facts.items():
        ctx.console.print0(f"📚 {_describe_split(name, split_facts, args)}")
        if name == "train" and args.num_samples and split_facts["blocks"] < args.num_samples:
            ctx.console.warn(
                f"--num_samples {args.num_samples:,} is more than the corpus has: using all "
                f"{split_facts['blocks']:,} sequences."
            )


def print_format(ctx: DistContext, formats: list[str], kind: str | None) -> None:
    """Print the formats that were recognized, and what is made of them."""
    if formats:
        result = {
            "chat": "conversations in the chat template, the assistant's messages are trained",
            "pair": "prompts and completions, the completions are trained",
            "text": "documents, all tokens are trained",
        }[kind or "text"]
        ctx.console.print0(f"🔎 Format: {', '.join(dict.fromkeys(formats))} → {result}")


def _describe_split(name: str, facts: dict, args) -> str:
    """Return one line about a split: rows, tokens, sequences, and what was truncated or skipped."""
    if "rows" not in facts:
        return f"{name}: {facts['blocks']:,} sequences held out of the corpus"
    label = "sequences of"
    if facts["kind"] in ("chat", "pair"):
        label = "sequences, packed, of at most" if args.packing else "sequences of at most"
    line = (
        f"{name}: {facts['rows']:,} rows, {facts['tokens']:,} tokens, "
        f"{facts['blocks']:,} {label} {args.seq_length} tokens"
    )
    if "padding_share" in facts:
        line += f", {facts['padding_share']:.1%} padding"
    return line + "".join(
        f", {facts[label]:,} {label}" for label in ("truncated", "skipped") if facts[label]
    )


def bad_rows_in(folder: str | Path) -> list[str]:
    """Return a line about each row of a tokenized corpus that is not used; there may be millions.

    Raises:
        UserError: the file cannot be read, for instance because the cache was removed meanwhile.
    """
    try:
        return json.loads((Path(folder) / BAD_ROWS).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"The cache {folder} cannot be read ({error.strerror}): use another --cache_dir."
        ) from error


def tokenize_once(
    source: Source, tokenizer, cache: Cache, advance: Callable[[int], None], max_bad_rows: int
) -> dict:
    """Tokenize a corpus, unless the cache has it from an earlier run.

    Args:
        tokenizer: a Hugging Face tokenizer; one without a chat template gets PLAIN_TEMPLATE if
            there are conversations.
        advance: called from time to time with the number of characters done since the last call.
        max_bad_rows: maximum number of rows that cannot be used; `bad_rows_in` lists them.
    Returns:
        {folder, end_of_text (the id, or None), dtype, notices, splits: {name: {kind, formats,
        tokens, rows, empty, sha256 of the text}}}. It is JSON, and small for a corpus of any size,
        because it is sent to all ranks of a node through the store.
    Raises:
        UserError: the cache cannot be read or written, the text cannot be read, there are more than
            `max_bad_rows` bad rows, or see `chat.Encoder.encode` and `chat.use_plain_template`.
    """
    template = template_of(tokenizer) or PLAIN_TEMPLATE
    key = hashlib.sha256(
        f"{CACHE_VERSION}\0{source.fingerprint}\0{tokenizer_fingerprint(tokenizer)}\0"
        f"{template}".encode()
    )
    folder, facts = cache.get(
        key.hexdigest()[:32],
        lambda folder: _write_tokens(source, tokenizer, folder, advance, max_bad_rows),
    )
    # The run that wrote the cache may have had a larger --max_bad_rows.
    refuse_bad_rows(bad_rows_in(folder), max_bad_rows, source.advice)
    return {"folder": str(folder), "end_of_text": tokenizer.eos_token_id, **facts}


def refuse_bad_rows(bad: Sequence[str], allowed: int, advice: str = "") -> None:
    """Check that there are no more than `allowed` bad rows.

    Raises:
        UserError: there are more; the message names the first row beyond the maximum.
    """
    if len(bad) > allowed:
        limit = f"That is one more than --max_bad_rows {allowed} allows."
        hint = "--max_bad_rows N leaves out up to N."
        raise UserError(f"{bad[allowed]} {limit if allowed else hint}{advice}")


def tokenizer_fingerprint(tokenizer) -> str:
    """Return a SHA-256 hex digest of everything that determines the token ids of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        text = backend.to_str()
    else:
        text = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{text}\0{tokenizer.eos_token_id}".encode()).hexdigest()


def _write_tokens(
    source: Source, tokenizer, folder: Path, advance: Callable[[int], None], max_bad_rows: int
) -> dict:
    """Write the files of a tokenized corpus, and return the facts about it."""
    bad, notices = [], []
    # Not len(tokenizer): the ids of some vocabularies have gaps.
    largest = max(tokenizer.get_vocab().values(), default=0)
    dtype = "uint16" if largest < 1 << 16 else "uint32"

    def refuse(row: BadRow) -> None:
        bad.append(str(row))
        refuse_bad_rows(bad, max_bad_rows, source.advice)

    splits = {}
    for name, open_items in source.splits.items():
        writer = SplitWriter(folder / name, tokenizer, dtype, advance, refuse)
        splits[name] = writer.write(open_items())
        notices += writer.notices
    (folder / BAD_ROWS).write_text(json.dumps(bad), encoding="utf-8")
    return {"dtype": dtype, "splits": splits, "notices": notices}


@dataclass
class SplitWriter:
    """A writer of the tokens of one split, which counts its rows."""

    path: Path  # of the files, without their suffixes
    tokenizer: Any
    dtype: str
    advance: Callable[[int], object]  # called with the number of characters since the last call
    refuse: Callable[[BadRow], None]  # called with each bad row
    notices: list[str] = field(default_factory=list)  # lines for the user about what was read
    one_kind: OneKind = field(default_factory=OneKind)
    rows: int = 0
    empty: int = 0
    digest: Any = field(default_factory=hashlib.sha256)  # of the text

    def write(self, items: Iterator[Item]) -> dict:
        """Write the files.

        Returns:
            {kind, formats, tokens, rows, empty, sha256 of the text}.
        """
        rows = self._usable(items)
        first = next(rows, None)
        rows = itertools.chain([] if first is None else [first], rows)
        is_example = isinstance(first, Example)
        tokens = self._write_examples(rows) if is_example else self._write_documents(rows)
        return {
            "kind": self.one_kind.kind,
            "formats": self.one_kind.formats,
            "tokens": tokens,
            "rows": self.rows,
            "empty": self.empty,
            "sha256": self.digest.hexdigest(),
        }

    def _usable(self, items: Iterator[Item]) -> Iterator[Document | Example]:
        for item in items:
            if isinstance(item, Notice):
                self.notices.append(item.text)
            elif isinstance(row := self.one_kind.check(item), BadRow):
                self.refuse(row)
            else:
                self.rows += 1
                self.empty += isinstance(row, Document) and row.pieces == [""]
                yield row

    def _write_documents(self, documents: Iterable[Document]) -> int:
        """Write one stream of ids, with the end-of-text token between documents.

        Returns:
            The number of tokens.
        """
        end_of_text = self.tokenizer.eos_token_id
        separator = [] if end_of_text is None else [end_of_text]
        encode = DocumentTokenizer(self.tokenizer).encode
        tokens, waiting = 0, array("I")
        with open(f"{self.path}.bin", "wb") as file:
            chunks = encode(map(self._read, documents), self.advance)
            for number, (begins, ids) in enumerate(chunks):
                if begins and number:
                    waiting.extend(separator)
                waiting.extend(ids)
                # Many short documents are one write.
                if len(waiting) >= WRITTEN_TOKENS:
                    tokens += self._append(waiting, file)
                    waiting = array("I")
            return tokens + self._append(waiting, file)

    def _append(self, ids: array[int], file: BinaryIO) -> int:
        np.frombuffer(ids, dtype=np.uint32).astype(self.dtype).tofile(file)
        return len(ids)

    def _read(self, document: Document) -> Iterator[str]:
        """Yield the pieces of a document, and add them to the digest."""
        for piece in document.pieces:
            self.digest.update(piece.encode())
            yield piece
        self.digest.update(b"\0")

    def _write_examples(self, examples: Iterator[Example]) -> int:
        """Write the files that `batches.ExampleFile` describes; returns the number of tokens."""
        use_plain_template(self.tokenizer, self.one_kind.kind)
        encoder, end = Encoder(self.tokenizer), 0
        with (
            open(f"{self.path}.bin", "wb") as ids,
            open(f"{self.path}.learned.bin", "wb") as learned,
            open(f"{self.path}.rows.bin", "wb") as rows,
        ):
            while batch := list(itertools.islice(examples, BATCH_EXAMPLES)):
                for example, encoded in zip(batch, encoder.encode(batch), strict=True):
                    if isinstance(encoded, BadRow):
                        self.rows -= 1
                        self.refuse(encoded)
                        continue
                    self.digest.update(example.as_json().encode() + b"\0")
                    encoded[0].astype(self.dtype).tofile(ids)
                    encoded[1].astype(np.uint8).tofile(learned)
                    end += len(encoded[0])
                    first_target = 1 + encoded[1][1:].argmax()  # the first token has no target
                    np.array([end, first_target], dtype=np.int64).tofile(rows)
                self.advance(sum(len(example.as_json()) for example in batch))
        return end
