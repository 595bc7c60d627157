"""JSON files of the hub, as rows that have their text.

`datasets` converts the values of a JSON file to one type per column. Release 5 parses every string
that is valid JSON if a column has several types: the answer "007" becomes 7, and "null" is lost.
Other strings become times, and rows with the keys of an agent's trace need the package teich.
`JsonRows` stores each row as JSON instead, and `value_of` parses it as that of a local file.
Downloads, splits, the cache, streams and their states are those of `datasets`.
"""

import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import TextIO

import datasets
from datasets import streaming
from datasets.packaged_modules.json.json import Json
from pyarrow import Table

from distributed_training.data.file_types.json_lines import parse_json
from distributed_training.data.rows import BadRow
from distributed_training.data.text_files import encoding_of
from distributed_training.errors import UserError

ROW_COLUMN = "row_as_json"
BATCH_ROWS = 1000
READ_CHARACTERS = 1 << 20


class JsonRows(Json):
    """A builder of JSON files whose tables have one column, with each row as JSON in UTF-8."""

    def _info(self) -> datasets.DatasetInfo:
        columns = {ROW_COLUMN: datasets.Value("binary")}
        return datasets.DatasetInfo(features=datasets.Features(columns))

    def _generate_tables(
        self,
        files_iterables: Iterable[Iterable[str]] = (),
        files: Iterable[Iterable[str]] = (),  # its name in earlier releases of `datasets`
        **unused: object,
    ) -> Iterator[tuple[tuple[int, int], Table]]:
        for number, file in enumerate(chain.from_iterable(files or files_iterables)):
            rows = self._rows_of(file)
            for batch, first in enumerate(rows):
                texts = [first, *islice(rows, BATCH_ROWS - 1)]
                yield (number, batch), Table.from_pydict({ROW_COLUMN: texts})

    def _rows_of(self, file: str) -> Iterator[bytes]:
        # `datasets` replaces `open` in this module with a function that also opens remote files.
        with open(file, "rb") as raw:
            binary = io.BufferedReader(raw)  # type: ignore[arg-type]
            encoding = encoding_of(binary.peek(4)[:4])
            if self.config.encoding != "utf-8":
                encoding = self.config.encoding
            with io.TextIOWrapper(binary, encoding, "surrogateescape") as stream:
                for text in _texts_of(stream, self.config.field):
                    yield text.encode(errors="surrogateescape")


def rows_builder(builder: datasets.DatasetBuilder, cache: str) -> datasets.DatasetBuilder:
    """Return the builder of a dataset of the hub, as a JsonRows if its files are JSON.

    Args:
        cache: the folder of the rows. It must not have the tables that other programs read.
    Raises:
        UserError: the dataset is in the cache only, with strings that were parsed.
    """
    if builder.name != "json":
        if builder.info.builder_name == "json" and _has_json(builder.info.features):
            raise UserError(
                f"--dataset {builder.repo_id or builder.dataset_name} cannot be used from the "
                "cache: another program has loaded its JSON files, and `datasets` has parsed "
                "strings in them. Run --prefetch with the same flags where there is a network."
            )
        return builder

    class Configured(JsonRows):
        BUILDER_CONFIGS = [builder.config]  # noqa: RUF012 (as `datasets` defines it)

    with _without_lock():
        return Configured(
            cache_dir=cache,
            dataset_name=builder.dataset_name,
            config_name=builder.config.name,
            hash=builder.hash,
            base_path=builder.base_path,
            repo_id=builder.repo_id,
            token=builder.token,
            storage_options=builder.storage_options,
        )


@contextmanager
def _without_lock() -> Iterator[None]:
    """Create a builder without a lock file next to this package, which may be read-only.

    `datasets` before 4 takes a class of another package for a script that it has downloaded.
    """
    own = getattr(streaming, "lock_importable_file", None)
    if own:
        streaming.lock_importable_file = nullcontext
    try:
        yield
    finally:
        if own:
            streaming.lock_importable_file = own


def _has_json(feature: object) -> bool:
    """Return whether a type of a table has a value that was parsed, however deep."""
    if isinstance(feature, dict):
        return any(map(_has_json, feature.values()))
    if isinstance(feature, list):
        return any(map(_has_json, feature))
    inner = getattr(feature, "feature", None)
    return type(feature).__name__ == "Json" or (inner is not None and _has_json(inner))


def value_of(row: dict[str, object], where: str) -> object:
    """Parse a row of JsonRows; a BadRow if it is not valid JSON."""
    text = row[ROW_COLUMN]
    assert isinstance(text, bytes)
    return parse_json(text.decode(errors="surrogateescape"), where)


def _texts_of(stream: TextIO, field: str | None) -> Iterator[str]:
    """Yield the JSON of each row: of the lines, or of the entries of a list.

    Args:
        field: the key of the list, if the file is an object.
    """
    if field is None and isinstance(parse_json(stream.readline(), ""), dict | str):
        stream.seek(0)
        yield from filter(str.strip, stream)
        return
    stream.seek(0)
    # Not stream.read(): a remote file of huggingface_hub 0.30 that is read to its end stays at its
    # beginning, so that the buffer would read it again and again.
    rows = parse_json("".join(iter(partial(stream.read, READ_CHARACTERS), "")), "")
    if isinstance(rows, BadRow):  # lines, of which the first one is damaged
        stream.seek(0)
        yield from filter(str.strip, stream)
        return
    if field is not None:
        rows = rows.get(field, []) if isinstance(rows, dict) else []
    yield from map(json.dumps, rows if isinstance(rows, list) else [rows])
