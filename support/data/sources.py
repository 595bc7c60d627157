"""Open what --dataset names, files or a dataset on the hub, as documents and examples."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from support import progress
from support.cli.paths import is_local_dataset
from support.data.formats import BadRow, Document, Example, RowOptions, columns_of_table, read_row
from support.data.rows import contents_of_file, has_rows, reading
from support.errors import UserError, refused_as
from support.files.atomic import read_json, sha256_of, write_text
from support.files.folders import advise_include, count_types, describe_twins, files_of
from support.files.hub_cache import cache_folder

WIKITEXT = "Salesforce/wikitext"  # its short name on the hub no longer loads with `datasets` 5


@dataclass(frozen=True)
class Notice:
    """A line for the user about what is read, for instance about a file that is not used."""

    text: str


# A bad row is an item too, because bad rows are counted and reported.
Item = Document | Example | BadRow | Notice


@dataclass(frozen=True)
class Source:
    """A corpus before tokenization."""

    # A hex digest that changes whenever the text may have changed; cheap to compute.
    fingerprint: str
    # "train", and "validation" if the corpus has it: functions that open a stream of items.
    splits: dict[str, Callable[[], Iterator[Item]]]
    # One line per folder with the number of files of each type.
    files: list[str] = field(default_factory=list)
    # Lines for the user about files that are not used.
    notices: list[str] = field(default_factory=list)
    advice: str = ""  # text to add to the message about a bad row


def open_source(dataset: str, args, rows: RowOptions) -> Source:
    """Open a corpus, and the text of --validation_file.

    Args:
        dataset: "pydocs", "wikitext", a file, a folder, or a dataset on the hub.
        args: --validation_file, --include; for the hub --dataset_config, --dataset_revision,
            --train_split, --eval_split, --cache_dir.
    Raises:
        UserError: the corpus does not exist or cannot be read, or has no training split or no known
            column.
    """
    if dataset == "pydocs":
        source = _open_pydocs()
    elif is_local_dataset(dataset):
        source = _open_files(dataset, args.include, rows)
    else:
        source = _open_hub(dataset, args, rows)
    if args.validation_file is None:
        return source
    validation = _open_files(args.validation_file, args.include, rows)
    digest = hashlib.sha256(f"{source.fingerprint}\0{validation.fingerprint}".encode())
    return replace(
        source,
        fingerprint=digest.hexdigest(),
        splits={**source.splits, "validation": validation.splits["train"]},
        files=source.files + validation.files,
        notices=source.notices + validation.notices,
        advice=source.advice or validation.advice,
    )


def _open_pydocs() -> Source:
    """Open the Python language reference that CPython includes; its text differs by release."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    digest = hashlib.sha256("\0".join(topics[name] for name in names).encode()).hexdigest()
    return Source(
        digest, {"train": lambda: (Document(f"pydocs, {name}", [topics[name]]) for name in names)}
    )


# -------------------------------------------------------------------------------------------- files


def _signature(file: Path) -> tuple:
    with reading(file):
        status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _open_files(name: str, include: str | None, rows: RowOptions) -> Source:
    path = Path(name)
    digest = hashlib.sha256(repr(rows).encode())
    signatures, first_with, twins = {}, {}, {}
    for file in (files := files_of(path, name, include)):
        signature = _signature(file)
        with reading(file):
            content = sha256_of(file)
        if content in first_with:
            twins[file] = first_with[content]
            continue
        first_with[content], signatures[file] = file, signature
        digest.update(file.suffix.encode() + bytes.fromhex(content))
    opened = {"train": partial(_items_of_files, signatures, rows)}
    counts = [f"{name}: {count_types(files)}"] if path.is_dir() else []
    return Source(
        digest.hexdigest(), opened, counts, describe_twins(twins, "content"), advise_include(files)
    )


def _items_of_files(signatures: dict[Path, tuple], options: RowOptions) -> Iterator[Item]:
    """Yield the items of files, each text once.

    Args:
        signatures: the files, each with its `_signature` from when its digest was computed.
    Raises:
        UserError: a file cannot be read, or has changed since its digest was computed.
    """
    twins = _same_text(list(signatures), options)
    yield from map(Notice, describe_twins(twins, "text"))
    for file, signature in signatures.items():
        if file not in twins:
            yield from contents_of_file(file, options)
        if _signature(file) != signature:
            raise UserError(
                f"{file} has changed since the run started: start again when it is complete."
            )


def _same_text(files: list[Path], options: RowOptions) -> dict[Path, Path]:
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
        digest = _digest_of_text(file, options, longest)
        first = first_with.setdefault(digest, file)
        if digest and types[first] != type_:
            twins[file] = first
    return twins


def _digest_of_text(file: Path, options: RowOptions, longest: float) -> bytes | None:
    """Return the SHA-256 digest of a file's documents without white space.

    Returns:
        The digest; None if the documents are empty or longer than `longest` bytes, or if the file
        cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    try:
        for item in contents_of_file(file, options):
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


def _loading(dataset: str) -> contextlib.AbstractContextManager[None]:
    problem = (
        f"--dataset {dataset} is not a local file or folder, and cannot be loaded from the hub"
    )
    return refused_as(problem, longest=200)


def _builder_of(dataset: str, config: str | None, revision: str | None):
    """Return the `datasets.DatasetBuilder` of a dataset on the hub.

    "wikitext" is WIKITEXT, by default with the configuration wikitext-2-raw-v1.
    """
    import datasets

    if not progress.on_terminal():
        datasets.disable_progress_bars()
    if dataset == "wikitext":
        dataset, config = WIKITEXT, config or "wikitext-2-raw-v1"
    return datasets.load_dataset_builder(dataset, config, revision=revision)


def load_from_hub(dataset: str, args) -> dict[str, Any]:
    """Download a dataset of the hub, unless it is in the cache.

    Returns:
        {"train", and "validation" if the dataset has a split for it: datasets.Dataset}.
    Raises:
        UserError: the dataset cannot be loaded, or has no such split.
    """
    with _loading(dataset):
        builder = _builder_of(dataset, args.dataset_config, args.dataset_revision)
        builder.download_and_prepare()
        wanted = {"train": args.train_split or "train"}
        # A split that is trained on is not evaluated on, unless it is named.
        unused = not re.search(r"\bvalidation\b", wanted["train"])
        if args.eval_split or ("validation" in builder.info.splits and unused):
            wanted["validation"] = args.eval_split or "validation"
        for flag, name in zip(("train_split", "eval_split"), wanted.values(), strict=False):
            for part in name.split("+"):
                _check_split(dataset, flag, part.partition("[")[0], builder.info.splits)
        return {role: builder.as_dataset(split=name) for role, name in wanted.items()}


def stream_from_hub(args, commit: str | None):
    """Return --train_split of the dataset on the hub as a datasets.IterableDataset.

    Raises:
        UserError: the dataset cannot be loaded, or has no such split.
    """
    split = args.train_split or "train"
    with _loading(args.dataset):
        splits = _builder_of(args.dataset, args.dataset_config, commit).as_streaming_dataset()
        _check_split(args.dataset, "train_split", split, splits)
        return splits[split]


def _check_split(dataset: str, flag: str, split: str, known: Iterable[str]) -> None:
    """Check that a dataset has a split."""
    if split not in known:
        raise UserError(
            f"--dataset {dataset} has no split named {split}; it has {', '.join(known)}: "
            f"choose one with --{flag}."
        )


def commit_on_hub(dataset: str, revision: str | None) -> str | None:
    """Return the commit hash of a dataset on the hub; None if it cannot be determined."""
    from huggingface_hub import HfApi

    name = WIKITEXT if dataset == "wikitext" else dataset
    try:
        return HfApi().dataset_info(name, revision=revision).sha
    except Exception:  # the clients raise a dozen classes
        return None


def _open_hub(dataset: str, args, rows: RowOptions) -> Source:
    """Open a dataset of the hub; without the library `datasets` if an earlier run has opened it.

    The import of the library and its requests take seconds, and a run whose tokens are in the cache
    does not need them.
    """
    selected = (args.dataset_config, args.dataset_revision, args.train_split, args.eval_split)
    key = hashlib.sha256(repr((dataset, rows, *selected)).encode()).hexdigest()[:32]
    memo = cache_folder(args.cache_dir) / f"hub_{key}.json"
    if (known := _read_memo(memo, dataset, args.dataset_revision)) is None:
        source, files = _load_hub(dataset, args, rows)
        signatures = {str(file): _signature(file) for file in files}
        facts = {**vars(source), "splits": list(source.splits), "files": signatures}
        with contextlib.suppress(OSError):  # writing the tokens to the same folder reports it
            memo.parent.mkdir(parents=True, exist_ok=True)
            write_text(memo, json.dumps(facts))
        return source

    def items(name: str) -> Iterator[Item]:
        source, _ = _load_hub(dataset, args, rows)
        if source.fingerprint != known["fingerprint"]:
            memo.unlink(missing_ok=True)
            raise UserError(f"--dataset {dataset} has changed since the run started: start again.")
        yield from source.splits[name]()

    splits = {name: partial(items, name) for name in known["splits"]}
    return Source(known["fingerprint"], splits)


def _read_memo(memo: Path, dataset: str, revision: str | None) -> dict | None:
    """Return what `_open_hub` wrote in an earlier run; None if the text may have changed since."""
    try:
        known = read_json(memo)
        files = [Path(file) for file in known["files"]]
        unchanged = all([*_signature(file)] == known["files"][str(file)] for file in files)
        offline = os.environ.get("HF_HUB_OFFLINE") == "1"
        newest = offline or commits_of(files) == {commit_on_hub(dataset, revision)}
        current = files and unchanged and newest
        valid = known["splits"] in (["train"], ["train", "validation"]) and known["fingerprint"]
        return known if current and valid else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, UserError):
        return None  # no such file, or no valid one


def commits_of(files: list[Path]) -> set[str]:
    """Return the commits on the hub of a dataset's files: the library's names of their folders."""
    return {file.parent.name for file in files}


def _check_revision(dataset: str, revision: str, files: list[Path]) -> None:
    """Check that the files of a dataset are of --dataset_revision if the hub cannot tell.

    Offline, the library loads the newest revision that is in its cache.
    """
    offline = os.environ.get("HF_HUB_OFFLINE") == "1"
    if offline and not all(commit.startswith(revision) for commit in commits_of(files)):
        raise UserError(
            f"--dataset_revision {revision} of --dataset {dataset} cannot be told from others in "
            "the cache without the hub: run --prefetch with the same flags where there is a "
            "network, or name a commit."
        )


def _load_hub(dataset: str, args, rows: RowOptions) -> tuple[Source, list[Path]]:
    """Load a dataset of the hub; return it and the local files with its splits."""
    flag = f"--dataset {dataset}"
    splits = load_from_hub(dataset, args)
    columns = columns_of_table(splits["train"].column_names, rows, flag)
    parts = (args.train_split, args.eval_split)
    settings = (columns, args.dataset_config, rows, *parts, dataset == "wikitext")
    digest = hashlib.sha256(repr(settings).encode())
    files = [
        Path(file)
        for split in splits.values()
        for file in sorted(entry["filename"] for entry in split.cache_files)
    ]
    if args.dataset_revision:
        _check_revision(dataset, args.dataset_revision, files)
    for file in files:
        with reading(file):
            digest.update(bytes.fromhex(sha256_of(file)))

    def items(name: str) -> Iterator[Item]:
        table = enumerate(splits[name].select_columns(columns), 1)
        contents = (read_row(row, f"{flag}, {name}, row {n}", rows) for n, row in table)
        with reading(flag):
            yield from join_articles(contents) if dataset == "wikitext" else contents

    opened = {name: partial(items, name) for name in splits}
    return Source(digest.hexdigest(), opened), files


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
