"""The rows of datasets on the Hugging Face hub, read with the `datasets` library."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from distributed_training import console
from distributed_training.cli.hub import JSON_ROWS
from distributed_training.data.hub_json import ROW_COLUMN, rows_builder, value_of
from distributed_training.data.row_files import reading
from distributed_training.data.rows import (
    BadRow,
    PlacedRows,
    Position,
    Row,
    RowOptions,
    Rows,
    Source,
    columns_of_table,
    columns_to_read,
    read_row,
    row_of_table,
)
from distributed_training.errors import UserError, refused_as
from distributed_training.files.atomic import digest_of_json
from distributed_training.settings.data import DataSettings

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder, IterableDataset

WIKITEXT = "Salesforce/wikitext"  # its short name on the hub no longer loads with `datasets` 5
# Releases of `datasets` in which a stream does not continue where it was: up to 3.5.1 it leaves out
# rows of Parquet files, and 5.0.0 saves a wrong state after it has loaded one. Measured with each
# release from 3.0.0 to 5.2.0; requirements/core.txt excludes them as well.
WRONG_STATES = ("3.4.0", "3.4.1", "3.5.0", "3.5.1", "5.0.0")


def loading(name: str) -> contextlib.AbstractContextManager[None]:
    """Convert errors of the `datasets` library in this context to a UserError."""
    problem = f"--dataset {name} (its --train_split, --eval_split) is no local file, and cannot be "
    return refused_as(f"{problem}loaded from the hub", longest=200)


def builder_of(name: str, config: str | None, revision: str | None) -> DatasetBuilder:
    """Return the builder of a dataset on the hub; its hash is the commit.

    Args:
        config: --dataset_config.
        revision: a branch, a tag or a commit; None: main.
    """
    import datasets

    if not console.on_terminal():
        datasets.disable_progress_bars()
    if name == "wikitext":
        name, config = WIKITEXT, config or "wikitext-2-raw-v1"
    rows_cache = os.path.join(
        datasets.config.HF_DATASETS_CACHE, JSON_ROWS, name.replace("/", "___")
    )
    is_cached = os.environ.get("HF_HUB_OFFLINE") == "1" and os.path.isdir(rows_cache)
    where = rows_cache if is_cached else None
    with loading(name):
        builder = datasets.load_dataset_builder(name, config, revision=revision, cache_dir=where)
        return rows_builder(builder, rows_cache)


def check_stream_states() -> None:
    """Raise a UserError if this release of `datasets` cannot continue a stream."""
    import datasets

    if datasets.__version__ in WRONG_STATES:
        raise UserError(
            f"--streaming: datasets {datasets.__version__} does not resume a stream of the hub "
            "where it was: install another release, for example pip install -U datasets."
        )


def open_hub(name: str, data: DataSettings, options: RowOptions, needs_train: bool) -> Source:
    """Download a dataset of the hub, unless it is in the cache, and open its splits.

    Args:
        needs_train: open the training split also if nothing of it is held out.
    """
    revision, offline = data.dataset_revision, os.environ.get("HF_HUB_OFFLINE") == "1"
    builder = builder_of(name, data.dataset_config, revision)
    # Offline, the library loads the newest commit that is in its cache.
    if revision and offline and not str(builder.hash).startswith(revision):
        raise UserError(
            f"--dataset_revision {revision} of --dataset {name} is not in the cache: run "
            "--prefetch with the same flags where there is a network, or name a commit."
        )
    with loading(name):
        builder.download_and_prepare()
        wanted = {"train": data.train_split or "train"}
        # A split that is trained on is not evaluated on, unless it is named.
        unused = not re.search(r"\bvalidation\b", wanted["train"])
        if data.eval_split or ("validation" in builder.info.splits and unused):
            wanted["validation"] = data.eval_split or "validation"
        if not needs_train and "validation" in wanted and data.held_out_share is None:
            del wanted["train"]
        tables = {role: builder.as_dataset(split=split) for role, split in wanted.items()}
    flag = f"--dataset {name}"
    names = next(iter(tables.values())).column_names
    # The rows of JSON files have their keys each; no table says which.
    is_json = names == [ROW_COLUMN]
    columns = names if is_json else columns_of_table(names, options, flag)
    splits: dict[str, Rows] = {}
    for role, table in tables.items():
        selected = names if is_json else columns_to_read(table.column_names, options, flag)
        select = partial(table.select_columns, selected)
        splits[role] = partial(rows_of_table, select, name, f"{flag}, {role}", options)
    commits = [(role, table._fingerprint) for role, table in tables.items()]
    return Source(
        digest_of_json([columns, options.for_digest(), name == "wikitext", commits]), splits
    )


def rows_of_table(
    open_table: Callable[[], Dataset | IterableDataset],
    name: str,
    where: str,
    options: RowOptions,
    position: Position | None,
) -> PlacedRows:
    """Yield the rows of a table; those of WikiText are articles.

    Args:
        open_table: called for each pass, because a stream that has loaded a state begins every
            iteration there.
    """

    def rows() -> PlacedRows:
        first = position["row"] if position else 0
        # Earlier versions saved the end of the pass before as the beginning of a pass.
        state = position["state"] if position and first else None
        table = open_table()
        if state:
            table.load_state_dict(state)
        is_stream, iterator = hasattr(table, "state_dict"), iter(table)
        for number in count(first):
            place: Position = {"row": number, "state": state}
            if (row := next(iterator, None)) is None:
                return
            line = f"{where}, row {number + 1}"
            value = value_of(row, line) if ROW_COLUMN in row else row_of_table(row)
            yield place, read_row(value, line, options)
            state = table.state_dict() if is_stream else None

    with reading(where):
        yield from join_articles(rows()) if name == "wikitext" else rows()


def join_articles(lines: PlacedRows) -> PlacedRows:
    """Join the rows of WikiText, which are lines, to one document per article.

    A line with the title of an article is ` = Title = `; that of a section is ` = = Title = = `.
    """
    begin: Position = {}
    where, article = "", list[str]()
    for position, line in lines:
        if isinstance(line, BadRow):
            yield position, line
            continue
        text = "".join(line.pieces)
        if article and re.fullmatch(r" = [^=].* = \n?", text):
            yield begin, Row(where, pieces=article)
            article = []
        if not article:
            begin, where = position, line.where
        article.append(text)
    if article:
        yield begin, Row(where, pieces=article)
