"""JSON lines."""

import json
from pathlib import Path

from distributed_training.data.file_type import FileType, RawRows
from distributed_training.data.rows import BadRow, RowOptions
from distributed_training.data.text_files import open_text
from distributed_training.errors import first_line


def parse_json(text: str, place: str) -> object:
    """Return the value of a line, or of a whole file; a BadRow if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = first_line(error, 200).replace("line 1 column", "column")
        return BadRow(f"{place}: not valid JSON ({reason}).")


def lines_of(file: Path) -> RawRows:
    """Yield the value of each line that is not empty."""
    with open_text(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                place = f"{file}, line {number}"
                yield parse_json(line, place), place


class JsonLines(FileType):
    """One value of JSON in each line."""

    suffixes = (".jsonl", ".ndjson")
    rows = "a line, in JSON"

    def read(self, file: Path, options: RowOptions) -> RawRows:
        return lines_of(file)


FILE_TYPE = JsonLines()
