"""Tables of text, with commas or tabs between the columns."""

import contextlib
import csv
from pathlib import Path

from distributed_training.data import refused_rows
from distributed_training.data.file_type import FileType, RawRows
from distributed_training.data.rows import BadRow, RowOptions, format_of, formats_of
from distributed_training.data.text_files import open_text, suffix_of
from distributed_training.errors import UserError
from distributed_training.files.user_files import shown

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "'|'"}


class CsvFile(FileType):
    """The first line has the names of the columns."""

    suffixes = (".csv", ".tsv")
    rows = "a line, with commas (`.csv`) or tabs between the columns that the first line names"

    def read(self, file: Path, options: RowOptions) -> RawRows:
        csv.field_size_limit(1 << 30)  # the default, 128 kB, is less than a long document
        delimiter = "\t" if suffix_of(file) == ".tsv" else ","
        with open_text(file, newline="") as stream:
            _check_delimiter(file, stream.readline(), delimiter, options)
            stream.seek(0)
            lines = csv.reader(stream, strict=True, delimiter=delimiter)
            names = next(lines, [])
            _check_names(file, names)
            for cells in lines:
                place = f"{file}, line {lines.line_num}"
                if cells and (len(names) == 1 or any(map(str.strip, cells))):  # else an empty line
                    row = _row_of_cells(names, cells, options)
                    problem = "it has more or fewer cells than the first line"
                    yield row or BadRow(f"{place}: {problem}: quote texts with separators."), place


def _check_names(file: Path, names: list[str]) -> None:
    """Raise a UserError if two columns have the same name."""
    if len({*filter(None, names)}) < len([*filter(None, names)]):
        raise UserError(f"{file} has two columns of one name: {', '.join(map(shown, names))}.")


def _check_delimiter(file: Path, header: str, expected: str, options: RowOptions) -> None:
    """Raise a UserError if the first line is one column, and several with another delimiter."""
    columns = {each: next(csv.reader([header], delimiter=each), []) for each in DELIMITERS}
    with contextlib.suppress(ValueError):
        format_of(columns[expected], options)
        return
    found = max(columns, key=lambda each: len(columns[each]))
    if len(columns[found]) > len(columns[expected]):
        raise UserError(
            f"{file} has {DELIMITERS[found]} between its columns, and a {suffix_of(file)} file "
            f"must have {DELIMITERS[expected]}: convert it, for example with pandas: "
            f"read_csv(FILE, sep={found!r}).to_csv(NEW, sep={expected!r}, index=False)."
        )


def _row_of_cells(
    names: list[str], cells: list[str], options: RowOptions
) -> dict[str, object] | None:
    """Return a row of a CSV file; None if it has more or fewer cells than the first line.

    Other programs end some lines with empty cells.
    """
    missing = names[len(cells) :]
    if any(map(str.strip, [*missing, *cells[len(names) :]])):
        return None
    row = dict(zip(names, [*cells, *[""] * len(missing)], strict=False))
    fits = [read.values() for _, read in formats_of(row, options)]
    if len(fits) > 1 and not any(row.get(column) for column in fits[0]):
        row = {name: cell for name, cell in row.items() if cell}  # as nulls in other tables
    return refused_rows.typed(row, dict(options.columns).values())


FILE_TYPE = CsvFile()
