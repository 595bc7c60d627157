"""Lists in JSON."""

from pathlib import Path

from distributed_training.data.file_type import FileType, RawRows
from distributed_training.data.file_types.json_lines import lines_of, parse_json
from distributed_training.data.rows import RowOptions
from distributed_training.data.text_files import open_text


class JsonFile(FileType):
    """A list, or JSON lines, which `datasets` writes as .json."""

    suffixes = (".json",)
    rows = "an entry of a list; or a line, as in `.jsonl`"

    def read(self, file: Path, options: RowOptions) -> RawRows:
        with open_text(file) as stream:
            if isinstance(parse_json(stream.readline(), ""), dict):
                yield from lines_of(file)
                return
            stream.seek(0)
            rows = parse_json(stream.read(), str(file))
        for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
            yield row, f"{file}, entry {number}"


FILE_TYPE = JsonFile()
