"""The rows of a stream of the hub after a resume, as `datasets` reads them from local files."""

import copy
import json
from functools import partial

import pytest

from distributed_training.data import row_hub
from distributed_training.data.row_hub import check_stream_states, rows_of_table
from distributed_training.data.rows import RowOptions
from distributed_training.data.stream_units import UnitReader
from distributed_training.errors import UserError

ROWS = [f"row {number}" for number in range(15)]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A stream of three Parquet files of 5, 1 and 9 rows, in groups of three rows."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("parquet")
    for number, (start, end) in enumerate(((0, 5), (5, 6), (6, 15))):
        rows = pyarrow.table({"text": ROWS[start:end]})
        pyarrow.parquet.write_table(rows, folder / f"{number}.parquet", row_group_size=3)
    files = sorted(map(str, folder.iterdir()))
    read = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    return read.select_columns(["text"])


def units_of(table, place=None):
    """The units of a new process, which continues at a place as a checkpoint has it."""
    rows = partial(rows_of_table, partial(copy.deepcopy, table), "rows", "rows", RowOptions())
    reader = UnitReader(rows, iter, seed=0, num_slots=1, slots=[0], max_bad_rows=0)
    if place:
        reader.continue_at(json.loads(json.dumps(place)), [])
    return reader


def read(reader, number):
    """The texts and places of the next units."""
    units = [reader.next_unit(0) for _ in range(number)]
    return ["".join(unit.row.pieces) for unit in units], [unit.place for unit in units]


def test_a_stream_resumed_twice_gives_the_rows_of_the_uninterrupted_one(table):
    """Over three passes: also at the first row after a resume, and at the ends of files."""
    texts, places = read(units_of(table), 45)
    assert texts == ROWS * 3
    for first in (1, 5, 14, 20):
        again, resumed = read(units_of(table, places[first]), 45 - first)
        assert again == texts[first:]
        for second in (0, 3, 11):
            rest = 45 - first - second
            assert read(units_of(table, resumed[second]), rest)[0] == texts[first + second :]


def test_rows_are_read_again_while_a_stream_is_read(table):
    reader = units_of(table)
    [first, *_], _ = read(reader, 3)
    assert first == next(reader._rows(None))[1].pieces[0] == "row 0"
    assert read(reader, 2)[0] == ROWS[3:5]


def test_a_release_of_datasets_that_loses_rows_is_refused(monkeypatch):
    import datasets

    check_stream_states()
    monkeypatch.setattr(datasets, "__version__", row_hub.WRONG_STATES[-1])
    with pytest.raises(UserError, match=r"datasets 5\.0\.0 does not resume a stream"):
        check_stream_states()
