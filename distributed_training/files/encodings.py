"""Files of text that are not UTF-8: which encoding they may have, and how to convert them.

Imported only where a file cannot be read. A wrong encoding turns letters into other letters, which
would be trained on, so none is named unless the bytes fit it.
"""

from __future__ import annotations

import codecs
import functools
import gzip
import io
import re
import shlex
import unicodedata
from pathlib import Path

CHUNK, SAMPLE = 1 << 20, 1 << 14
PRINTABLE = frozenset(range(0x20, 0x7F))  # bytes of ASCII
WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
NOT_IN_TEXT = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")
# What text of Western Europe in CP1252 does not have. Other alphabets (CP1251, KOI8-R, GB18030),
# read as CP1252, are runs of accents; Polish and DOS have signs in words, and Macs capitals.
NOT_WESTERN = re.compile(
    r"[ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓÔÕÖØÙÚÛÜÝÞß-öø-ÿŠŽŒšžœŸ]{3}"
    r"|[^\x00-\x7f–—…•·]{4}"
    r"|ƒ"
    r"|[a-z][À-ÖØ-ÞŠŒŽŸ]"
    r"|[A-Za-z][‚„ˆ¤]"
    r"|[A-Za-z][¡-¦¨-¬®¯±-¶¸¹¼-¿×÷€†‡‰‹›“”˜™•][A-Za-z]"
)


@functools.lru_cache(maxsize=1)
def conversion(file: Path, compressed: bool) -> str:
    """Return what is wrong with a text file, and what to do about it; "" if it is UTF-8.

    Args:
        compressed: by gzip.
    """
    with gzip.open(file) if compressed else open(file, "rb") as stream:
        line, sample = _first_damage(stream)
    if not sample:
        return ""
    text = sample.decode("utf-8", "surrogateescape")
    damaged = len(re.findall("[\udc80-\udcff]", text))
    if problem := without_mark(file, compressed, sample):
        return problem
    command = functools.partial(_command, file, compressed)
    if sum(char > "\x7f" for char in text) - damaged > damaged:
        return (
            f"most of the file is UTF-8, and line {line} is not: correct this line, or remove such "
            f"bytes ({command('utf-8', ' -c')})."
        )
    if NOT_IN_TEXT.search(sample):
        return "it is no text: unpack an archive, or leave the file out with --include."
    if _is_western(sample):
        return (
            "its bytes fit CP1252, in which Windows writes Western European languages. If that is "
            f"its language, convert it ({command('cp1252')})."
        )
    return (
        "convert it from the encoding in which it was written, which its bytes do not show "
        f"({command('encoding')}), or leave the file out with --include."
    )


def without_mark(file: Path, compressed: bool, start: bytes) -> str:
    """Do what `conversion` does if the file is UTF-16 or UTF-32 without a mark; else return "".

    Its letters may be valid UTF-8, with zero bytes between them.
    """
    encoding = _wide_encoding(start[:SAMPLE])
    if encoding is None:
        return ""
    command = _command(file, compressed, encoding)
    return f"it is {encoding.upper()} without a byte-order mark: {command} converts it."


def _wide_encoding(start: bytes) -> str | None:
    """Return the encoding of the beginning of a file that is UTF-16 or UTF-32 without a mark.

    Read in the right one, all characters exist, and a part of them is ASCII: spaces and line ends.
    ASCII text, read as UTF-16, consists of characters that are pairs of letters.
    """
    found, most = None, start.count(0) and len(start) // 500
    for encoding in WIDE:
        width = int(encoding[4:6]) // 8
        try:
            decoder = codecs.getincrementaldecoder(encoding)()
            text = decoder.decode(start[: len(start) // width * width])
        except UnicodeDecodeError:
            continue
        pairs = sum(PRINTABLE.issuperset(divmod(ord(char), 256)) for char in text)
        if pairs > 0.75 * len(text) or any(map(_is_unlikely, set(text))):
            continue
        if (plain := sum(char.isascii() for char in text)) > most:
            found, most = encoding, plain
    return found


def _is_unlikely(char: str) -> bool:
    """Return whether text hardly has a character: it is not assigned, or controls a device."""
    control = char not in "\t\n\f\r\x1b" and unicodedata.category(char) == "Cc"
    return control or unicodedata.category(char) in ("Cn", "Co", "Cs")


def _first_damage(stream: gzip.GzipFile | io.BufferedReader) -> tuple[int, bytes]:
    """Return the line of the first bytes that are not UTF-8, and the text around it; or b""."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    previous = b""
    while True:
        chunk = stream.read(CHUNK)
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            return line + error.object[: error.start].count(b"\n"), chunk or previous
        if not chunk:
            return line, b""
        line, previous = line + chunk.count(b"\n"), chunk


def _is_western(sample: bytes) -> bool:
    """Return whether bytes may be text of a Western European language in CP1252, or in Latin-1."""
    try:
        text = sample.decode("cp1252")
    except UnicodeDecodeError:  # five bytes have no character
        return False
    encoded_halves = re.search(rb"\xed[\xa0-\xbf][\x80-\xbf]", sample)  # of surrogate pairs
    return not encoded_halves and not NOT_WESTERN.search(text)


def _command(file: Path, compressed: bool, encoding: str, option: str = "") -> str:
    """Return the command that writes a file again in UTF-8."""
    suffixes = "".join(file.suffixes[-2:]).removesuffix(".gz")
    name, new = shlex.quote(str(file)), shlex.quote(f"NEW{suffixes}")
    # iconv's UTF-16 expects a mark; its names have no hyphen before the byte order.
    source = re.sub(r"-(LE|BE)$", r"\1", encoding.upper())
    convert = f"iconv{option} -f {source} -t UTF-8"
    before = f"gzip -dc {name} | {convert}" if compressed else f"{convert} {name}"
    return f"`{before} > {new}`"
