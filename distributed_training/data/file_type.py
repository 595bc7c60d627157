"""What every type of file answers: its suffixes, and its rows."""

from collections.abc import Iterator
from pathlib import Path

from distributed_training.data.rows import RowOptions

# The value of a row, or a BadRow; and its place, for messages.
RawRows = Iterator[tuple[object, str]]


class FileType:
    """A type of file that has rows.

    A row is a text, or a dictionary, whose keys determine what it becomes (`row_formats`). It may
    be anything else as well: `rows.read_row` makes a BadRow of it.
    """

    suffixes: tuple[str, ...]  # in lower case; .gz after them is no part of it
    rows: str  # what one row is, for docs/DATA.md
    is_text = True  # False for a format of bytes, which has no encoding that could be wrong

    def read(self, file: Path, options: RowOptions) -> RawRows:
        """Yield the rows of a file. It may be larger than the memory.

        Raises:
            UserError: during iteration: the file cannot be used. OSError, ValueError and those of
                zlib and csv become one, which names the file.
        """
        raise NotImplementedError
