"""Tokenise a corpus once, and keep it on disk.

Documents become one long stream of token ids with an end-of-text token between them; examples
(conversations, or prompts and their completions) lie one after the other, with a mask of what is
learned. Neither depends on the length of a block, so that one cached corpus serves every
--seq_length.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from support.cluster.context import Run, describe_difference
from support.data.chat import PLAIN_TEMPLATE, Encoder, template_of, use_plain_template
from support.data.json_documents import DocumentTokenizer
from support.data.sources import BadRow, Document, Example, Item, Notice, Source, open_source
from support.errors import UserError
from support.files.cache import Cache
from support.model.resolve import cache_folder

CACHE_VERSION = 5  # raise it when the layout of the cache or the way of tokenising changes
BATCH_EXAMPLES = 256
BAD_ROWS = "bad_rows.json"  # in a folder of the cache
SHOWN_BAD_ROWS = 10


def tokenize_corpus(
    args, run: Run, tokenizer, name: str, config: str | None = None, validation: str | None = None
) -> dict:
    """Read and tokenise a corpus: once per node, by its first rank, or not at all if an earlier run
    has.

    Args:
        args: --text_column, --cache_dir, --max_bad_rows.
        run: the ranks; every one calls it.
        tokenizer: see `tokenize_once`, which says what is returned and raised.
        name, config, validation: see `corpus.open_source`.
    Raises:
        TrainingError: the nodes have other texts.
    """

    def tokenize() -> dict:
        source = open_source(name, config, args.text_column, validation, args.include)
        say_files(source.files, source.notices, run)
        cache = Cache(cache_folder(args.cache_dir), run.temporary, run.print)
        with run.bar("Tokenising", unit="characters") as bar:
            return tokenize_once(source, tokenizer, cache, bar.advance, args.max_bad_rows)

    prepared = run.once_per_node("dataset", tokenize)
    say_files([], prepared["notices"], run)
    describe_difference(run.gather(prepared["splits"]), "The text of the dataset")
    prepared["bad_rows"] = bad_rows_in(prepared["folder"]) if run.is_main else []
    say_bad_rows(prepared["bad_rows"], run)
    return prepared


def say_files(counts: list[str], notices: list[str], run: Run) -> None:
    """What kinds of files there are, and which are left out."""
    for line in counts:
        run.say(f"📂 {line}")
    for line in notices:
        run.warn(line)


def say_bad_rows(bad: list[str], run: Run) -> None:
    """Name the first rows that were left out."""
    for row in bad[:SHOWN_BAD_ROWS]:
        run.warn(f"Left out: {row}")
    if len(bad) > SHOWN_BAD_ROWS:
        run.warn(
            f"Left out: {len(bad) - SHOWN_BAD_ROWS} more rows, all named in results.json under dataset.bad_rows."
        )


def bad_rows_in(folder: str | Path) -> list[str]:
    """Lines about all rows of a tokenized corpus that were left out; there may be millions.

    Raises:
        UserError: the cache was removed meanwhile.
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
    """Tokenize a corpus, or find it in the cache from an earlier run.

    Args:
        source: the corpus.
        tokenizer: a Hugging Face tokenizer; one without a chat template gets PLAIN_TEMPLATE if
            there are conversations.
        cache: keeps tokenized corpora.
        advance: gets now and then how many more characters are done.
        max_bad_rows: so many rows that cannot be used are left out; `bad_rows_in` names them.
    Returns:
        {folder, dtype, notices, splits: {name: {kind, tokens, rows, empty, sha256 of the text}}};
        JSON, and small however
        large the corpus is: it goes to all ranks of a node through the store.
    Raises:
        UserError: the cache cannot be written, the text cannot be read, or there are more bad rows.
    """
    template = template_of(tokenizer) or PLAIN_TEMPLATE
    key = hashlib.sha256(
        f"{CACHE_VERSION}\0{source.fingerprint}\0{tokenizer_fingerprint(tokenizer)}\0{template}".encode()
    )
    folder, facts = cache.get(
        key.hexdigest()[:32],
        lambda folder: _write_tokens(source, tokenizer, folder, advance, max_bad_rows),
    )
    refuse_bad_rows(
        bad_rows_in(folder), max_bad_rows, source.advice
    )  # an earlier run may have allowed more
    return {"folder": str(folder), **facts}


def of_another_kind(item: Document | Example, kind: str) -> BadRow:
    """What is wrong with an item among others of `kind`."""
    return BadRow(
        f"{item.where}: of kind {item.kind} among rows of kind {kind}: a corpus has one kind of rows."
    )


def refuse_bad_rows(bad: Sequence[str], allowed: int, advice: str = "") -> None:
    """
    Raises:
        UserError: there are more bad rows than allowed; it has the line of the first one too many,
            and the advice.
    """
    if len(bad) > allowed:
        more = (
            f"That is one more than --max_bad_rows {allowed} allows."
            if allowed
            else "--max_bad_rows N leaves out up to N."
        )
        raise UserError(f"{bad[allowed]} {more}{advice}")


def tokenizer_fingerprint(tokenizer) -> str:
    """A digest of everything that decides which tokens a text becomes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = (
        backend.to_str()
        if backend is not None
        else json.dumps(sorted(tokenizer.get_vocab().items()))
    )
    return hashlib.sha256(f"{text}\0{tokenizer.eos_token_id}".encode()).hexdigest()


@dataclass
class GoodRows:
    """Passes on what can be used of a split, all of it of one kind, and keeps account of it.

    Attributes:
        items: what the source has.
        bad: lines about the rows that cannot be used; shared by the splits of a corpus.
        allowed: how many there may be.
        advice: what to add to the message about one too many.
        notices: lines for the user about what is read.
        kind: "text", "chat" or "pair", as the first row is.
        rows, empty: how many were passed on; how many of them held no text.
    """

    items: Iterator[Item]
    bad: list[str]
    allowed: int
    advice: str = ""
    notices: list[str] = field(default_factory=list)
    kind: str | None = None
    rows: int = 0
    empty: int = 0

    def __iter__(self) -> Iterator[Document | Example]:
        for item in self.items:
            if isinstance(item, Notice):
                self.notices.append(item.text)
                continue
            if isinstance(item, BadRow):
                self.refuse(item)
                continue
            self.kind = self.kind or item.kind
            if item.kind != self.kind:
                self.refuse(of_another_kind(item, self.kind))
                continue
            self.rows += 1
            self.empty += isinstance(item, Document) and item.pieces == [""]
            yield item

    def refuse(self, row: BadRow) -> None:
        """Note a bad row.

        Raises:
            UserError: it is one too many.
        """
        self.bad.append(str(row))
        refuse_bad_rows(self.bad, self.allowed, self.advice)


def _write_tokens(
    source: Source, tokenizer, folder: Path, advance: Callable[[int], None], max_bad_rows: int
) -> dict:
    dtype = "uint16" if len(tokenizer) <= 1 << 16 else "uint32"
    splits, bad, notices = {}, [], []
    for name, open_items in source.splits.items():
        digest = hashlib.sha256()
        found = GoodRows(open_items(), bad, max_bad_rows, source.advice, notices)
        items = iter(found)
        first = next(items, None)
        everything = itertools.chain([] if first is None else [first], items)
        if isinstance(first, Example):
            tokens = _write_examples(
                everything, folder / name, tokenizer, dtype, digest, advance, found
            )
        else:
            tokens = _write_stream(everything, folder / name, tokenizer, dtype, digest, advance)
        splits[name] = {
            "kind": found.kind,
            "tokens": tokens,
            "rows": found.rows,
            "empty": found.empty,
            "sha256": digest.hexdigest(),
        }
    (folder / BAD_ROWS).write_text(json.dumps(bad), encoding="utf-8")
    return {"dtype": dtype, "splits": splits, "notices": notices}


def _write_stream(documents, path: Path, tokenizer, dtype: str, digest, advance) -> int:
    tokens = 0
    with open(f"{path}.bin", "wb") as file:
        for ids in _token_batches(documents, tokenizer, digest, advance):
            np.asarray(ids, dtype=dtype).tofile(file)
            tokens += len(ids)
    return tokens


def _write_examples(
    examples, path: Path, tokenizer, dtype: str, digest, advance, found: GoodRows
) -> int:
    use_plain_template(tokenizer, found.kind)
    encoder, end = Encoder(tokenizer), 0
    with (
        open(f"{path}.bin", "wb") as ids,
        open(f"{path}.learned.bin", "wb") as learned,
        open(f"{path}.rows.bin", "wb") as rows,
    ):
        for batch in _batches(examples, BATCH_EXAMPLES):
            for example, row in zip(batch, encoder.encode(batch), strict=True):
                if isinstance(row, BadRow):
                    found.rows -= 1
                    found.refuse(row)
                    continue
                digest.update(example.as_json().encode() + b"\0")
                row[0].astype(dtype).tofile(ids)
                row[1].astype(np.uint8).tofile(learned)
                end += len(row[0])
                np.array([end, row[1].argmax()], dtype=np.int64).tofile(rows)
            advance(sum(len(example.as_json()) for example in batch))
    return end


def _batches(items: Iterable, size: int) -> Iterator[list]:
    batch = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _token_batches(
    documents: Iterable[Document], tokenizer, digest, advance
) -> Iterator[list[int]]:
    """Token ids in batches, the end-of-text token between documents; the tokenizer's own threads
    use all cores.
    """
    between = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    any_before = False
    for begins, ids in DocumentTokenizer(tokenizer).encode(
        (_read(one, digest) for one in documents), advance
    ):
        yield between + ids if begins and any_before else ids
        any_before = True


def _read(document: Document, digest) -> Iterator[str]:
    """The pieces of a document, which go into the digest of all text."""
    for piece in document.pieces:
        digest.update(piece.encode())
        yield piece
    digest.update(b"\0")
