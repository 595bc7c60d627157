"""From text to training blocks: read, tokenise once, keep on disk, and serve in one order for any number of ranks.

Text is tokenised into one long stream of token ids with an end-of-text token between documents. The stream lies in
a file; a block is a slice of `seq_length` tokens of it, read when it is needed. Because the stream does not depend on
the block length, one cached file serves every --seq_length.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from support import progress
from support.errors import UserError
from support.files import sha256_of
from support.preflight import is_local_dataset

CACHE_VERSION = 1  # raise it when the layout of the cache or the way of tokenising changes
PIECE_CHARACTERS = 1 << 16  # a long document is tokenised in pieces, so that all cores have work
BATCH_CHARACTERS = 1 << 20  # and in batches, so that memory stays bounded
IGNORED = -100  # label of a token that does not count, as in PyTorch's cross_entropy

Documents = Iterator[Iterable[str]]  # a document is its text, in one piece or several


# ---------------------------------------------------------------------------------------------------- sources


@dataclass(frozen=True)
class Source:
    """A corpus before tokenisation.

    Attributes:
        name: what the user called it.
        fingerprint: changes whenever the text may have changed; cheap to compute.
        splits: "train", and "validation" where the corpus brings its own; each opens a stream of documents.
    """

    name: str
    fingerprint: str
    splits: dict[str, Callable[[], Documents]]


def open_source(dataset: str, config: str | None, text_column: str) -> Source:
    """Find the corpus that --dataset names.

    Args:
        dataset: "pydocs", "wikitext", a file, a folder, or a dataset on the hub.
        config: configuration name of a hub dataset.
        text_column: key or column that holds the text.
    Raises:
        UserError: nothing there, or nothing readable.
    """
    if dataset == "pydocs":
        return _open_pydocs()
    if is_local_dataset(dataset):
        return _open_files(Path(dataset).expanduser(), dataset, text_column)
    if dataset == "wikitext":  # the hub's short name for it no longer loads with `datasets` 5
        return _open_hub("wikitext", "Salesforce/wikitext", config or "wikitext-2-raw-v1", text_column, split_articles)
    return _open_hub(dataset, dataset, config, text_column, split_rows)


def _open_pydocs() -> Source:
    """The Python language reference that comes with every CPython; its text differs between releases."""
    from pydoc_data.topics import topics

    documents = [topics[name] for name in sorted(topics)]
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return Source("pydocs", digest, {"train": lambda: ([text] for text in documents)})


def _open_files(path: Path, name: str, text_column: str) -> Source:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if _is_data_file(file, path))
    if not files:
        raise UserError(f"--dataset {name}: the folder holds no files.")
    digest = hashlib.sha256(text_column.encode())
    for file in files:
        digest.update(file.suffix.encode() + bytes.fromhex(sha256_of(file)))
    return Source(name, digest.hexdigest(), {"train": lambda: _documents_of_files(files, text_column)})


def _is_data_file(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.is_file() and not hidden and file.stat().st_size > 0


def _documents_of_files(files: list[Path], text_column: str) -> Documents:
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    for file in files:
        try:
            if reader := readers.get(file.suffix.lower()):
                for text in reader(file, text_column):
                    yield [text]
            else:
                yield _read_text(file)
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 text: convert it first (iconv -f LATIN1 -t UTF-8).") from error


def _read_text(file: Path) -> Iterator[str]:
    try:
        with open(file, encoding="utf-8-sig", newline="") as stream:
            while chunk := stream.read(PIECE_CHARACTERS):
                yield chunk
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text: convert it first (iconv -f LATIN1 -t UTF-8).") from error


def _text_of(row, text_column: str, where: str) -> str:
    if isinstance(row, str):
        row = {text_column: row}
    if not isinstance(row, dict):
        raise UserError(f"{where}: neither a text nor an object with the key {text_column!r}.")
    if text_column not in row:
        raise UserError(f"{where}: no {text_column!r}; there is {', '.join(map(str, row)) or 'nothing'}: use --text_column.")
    text = "" if row[text_column] is None else row[text_column]  # a null is an empty document
    if not isinstance(text, str):
        raise UserError(f"{where}: {text_column!r} is not a text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: {text_column!r} holds half of a surrogate pair, which is no text.") from error
    return text


def _read_jsonl(file: Path, text_column: str) -> Iterator[str]:
    with open(file, encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{file}, line {number}, column {error.colno}: {error.msg}.") from error
            yield _text_of(row, text_column, f"{file}, line {number}")


def _read_json(file: Path, text_column: str) -> Iterator[str]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"{file}, line {error.lineno}, column {error.colno}: {error.msg}.") from error
    if isinstance(rows, dict) and text_column not in rows:  # {"data": [...]}
        rows = next((value for value in rows.values() if isinstance(value, list)), rows)
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        yield _text_of(row, text_column, f"{file}, entry {number}")


def _read_csv(file: Path, text_column: str) -> Iterator[str]:
    csv.field_size_limit(1 << 30)  # the default is 128 kB, less than a long document
    with open(file, encoding="utf-8-sig", newline="") as stream:
        rows = csv.DictReader(stream)
        try:
            for row in rows:
                yield _text_of(row, text_column, f"{file}, line {rows.line_num}")
        except csv.Error as error:
            raise UserError(f"{file}, line {rows.line_num}: {error}.") from error


def _read_parquet(file: Path, text_column: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file} is not a Parquet file: {str(error).splitlines()[0]}") from error
    if text_column not in table.schema_arrow.names:
        columns = ", ".join(table.schema_arrow.names)
        raise UserError(f"{file}: no column {text_column!r}; there is {columns}: use --text_column.")
    for batch in table.iter_batches(columns=[text_column], batch_size=1024):
        for text in batch.column(0).to_pylist():
            yield _text_of({text_column: text}, text_column, str(file))


def _open_hub(name: str, repository: str, config: str | None, text_column: str, grouped: Callable) -> Source:
    import datasets

    if not progress.on_terminal():
        datasets.disable_progress_bars()
    try:
        corpus = datasets.load_dataset(repository, config)
    except Exception as error:  # the clients raise a dozen classes; the first line says what is wrong
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"--dataset {name} cannot be loaded from the hub, and no such file is here: {text}") from error
    if "train" not in corpus:
        raise UserError(f"--dataset {name} has no split named train; it has {', '.join(corpus)}.")
    columns = corpus["train"].column_names
    if text_column not in columns:
        raise UserError(f"--dataset {name}: no column {text_column!r}; there is {', '.join(columns)}: use --text_column.")
    digest = hashlib.sha256(f"{text_column}\0{config}\0{grouped.__name__}".encode())
    splits = {"train": corpus["train"]}
    if "validation" in corpus:
        splits["validation"] = corpus["validation"]
    for split in splits.values():
        for file in sorted(entry["filename"] for entry in split.cache_files):
            digest.update(bytes.fromhex(sha256_of(Path(file))))

    def documents(split) -> Documents:
        rows = (row for batch in split.iter(batch_size=1000) for row in batch[text_column])
        where = f"--dataset {name}"
        return grouped(_text_of({text_column: row}, text_column, f"{where}, row {i}") for i, row in enumerate(rows))

    return Source(name, digest.hexdigest(), {name: partial(documents, split) for name, split in splits.items()})


def split_rows(rows: Iterable[str]) -> Documents:
    """Each row is a document."""
    return ([row] for row in rows)


def split_articles(rows: Iterable[str]) -> Documents:
    """WikiText's rows are lines; an article begins at a title, ` = Title = `, its sections at ` = = Section = = `."""
    article: list[str] = []
    for row in rows:
        if re.fullmatch(r" = [^=].* = \n?", row) and not row.startswith(" = = ") and article:
            yield article
            article = []
        article.append(row)
    if article:
        yield article


# ---------------------------------------------------------------------------------------------------- tokenised


@dataclass(frozen=True)
class TokenFile:
    """A stream of token ids on disk, cut into blocks of `seq_length`.

    Attributes:
        path: raw little-endian ids.
        dtype: "uint16", or "uint32" for vocabularies of more than 65,536 entries.
        seq_length: tokens in a block.
        first, blocks: the range of blocks that belongs to this split.
    """

    path: str
    dtype: str
    seq_length: int
    first: int
    blocks: int

    def read(self, indices: np.ndarray) -> torch.Tensor:
        """Blocks `indices` as int64, shape [len(indices), seq_length].

        The file is mapped anew for each call: pages of a mapping that stays open would count as this process's
        memory, and a shuffled epoch touches all of them.
        """
        stream = np.memmap(self.path, dtype=self.dtype, mode="r")
        starts = (self.first + np.asarray(indices, dtype=np.int64)) * self.seq_length
        rows = [stream[start : start + self.seq_length] for start in starts]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def tokenize_once(source: Source, tokenizer, cache_dir: Path, temporary: list[str], advance: Callable[[int], None]) -> dict:
    """Tokenise a corpus, or find it in the cache from an earlier run.

    Args:
        source: the corpus.
        tokenizer: a Hugging Face tokenizer.
        cache_dir: where tokenised corpora are kept.
        temporary: gets the folder that is written to, for removal if the run ends meanwhile.
        advance: told now and then how many more characters are done.
    Returns:
        {folder, dtype, sha256 of the text, splits: {name: tokens}}; JSON.
    Raises:
        UserError: the cache cannot be written, or the text cannot be read.
    """
    key = hashlib.sha256(f"{CACHE_VERSION}\0{source.fingerprint}\0{tokenizer_fingerprint(tokenizer)}".encode())
    folder = cache_dir / key.hexdigest()[:32]
    if not (folder / "meta.json").exists():
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            beside = Path(tempfile.mkdtemp(prefix=".writing-", dir=cache_dir))
            temporary.append(str(beside))
        except OSError as error:
            raise UserError(f"The cache {cache_dir} cannot be written ({error.strerror}): use --cache_dir.") from error
        try:
            _write_tokens(source, tokenizer, beside, advance)
            os.rename(beside, folder)  # whole, or not at all
        except OSError as error:
            if not (folder / "meta.json").exists():  # otherwise another run was faster
                raise UserError(f"The cache {cache_dir} cannot be written ({error.strerror}): use --cache_dir.") from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return {"folder": str(folder), **json.loads((folder / "meta.json").read_text())}


def tokenizer_fingerprint(tokenizer) -> str:
    """A digest of everything that decides which tokens a text becomes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{text}\0{tokenizer.eos_token_id}".encode()).hexdigest()


def _write_tokens(source: Source, tokenizer, folder: Path, advance: Callable[[int], None]) -> None:
    dtype = "uint16" if len(tokenizer) <= 1 << 16 else "uint32"
    digest, splits = hashlib.sha256(), {}
    for name, open_documents in source.splits.items():
        splits[name] = 0
        with open(folder / f"{name}.bin", "wb") as file:
            for ids in _token_batches(open_documents(), tokenizer, digest, advance):
                np.asarray(ids, dtype=dtype).tofile(file)
                splits[name] += len(ids)
            file.flush()
            os.fsync(file.fileno())
    (folder / "meta.json").write_text(json.dumps({"dtype": dtype, "sha256": digest.hexdigest(), "splits": splits}))


def _token_batches(documents: Documents, tokenizer, digest, advance) -> Iterator[list[int]]:
    """Token ids in batches, the end-of-text token between documents; the tokenizer's own threads use all cores."""
    between = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pieces: list[str] = []
    starts: set[int] = set()  # pieces in the batch that begin a document

    def encode() -> list[int]:
        encoded = tokenizer(pieces, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        ids = [id for i, piece in enumerate(encoded) for id in (between + piece if i in starts else piece)]
        pieces.clear()
        starts.clear()
        return ids

    characters, any_before = 0, False
    for document in documents:
        new = any_before
        for piece in _pieces(document):
            digest.update(piece.encode())
            if new:
                starts.add(len(pieces))
            pieces.append(piece)
            characters, new, any_before = characters + len(piece), False, True
            if characters >= BATCH_CHARACTERS:
                yield encode()
                advance(characters)
                characters = 0
        digest.update(b"\0")
    if pieces:
        yield encode()


def _pieces(document: Iterable[str]) -> Iterator[str]:
    """Join and cut a document into pieces of at most PIECE_CHARACTERS, so that the cuts change no token.

    A cut goes between a single line end and a letter: the byte-level tokenisers (GPT-2, Llama 3, Qwen) never join
    these two. Where a piece has no such place it is cut anywhere; one token in ten thousand may differ.
    """
    text = ""
    for chunk in document:
        for start in range(0, len(chunk), PIECE_CHARACTERS):
            text += chunk[start : start + PIECE_CHARACTERS]
            while len(text) > PIECE_CHARACTERS:
                good = [match.end() for match in re.finditer(r"\S\r?\n(?=[^\W\d_])", text[:PIECE_CHARACTERS])]
                cut = good[-1] if good else PIECE_CHARACTERS
                yield text[:cut]
                text = text[cut:]
    if text:
        yield text


def split_blocks(prepared: dict, seq_length: int, num_samples: int | None) -> tuple[TokenFile, TokenFile]:
    """The training and validation blocks of a tokenised corpus.

    A corpus without a validation split gives up its last tenth of blocks for it (none if it has one block only).
    Args:
        prepared: what `tokenize_once` returned.
        seq_length: tokens in a block.
        num_samples: train on the first `num_samples` blocks; None for all.
    Raises:
        UserError: the corpus is shorter than one block.
    """
    folder, dtype, tokens = Path(prepared["folder"]), prepared["dtype"], prepared["splits"]
    total = tokens["train"] // seq_length
    if total < 1:
        raise UserError(
            f"The corpus has {tokens['train']:,} tokens, less than one block of {seq_length}: use a smaller "
            "--seq_length or more text."
        )
    train_file, own = str(folder / "train.bin"), tokens.get("validation", 0) // seq_length
    if own:
        validation = TokenFile(str(folder / "validation.bin"), dtype, seq_length, 0, own)
        held_out = 0
    else:
        held_out = max(1, total // 10) if total > 1 else 0
        validation = TokenFile(train_file, dtype, seq_length, total - held_out, held_out)
    usable = total - held_out
    train = TokenFile(train_file, dtype, seq_length, 0, min(usable, num_samples or usable))
    return train, validation


# ---------------------------------------------------------------------------------------------------- order


def epoch_order(blocks: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the blocks in one epoch: a permutation drawn from (seed, epoch), the same on every rank."""
    return np.random.default_rng([seed, epoch]).permutation(blocks)


def steps_of(blocks: int, global_batch: int) -> int:
    """Optimizer steps for so many blocks; the last one may see fewer than the others."""
    return -(-blocks // global_batch)


def total_steps(blocks: int, global_batch: int, epochs: int | None, max_steps: int | None, step: int, samples: int) -> int:
    """Optimizer steps of the whole run, those of before a resume included.

    Args:
        blocks: in an epoch.
        global_batch: blocks in an optimizer step, from now on.
        epochs, max_steps: what was asked for; an epoch if neither was.
        step, samples: optimizer steps that were made before, and the blocks they saw.
    """
    if epochs is None and max_steps:
        return max_steps
    epochs_left, rest = divmod(max(0, (epochs or 1) * blocks - samples), blocks)
    total = step + epochs_left * steps_of(blocks, global_batch) + steps_of(rest, global_batch)
    return min(total, max_steps or total)


def windows(file: TokenFile, order: np.ndarray, batch_size: int, accumulation: int, rank: int, world_size: int) -> Iterator:
    """This rank's share of each optimizer step.

    The order is cut into global batches of batch_size × world_size × accumulation blocks, so that the number of ranks
    changes who computes a block and never which step it belongs to. Every micro-batch has the same shape on every
    rank: where blocks run out, rows whose labels are all ignored fill it up. They add nothing to loss or gradient,
    but let every rank take part in every collective.

    Args:
        file: the blocks.
        order: block numbers in the order of this epoch.
        batch_size: blocks in a micro-batch of one rank.
        accumulation: micro-batches in an optimizer step.
        rank, world_size: whose share.
    Yields:
        A list of micro-batches (inputs, labels), each int64 of shape [batch_size, seq_length].
    """
    together = batch_size * world_size
    for start in range(0, len(order), together * accumulation):
        window = order[start : start + together * accumulation]
        yield [
            fill_up(file, np.array_split(window[at : at + together], world_size)[rank], batch_size)
            for at in range(0, len(window), together)
        ]


def fill_up(file: TokenFile, indices: np.ndarray, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch of exactly `rows` rows: (inputs, labels), both int64 [rows, seq_length]."""
    inputs = torch.zeros(rows, file.seq_length, dtype=torch.int64)
    labels = torch.full_like(inputs, IGNORED)
    if len(indices):
        inputs[: len(indices)] = file.read(indices)
        labels[: len(indices)] = inputs[: len(indices)]
    return inputs, labels


def seed_dropout(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Let dropout draw from (seed, step, micro-step, rank): other numbers everywhere, and the same ones after a resume."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, micro_step, rank]).generate_state(1, np.uint64)[0] >> 1))


def prefetch(steps: Iterator, device: torch.device) -> Iterator:
    """Read each window one ahead and send it to the device without waiting: on a GPU, reading hides behind computing."""
    ahead = None
    for window in steps:
        if device.type == "cuda":
            window = [tuple(t.pin_memory().to(device, non_blocking=True) for t in micro) for micro in window]
        if ahead is not None:
            yield ahead
        ahead = window
    if ahead is not None:
        yield ahead
