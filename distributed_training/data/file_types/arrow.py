"""The files that `Dataset.save_to_disk` writes."""

from pathlib import Path

from distributed_training.data.file_type import FileType, RawRows
from distributed_training.data.rows import RowOptions, columns_to_read, row_of_table


class Arrow(FileType):
    """A table of Arrow."""

    suffixes = (".arrow",)
    rows = "a row of the table, as `Dataset.save_to_disk` of `datasets` writes it"
    is_text = False

    def read(self, file: Path, options: RowOptions) -> RawRows:
        import datasets

        table = datasets.Dataset.from_file(str(file))
        columns = columns_to_read(table.column_names, options, str(file))
        for number, row in enumerate(table.select_columns(columns), 1):
            yield row_of_table(row), f"{file}, row {number}"


FILE_TYPE = Arrow()
