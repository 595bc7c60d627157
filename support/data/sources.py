"""Open what --dataset names, files or a dataset on the hub, as documents and examples."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from support import progress
from support.cli.paths import is_local_dataset
from support.data.rows import (
    BadRow,
    Document,
    Example,
    columns_of_text,
    contents_of_file,
    has_rows,
    read_row,
    reading,
)
from support.errors import UserError, first_line
from support.files.atomic import read_json, sha256_of, write_text
from support.files.folders import advise_include, count_types, describe_twins, files_of

WIKITEXT = "Salesforce/wikitext"  # its short name on the hub no longer loads with `datasets` 5


@dataclass(frozen=True)
class Notice:
    """A line for the user about what is read, for instance about a file that is not used."""

    text: str


# A bad row is an item too, because bad rows are counted and reported.
Item = Document | Example | BadRow | Notice


@dataclass(frozen=True)
class Source:
    """A corpus before tokenization.

    Attributes:
        name: the name that the user gave.
        fingerprint: a hex digest that changes whenever the text may have changed; cheap to compute.
        splits: "train", and "validation" if the corpus has it: functions that open a stream of
            items.
        files: one line per folder with the number of files of each type.
        notices: lines for the user about files that are not used.
        advice: text to add to the message about a bad row.
    """

    name: str
    fingerprint: str
    splits: dict[str, Callable[[], Iterator[Item]]]
    files: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    advice: str = ""


def open_source(
    dataset: str,
    config: str | None,
    text_column: str | None,
    validation_file: str | None,
    include: str | None = None,
    cache: Path | None = None,
) -> Source:
    """Open the corpus that --dataset names, and the text of --validation_file.

    Args:
        dataset: "pydocs", "wikitext", a file, a folder, or a dataset on the hub.
        config: configuration name of a hub dataset.
        text_column: key or column that holds the text; if None, the keys of each row determine its
            form (see `rows`).
        validation_file: a file or folder that replaces the validation split of the corpus.
        include: which files of a folder are read, see `folders.files_of`.
        cache: a folder for what is known about datasets of the hub from earlier runs.
    Raises:
        UserError: the corpus does not exist or cannot be read, or has no training split or no known
            column.
    """
    if dataset == "pydocs":
        source = _open_pydocs()
    elif is_local_dataset(dataset):
        source = _open_files(dataset, text_column, include)
    else:
        source = _open_hub(dataset, config, text_column, cache)
    if validation_file is None:
        return source
    validation = _open_files(validation_file, text_column, include)
    digest = hashlib.sha256(f"{source.fingerprint}\0{validation.fingerprint}".encode())
    return Source(
        source.name,
        digest.hexdigest(),
        {**source.splits, "validation": validation.splits["train"]},
        source.files + validation.files,
        source.notices + validation.notices,
        source.advice or validation.advice,
    )


def _open_pydocs() -> Source:
    """Open the Python language reference that CPython includes; its text differs by release."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    digest = hashlib.sha256("\0".join(topics[name] for name in names).encode()).hexdigest()
    return Source(
        "pydocs",
        digest,
        {"train": lambda: (Document(f"pydocs, {name}", [topics[name]]) for name in names)},
    )


# -------------------------------------------------------------------------------------------- files


def _signature(file: Path) -> tuple:
    with reading(file):
        status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _open_files(name: str, text_column: str | None, include: str | None) -> Source:
    path = Path(name)
    digest, signatures, first_with, twins = hashlib.sha256((text_column or "").encode()), {}, {}, {}
    for file in (files := files_of(path, name, include)):
        signature = _signature(file)
        with reading(file):
            content = sha256_of(file)
        if content in first_with:
            twins[file] = first_with[content]
            continue
        first_with[content], signatures[file] = file, signature
        digest.update(file.suffix.encode() + bytes.fromhex(content))
    opened = {"train": partial(_items_of_files, signatures, text_column)}
    counts = [f"{name}: {count_types(files)}"] if path.is_dir() else []
    return Source(
        name,
        digest.hexdigest(),
        opened,
        counts,
        describe_twins(twins, "content"),
        advise_include(files),
    )


def _items_of_files(signatures: dict[Path, tuple], text_column: str | None) -> Iterator[Item]:
    """Yield the items of files, each text once.

    Args:
        signatures: the files, each with its `_signature` from when its digest was computed.
        text_column: see `open_source`.
    Raises:
        UserError: a file cannot be read, or has changed since its digest was computed.
    """
    twins = _same_text(list(signatures), text_column)
    yield from map(Notice, describe_twins(twins, "text"))
    for file, signature in signatures.items():
        if file not in twins:
            yield from contents_of_file(file, text_column)
        if _signature(file) != signature:
            raise UserError(
                f"{file} has changed since the run started: start again when it is complete."
            )


def _same_text(files: list[Path], text_column: str | None) -> dict[Path, Path]:
    """Return the files whose text an earlier file of another type has, apart from white space.

    A file is read no further than the size of the largest file of another type, so the comparison
    with a small file is cheap.

    Returns:
        {file that is not used: the earlier file with the same text}.
    """
    sizes: dict[str, float] = {}  # of the largest file of each type
    types = {file: file.suffix.lower() if has_rows(file) else "text" for file in files}
    for file, type_ in types.items():
        # A Parquet file may be compressed, so its size does not limit the size of its text.
        size = float("inf") if type_ == ".parquet" else _signature(file)[0]
        sizes[type_] = max(sizes.get(type_, 0), size)
    if len(sizes) < 2:
        return {}
    first_with, twins = {}, {}
    for file, type_ in types.items():
        longest = max(size for other, size in sizes.items() if other != type_)
        digest = _digest_of_text(file, text_column, longest)
        first = first_with.setdefault(digest, file)
        if digest and types[first] != type_:
            twins[file] = first
    return twins


def _digest_of_text(file: Path, text_column: str | None, longest: float) -> bytes | None:
    """Return the SHA-256 digest of a file's documents without white space.

    Returns:
        The digest; None if the documents are empty or longer than `longest` bytes, or if the file
        cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    try:
        for item in contents_of_file(file, text_column):
            for piece in item.pieces if isinstance(item, Document) else ():
                text = "".join(piece.split()).encode()
                digest.update(text)
                size += len(text)
                if size > longest:
                    return None
    except UserError:  # raised again when the items of the file are read
        return None
    return digest.digest() if size else None


# ------------------------------------------------------------------------------------------ the hub


def load_from_hub(dataset: str, config: str | None, **options):
    """Load the splits of a dataset with `datasets.load_dataset`.

    Args:
        dataset: name on the hub; "wikitext" is WIKITEXT, by default with the configuration
            wikitext-2-raw-v1.
        config: configuration name of the dataset.
        options: further arguments of `datasets.load_dataset`.
    Raises:
        UserError: the dataset cannot be loaded, or has no split named train.
    """
    import datasets

    if not progress.on_terminal():
        datasets.disable_progress_bars()
    if dataset == "wikitext":
        dataset, config = WIKITEXT, config or "wikitext-2-raw-v1"
    try:
        splits = datasets.load_dataset(dataset, config, **options)
    except Exception as error:  # the clients raise a dozen classes; the first line has the reason
        reason = first_line(error, 200)
        raise UserError(
            f"--dataset {dataset} is not a local file or folder, and cannot be loaded from the "
            f"hub: {reason}"
        ) from error
    if "train" not in splits:
        raise UserError(
            f"--dataset {dataset} has no split named train; it has {', '.join(splits)}."
        )
    return splits


def commit_on_hub(dataset: str) -> str | None:
    """Return the commit hash of a dataset on the hub; None if it cannot be determined."""
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(WIKITEXT if dataset == "wikitext" else dataset).sha
    except Exception:  # the clients raise a dozen classes
        return None


def _open_hub(
    dataset: str, config: str | None, text_column: str | None, cache: Path | None
) -> Source:
    """Open a dataset of the hub; without the library `datasets` if an earlier run has opened it.

    The import of the library and its requests take seconds, and a run whose tokens are in the cache
    does not need them.
    """
    key = hashlib.sha256(repr((dataset, config, text_column)).encode()).hexdigest()[:32]
    memo = None if cache is None else cache / f"hub_{key}.json"
    if (known := _read_memo(memo, dataset)) is None:
        source, files = _load_hub(dataset, config, text_column)
        if memo:
            signatures = {str(file): _signature(file) for file in files}
            _write_memo(memo, {**vars(source), "splits": list(source.splits), "files": signatures})
        return source

    def items(name: str) -> Iterator[Item]:
        source, _ = _load_hub(dataset, config, text_column)
        if source.fingerprint != known["fingerprint"]:
            memo.unlink(missing_ok=True)
            raise UserError(f"--dataset {dataset} has changed since the run started: start again.")
        yield from source.splits[name]()

    splits = {name: partial(items, name) for name in known["splits"]}
    return Source(dataset, known["fingerprint"], splits)


def _write_memo(memo: Path, facts: dict) -> None:
    with contextlib.suppress(OSError):  # writing the tokens to the same folder reports it
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_text(memo, json.dumps(facts))


def _read_memo(memo: Path | None, dataset: str) -> dict | None:
    """Return what `_open_hub` wrote in an earlier run; None if the text may have changed since."""
    try:
        known = read_json(memo) if memo else None
        files = [Path(file) for file in known["files"]]
        unchanged = all([*_signature(file)] == known["files"][str(file)] for file in files)
        # The library names the folder of a dataset's files by the commit on the hub.
        commits = {file.parent.name for file in files}
        offline = os.environ.get("HF_HUB_OFFLINE") == "1"
        current = files and unchanged and (offline or commits == {commit_on_hub(dataset)})
        valid = known["splits"] in (["train"], ["train", "validation"]) and known["fingerprint"]
        return known if current and valid else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, UserError):
        return None  # no such file, or no valid one


def _load_hub(
    dataset: str, config: str | None, text_column: str | None
) -> tuple[Source, list[Path]]:
    """Load a dataset of the hub; return it and the local files with its splits."""
    flag = f"--dataset {dataset}"
    corpus = load_from_hub(dataset, config)
    columns = columns_of_text(corpus["train"].column_names, text_column, flag)
    digest = hashlib.sha256(f"{columns}\0{config}\0{dataset == 'wikitext'}".encode())
    splits = {name: corpus[name] for name in ("train", "validation") if name in corpus}
    files = [
        Path(file)
        for split in splits.values()
        for file in sorted(entry["filename"] for entry in split.cache_files)
    ]
    for file in files:
        with reading(file):
            digest.update(bytes.fromhex(sha256_of(file)))

    def items(name: str) -> Iterator[Item]:
        rows = enumerate(splits[name].select_columns(columns), 1)
        contents = (
            read_row(row, f"{flag}, {name}, row {number}", text_column) for number, row in rows
        )
        with reading(flag):
            yield from join_articles(contents) if dataset == "wikitext" else contents

    opened = {name: partial(items, name) for name in splits}
    return Source(dataset, digest.hexdigest(), opened), files


def begins_article(line: str) -> bool:
    """Return whether a line of WikiText is the title of an article.

    A title is ` = Title = `; the heading of a section is ` = = Section = = `.
    """
    return not line.startswith(" = = ") and re.fullmatch(r" = [^=].* = \n?", line) is not None


def join_articles(lines: Iterable[Item]) -> Iterator[Item]:
    """Join the rows of WikiText, which are lines, to one document per article."""
    place, article = "", []
    for line in lines:
        if isinstance(line, BadRow):
            yield line
            continue
        if begins_article(line.pieces[0]) and article:
            yield Document(place, article)
            place, article = line.where, []
        article += line.pieces
    if article:
        yield Document(place, article)
