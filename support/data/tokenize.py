"""Tokenize a corpus once, and keep the result on disk.

A split is a flat array of token ids, `<split>.bin`. Documents become one long stream, with an
end-of-text token between them. Examples follow each other; a token t without a loss is stored as
~t, and `<split>.index.bin` has [start, end, first target] of each example. Neither depends on the
length of a sequence, so one cached corpus serves every --seq_length.

Long documents are tokenized in pieces, with exactly the ids of the whole document. A text is cut
after a line break, or else before a space between two words. Before a cut is used, the tokenizer
shows on a few hundred characters around it that tokens(left + right) = tokens(left) +
tokens(right). If it does not, the next place is tried; a text without such a place is tokenized as
a whole. Each piece is tokenized after the character that precedes it, because a tokenizer may
treat the beginning of a text differently (Llama 2 inserts a space there).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from support.cli.arguments import Arguments
from support.cluster.context import DistContext, require_equal_on_all_ranks
from support.console import Console
from support.data.chat import (
    PLAIN_NOTICE,
    PLAIN_TEMPLATE,
    Encoder,
    has_own_template,
    template_of,
    use_plain_template,
)
from support.data.formats import BadRow, Document, Example, OneKind, RowOptions
from support.data.rows import PlacedRows, Source, evaluates_only, open_source
from support.errors import UserError
from support.files.cache import Cache, cache_folder
from support.units import GB

CACHE_VERSION = 9  # increase it when the layout of the cache or the tokenization changes
BATCH_EXAMPLES = 256
BAD_ROWS = "bad_rows.json"  # file in a folder of the cache
SHOWN_BAD_ROWS = 10
# Memory that a tokenizer needs for a character of a text; 120 were measured (GPT-2, Llama 2).
BYTES_PER_CHARACTER = 160
LONG_BYTES = 1 << 29  # below it the free memory is not looked at
PIECE_CHARACTERS = 1 << 16  # a piece has one to two times as many, if the text can be cut
BATCH_CHARACTERS = 1 << 20  # tokenized by one call, which uses all cores
# Characters on each side of a cut that are tokenized to check it. Two lengths, so that a pattern
# that counts characters or words from the beginning of a text fits at most one of them.
WINDOWS = (250, 381)
# Places where a text may be cut: after a line break or the end of a Chinese sentence, before a
# space. In a run of white space, tokenizers often join characters across any place.
PLACES = [
    re.compile(pattern)
    for pattern in (r"(?<=\S) ?\n(?= ?\S)", r"(?<=[\u3002\uff01\uff1f])(?=\w)", r"(?<=\w)(?= \w)")
]
TRIES = 6  # places of each kind that are tried in PIECE_CHARACTERS of text


def tokenize_corpus(args: Arguments, ctx: DistContext, tokenizer: Any, name: str) -> dict:
    """Read and tokenize a corpus once per node, unless the cache has it; all ranks must call it.

    Returns:
        What `tokenize_once` returns, and on rank 0 under "bad_rows" the lines of `bad_rows_in`.
    Raises:
        UserError: see `rows.open_source` and `tokenize_once`.
        TrainingError: the text of the dataset differs between nodes.
    """

    def tokenize() -> dict:
        source = open_source(name, args, RowOptions.of(args, has_own_template(tokenizer)))
        for line in source.counts:
            ctx.console.print0(f"📂 {line}")
        if evaluates_only(args) and "train" in source.splits:
            ctx.console.print0("ℹ️  All text is tokenized: a part of it is the validation data.")
        cache = Cache(cache_folder(args.cache_dir), ctx.temporary, ctx.console.print)
        with ctx.console.bar("Tokenizing", unit="characters") as bar:
            return tokenize_once(source, tokenizer, cache, bar.update, args.max_bad_rows)

    prepared = ctx.once_per_node(f"dataset {name}", tokenize)
    require_equal_on_all_ranks(ctx.all_gather(prepared["splits"]), "The text of the dataset")
    prepared["bad_rows"] = bad_rows_in(prepared["folder"]) if ctx.is_main else []
    print_bad_rows(ctx.console, prepared["bad_rows"])
    return prepared


def print_bad_rows(console: Console, rows: Sequence[str], printed: int = 0) -> None:
    """Print the first bad rows, except the `printed` ones at the beginning."""
    for row in rows[printed:SHOWN_BAD_ROWS]:
        console.warn(f"Left out: {row}")
    if printed <= SHOWN_BAD_ROWS < len(rows):
        console.warn("More rows are left out: see dataset.bad_rows in results.json.")


def print_splits(ctx: DistContext, args: Arguments, facts: dict[str, dict], tokenizer: Any) -> None:
    """Print one line for each split; `facts` has their counts, see batches.open_split."""
    rows = [split for split in facts.values() if "kind" in split]
    formats = [name for split in rows for name in split["formats"]]
    kinds = [split["kind"] for split in rows]
    print_format(ctx, formats, "chat" if "chat" in kinds else kinds[0], tokenizer)
    for name, split in facts.items():
        line = f"{name}: {split['blocks']:,} sequences held out of the corpus"
        if "rows" in split:
            packed = ", packed," if args.packing else ""
            most = " at most" if split["kind"] in ("chat", "pair") else ""
            line = f"{name}: {split['rows']:,} rows, {split['tokens']:,} tokens, "
            line += f"{split['blocks']:,} sequences{packed} of{most} {args.seq_length} tokens"
            if "padding_share" in split:
                line += f", {split['padding_share']:.1%} padding"
            for flaw in ("truncated", "skipped"):
                line += f", {split[flaw]:,} {flaw}" if split[flaw] else ""
        ctx.console.print0(f"📚 {line}")
        if name == "train" and args.num_samples and split["blocks"] < args.num_samples:
            ctx.console.warn(
                f"--num_samples {args.num_samples:,} is more than the corpus has: using all "
                f"{split['blocks']:,} sequences."
            )


def warn_of_joined(ctx: DistContext, args: Arguments, splits: dict[str, dict]) -> None:
    """Warn if a prompt and its completion, of columns that flags name, have no space between."""
    joined = next(filter(None, (split.get("joined") for split in splits.values())), None)
    if joined and args.prompt_column and args.completion_column:
        ctx.console.warn(
            f"--prompt_column {args.prompt_column} and --completion_column "
            f"{args.completion_column} are joined without a separator ({joined!r}): end the "
            "prompts with a space or a line break, or write the rows as messages."
        )


def print_format(
    ctx: DistContext, formats: Iterable[str], kind: str | None, tokenizer: Any
) -> None:
    """Print the formats that were recognized; set a chat template if conversations need one."""
    if use_plain_template(tokenizer, kind):
        ctx.console.warn(PLAIN_NOTICE)
    result = {
        "chat": "conversations in the chat template, the assistant's messages are trained",
        "pair": "prompts and completions, the completions are trained",
        "text": "documents, all tokens are trained",
    }[kind or "text"]
    ctx.console.print0(f"🔎 Format: {', '.join(dict.fromkeys(formats))} → {result}")


def bad_rows_in(folder: str | Path) -> list[str]:
    """Return a line about each row of a tokenized corpus that is not used."""
    return json.loads((Path(folder) / BAD_ROWS).read_text(encoding="utf-8"))


def tokenize_once(
    source: Source,
    tokenizer: Any,
    cache: Cache,
    advance: Callable[[int], object],
    max_bad_rows: int,
) -> dict:
    """Tokenize a corpus, unless the cache has it from an earlier run.

    Args:
        tokenizer: gets PLAIN_TEMPLATE if it needs one and has none.
        advance: called from time to time with the number of characters done since the last call.
        max_bad_rows: maximum number of rows that cannot be used; `bad_rows_in` lists them.
    Returns:
        {folder, end_of_text (the id, or None), splits: {name: {dtype, kind, formats, tokens, rows,
        empty, sha256 of the text, joined}}}. It is JSON, and small, because it is sent
        through the store.
    Raises:
        UserError: the cache or the text cannot be read, or there are too many bad rows.
    """
    template = template_of(tokenizer) or PLAIN_TEMPLATE
    texts = (str(CACHE_VERSION), source.fingerprint, tokenizer_fingerprint(tokenizer), template)
    key = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]

    def write(folder: Path) -> dict:
        bad: list[str] = []

        def refuse(row: BadRow) -> None:
            bad.append(str(row))
            check_bad_rows(bad, max_bad_rows)

        writers = {
            name: SplitWriter(folder / name, tokenizer, advance, refuse) for name in source.splits
        }
        facts = {name: writer.write(source.splits[name](None)) for name, writer in writers.items()}
        (folder / BAD_ROWS).write_text(json.dumps(bad), encoding="utf-8")
        return {"splits": facts}

    folder, facts = cache.get(key, write)
    # The run that wrote the cache may have had a larger --max_bad_rows.
    check_bad_rows(bad_rows_in(folder), max_bad_rows)
    return {"folder": str(folder), "end_of_text": tokenizer.eos_token_id, **facts}


def check_bad_rows(bad: Sequence[str], allowed: int) -> None:
    """Raise a UserError that names the first row beyond the maximum, if there are more bad rows."""
    if len(bad) > allowed:
        limit = f"That is one more than --max_bad_rows {allowed} allows."
        hint = limit if allowed else "--max_bad_rows N leaves out up to N."
        raise UserError(f"{bad[allowed]} {hint}")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a SHA-256 hex digest of everything that determines the token ids of a text."""
    if tokenizer.is_fast:
        text = tokenizer.backend_tokenizer.to_str()
    else:
        text = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{text}\0{tokenizer.eos_token_id}".encode()).hexdigest()


class SplitWriter:
    """A writer of the tokens of one split, to files with `path` as the beginning of their names."""

    def __init__(
        self, path: Path, tokenizer: Any, advance: Callable[[int], object], refuse: Callable
    ) -> None:
        self.path, self.tokenizer, self.advance, self.refuse = path, tokenizer, advance, refuse
        self.one_kind, self.rows, self.empty, self.tokens = OneKind(), 0, 0, 0
        self.digest = hashlib.sha256()  # of the text
        self.joined: str | None = None  # of the first pair without a separator

    def write(self, rows: PlacedRows) -> dict:
        """Write the files; return the facts of the split, see `tokenize_once`."""
        usable = self._usable(rows)
        first = next(usable, None)
        usable = itertools.chain([] if first is None else [first], usable)
        if isinstance(first, Example):
            dtype, encoded = "int32", self._encode_examples(usable)
        else:
            # Not len(tokenizer): the ids of some vocabularies have gaps.
            largest = max(self.tokenizer.get_vocab().values(), default=0)
            dtype = "uint16" if largest < 1 << 16 else "uint32"
            encoded = self._encode_documents(usable)
        with open(f"{self.path}.bin", "wb") as file:
            for ids in encoded:
                file.write(ids.astype(dtype).tobytes())
                self.tokens += len(ids)
        kind = {"kind": self.one_kind.kind, "formats": self.one_kind.formats}
        counts = {"tokens": self.tokens, "rows": self.rows, "empty": self.empty}
        found = {"sha256": self.digest.hexdigest(), "joined": self.joined}
        return {"dtype": dtype, **kind, **counts, **found}

    def _usable(self, rows: PlacedRows) -> Iterator[Any]:
        for _, content in rows:
            row = self.one_kind.check(content)
            if isinstance(row, BadRow):
                self.refuse(row)
            else:
                self.rows += 1
                self.empty += isinstance(row, Document) and row.pieces == [""]
                yield row

    def _encode_documents(self, documents: Iterator[Document]) -> Iterator[np.ndarray]:
        """Yield the ids of one stream."""
        end_of_text = self.tokenizer.eos_token_id
        separator = np.array([] if end_of_text is None else [end_of_text], np.uint32)
        counted = (replace(document, pieces=self._read(document)) for document in documents)
        encoded = DocumentTokenizer(self.tokenizer).encode_documents(counted, self.advance)
        for number, (begins, ids) in enumerate(encoded):
            yield np.concatenate([separator, ids]) if begins and number else ids

    def _read(self, document: Document) -> Iterator[str]:
        """Yield the pieces of a document, and add them to the digest."""
        for piece in document.pieces:
            self.digest.update(piece.encode())
            yield piece
        self.digest.update(b"\0")

    def _encode_examples(self, examples: Iterator[Example]) -> Iterator[np.ndarray]:
        """Yield the ids of each example, and write the index."""
        use_plain_template(self.tokenizer, self.one_kind.kind)
        encoder, index = Encoder(self.tokenizer), list[tuple[int, int, int]]()
        while batch := list(itertools.islice(examples, BATCH_EXAMPLES)):
            for example, encoded in zip(batch, encoder.encode(batch), strict=True):
                if isinstance(encoded, BadRow):
                    self.rows -= 1
                    self.refuse(encoded)
                    continue
                self.digest.update(example.as_json().encode() + b"\0")
                self.joined = self.joined or example.joined
                # The first token is not predicted from anything.
                first_target = self.tokens + 1 + int((encoded[1:] >= 0).argmax())
                index.append((self.tokens, self.tokens + len(encoded), first_target))
                yield encoded
            self.advance(sum(len(example.as_json()) for example in batch))
        np.array(index, np.int64).tofile(f"{self.path}.index.bin")


# ------------------------------------------------------------------- documents of any length


@dataclass(frozen=True)
class Piece:
    """A part of a document that is tokenized alone."""

    text: str
    before: str = ""  # the character before it; empty at the beginning of a document


def check_memory(text: str, where: str) -> None:
    """Refuse a text for which the tokenizer may run out of memory: its library ends the process."""
    needed, free = len(text) * BYTES_PER_CHARACTER, psutil.virtual_memory().available
    if needed < LONG_BYTES:
        return
    if hasattr(psutil.Process(), "rlimit"):  # Linux only
        limit = psutil.Process().rlimit(psutil.RLIMIT_AS)[0]
        if limit != psutil.RLIM_INFINITY:
            free = min(free, limit - psutil.Process().memory_info().vms)
    if needed > free:
        raise UserError(
            f"{where} has {len(text):,} characters without a place at which its tokens can be cut, "
            f"for which the tokenizer may need {needed / GB:.1f} GB of memory, and "
            f"{max(0, free) / GB:.1f} GB are free: insert line breaks, or use more memory."
        )


class DocumentTokenizer:
    """A tokenizer of documents, which are cut from `size` characters on."""

    def __init__(self, tokenizer: Any, size: int | None = None) -> None:
        self.tokenizer, self.size = tokenizer, size or PIECE_CHARACTERS
        if tokenizer.is_fast:
            # Sets the options of the backend (no truncation, no padding), which is called directly.
            tokenizer("", add_special_tokens=False)
        # The best tokens of a Unigram model may depend on distant words.
        model = tokenizer.backend_tokenizer.model if tokenizer.is_fast else None
        self.places = PLACES[:1] if type(model).__name__ == "Unigram" else PLACES
        if self.places is not PLACES and tokenizer.backend_tokenizer.pre_tokenizer is None:
            self.places = []  # a document is a single word, which no check of a part can cut
        self._length_of = functools.lru_cache(1000)(lambda text: len(self._tokens([text])[0]))

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        if self.tokenizer.is_fast:  # faster than transformers' wrapper by a quarter for short rows
            encode = self.tokenizer.backend_tokenizer.encode_batch_fast
            return [encoding.ids for encoding in encode(texts, add_special_tokens=False)]
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def encode(self, pieces: list[Piece]) -> list[np.ndarray]:
        """Return the token ids of each piece, uint32; joined, they are those of the document."""
        tokens = self._tokens([piece.before + piece.text for piece in pieces])
        return [
            np.array(ids[self._length_of(piece.before) if piece.before else 0 :], dtype=np.uint32)
            for piece, ids in zip(pieces, tokens, strict=True)
        ]

    def encode_documents(
        self, documents: Iterable[Document], advance: Callable[[int], object]
    ) -> Iterator[tuple[bool, np.ndarray]]:
        """Tokenize documents; empty documents are omitted.

        A thread tokenizes a batch, on all cores, while this thread reads and cuts the next one.

        Args:
            advance: called after each batch with its number of characters.
        Yields:
            (whether a document begins with these ids, uint32 ids).
        """
        with ThreadPoolExecutor(1) as thread:
            batches = (
                (batch, thread.submit(self.encode, batch)) for batch in self._batches(documents)
            )
            # The second of each pair is tokenized while the first is used.
            for current, _ in itertools.pairwise(itertools.chain(batches, [None])):
                assert current is not None
                batch, future = current
                encoded = future.result()
                advance(sum(len(piece.text) for piece in batch))
                yield from zip((not piece.before for piece in batch), encoded, strict=True)

    def _batches(self, documents: Iterable[Document]) -> Iterator[list[Piece]]:
        batch, characters = list[Piece](), 0
        for piece in itertools.chain.from_iterable(map(self.pieces, documents)):
            batch.append(piece)
            characters += len(piece.text)
            if characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
        yield batch

    def pieces(self, document: Document) -> Iterator[Piece]:
        """Cut a document; the result depends on its text only, not on how it is read."""
        text, before, searched = "", "", self.size
        for read in document.pieces:
            for start in range(0, len(read), self.size):
                text += read[start : start + self.size]
                while len(text) >= searched + self.size + WINDOWS[-1]:
                    cut = self._cut(text, searched)
                    if cut is None:
                        searched += self.size
                        continue
                    check_memory(text[:cut], document.where)
                    yield Piece(text[:cut], before)
                    text, before, searched = text[cut:], text[cut - 1], self.size
        if text:
            check_memory(text, document.where)
            yield Piece(text, before)

    def _cut(self, text: str, start: int) -> int | None:
        """Return a place for a cut in the `size` characters from `start`; None if there is none."""
        for pattern in self.places:
            places = pattern.finditer(text, start, start + self.size)
            for match in itertools.islice(places, TRIES):
                if self._may_cut(text, match.end()):
                    return match.end()
        return None

    def _may_cut(self, text: str, cut: int) -> bool:
        before = text[cut - 1]
        for width in WINDOWS:
            left, right = text[max(0, cut - width) : cut], text[cut : cut + width]
            both, first, second, alone = self._tokens([left + right, left, before + right, before])
            if second[: len(alone)] != alone or both != first + second[len(alone) :]:
                return False
        return True
