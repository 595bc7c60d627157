"""Files of text: UTF-8, or UTF-16 or UTF-32 with a byte-order mark; also compressed by gzip."""

import gzip
import io
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from pathlib import Path
from typing import TextIO

from distributed_training.errors import UserError

# UTF-32 first: its mark for little-endian begins with that of UTF-16.
BYTE_ORDER_MARKS = {
    **dict.fromkeys((BOM_UTF32_LE, BOM_UTF32_BE), "utf-32"),
    **dict.fromkeys((BOM_UTF16_LE, BOM_UTF16_BE), "utf-16"),
}


def is_compressed(file: Path) -> bool:
    """Return whether a file is compressed by gzip."""
    return file.suffix.lower() == ".gz"


def suffix_of(file: Path) -> str:
    """Return the suffix that determines how a file is read, in lower case and without .gz."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix != ".gz"), "")


def encoding_of(start: bytes) -> str:
    """Return the encoding of the byte-order mark at the beginning of a file; else UTF-8."""
    marked = (name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark))
    return next(marked, "utf-8-sig")


def open_text(file: Path, errors: str = "surrogateescape", newline: str | None = None) -> TextIO:
    """Open a file as text: UTF-8, or UTF-16 or UTF-32 with a byte-order mark; also gzip.

    A byte that is not UTF-8 becomes half of a surrogate pair, so that its row can be named.

    Raises:
        UserError: it is UTF-16 or UTF-32 without a mark, whose ASCII letters are valid UTF-8 with
            zero bytes between them.
    """
    binary: gzip.GzipFile | io.BufferedReader
    binary = gzip.open(file) if is_compressed(file) else open(file, "rb")  # noqa: SIM115
    start = binary.peek(4096)[:4096]
    encoding = encoding_of(start)
    if encoding == "utf-8-sig" and b"\0" in start:
        from distributed_training.files.encodings import without_mark  # only for such files

        if problem := without_mark(file, is_compressed(file), start):
            binary.close()
            raise UserError(f"{file} is not UTF-8 text: {problem}")
    return io.TextIOWrapper(binary, encoding, errors, newline)
