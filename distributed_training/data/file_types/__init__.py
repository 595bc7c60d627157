"""The types of files that have rows: each module here is one.

To add one, write a module with a subclass of FileType, and an object of it, FILE_TYPE.

json_lines  .jsonl, .ndjson
json_file   .json
csv_file    .csv, .tsv
parquet     .parquet
arrow       .arrow
"""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from distributed_training.data.file_type import FileType
from distributed_training.data.text_files import suffix_of

_MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
# The type of each suffix.
FILE_TYPES: dict[str, FileType] = {
    suffix: module.FILE_TYPE for module in _MODULES for suffix in module.FILE_TYPE.suffixes
}


def type_of(file: Path) -> FileType | None:
    """Return the type of a file; None for a document."""
    return FILE_TYPES.get(suffix_of(file))
