"""Parquet."""

from itertools import count
from pathlib import Path

from distributed_training.data.file_type import FileType, RawRows
from distributed_training.data.rows import RowOptions, columns_to_read, row_of_table


class Parquet(FileType):
    """A table of Parquet, of which only the columns that are read are loaded."""

    suffixes = (".parquet",)
    rows = "a row of the table"
    is_text = False

    def read(self, file: Path, options: RowOptions) -> RawRows:
        import pyarrow.parquet

        table = pyarrow.parquet.ParquetFile(file)
        columns, numbers = columns_to_read(table.schema_arrow.names, options, str(file)), count(1)
        for batch in table.iter_batches(columns=columns, batch_size=1024):
            for row in batch.to_pylist():
                yield row_of_table(row), f"{file}, row {next(numbers)}"


FILE_TYPE = Parquet()
