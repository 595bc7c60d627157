"""Attacks on data: damaged caches, files that are not what they seem, rows that break readers,
templates that do not end.
"""

import errno
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import PROJECT

from support.cli.parse import parse_arguments
from support.data import rows as corpus
from support.data import templates
from support.data.chat import Encoder
from support.data.formats import BadRow, Document, Example, RowOptions
from support.data.sources import Notice, open_source
from support.data.tokenize import bad_rows_in, tokenize_once
from support.errors import UserError
from support.files.cache import META, Cache
from support.files.folders import files_of

TEXT = "the quick brown fox jumps over the lazy dog\n" * 20
FINE = json.dumps({"text": "fine"})


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_tokenizer)


def flags_of(include):
    """The values of the flags, with this --include."""
    return parse_arguments(["--include", include] if include else [])


def tokenized(tokenizer, dataset, root, bad=0, include=None, said=None, text_column=None):
    """Tokenize a file or folder: what `tokenize_once` returns."""
    cache = Cache(root, [], (said if said is not None else []).append)
    columns = (("text", text_column),) if text_column else ()
    source = open_source(str(dataset), flags_of(include), RowOptions(columns))
    return tokenize_once(source, tokenizer, cache, lambda n: None, bad)


def items(path, include=None):
    """What a file or folder holds, in three lists: texts, bad rows, notices."""
    source = open_source(str(path), flags_of(include), RowOptions())
    found = [
        ["".join(item.pieces) if isinstance(item, Document) else item, item]
        for item in source.splits["train"]()
    ]
    return (
        [one for one, item in found if isinstance(item, Document | Example)],
        [str(item) for _, item in found if isinstance(item, BadRow)],
        source.notices + [item.text for _, item in found if isinstance(item, Notice)],
    )


# ---------------------------------------------------------------------------------- the token cache


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "a flipped bit in the tokens": lambda folder: flip(folder / "train.bin", 100),
    "half of the tokens": lambda folder: shorten(folder / "train.bin"),
    "no tokens": lambda folder: (folder / "train.bin").write_bytes(b""),
    "more tokens": lambda folder: (folder / "train.bin").write_bytes(
        (folder / "train.bin").read_bytes() * 2
    ),
    "the file of the tokens is gone": lambda folder: (folder / "train.bin").unlink(),
    "a folder in the place of the tokens": lambda folder: (
        (folder / "train.bin").unlink() or (folder / "train.bin").mkdir()
    ),
    "a pipe in the place of the tokens": lambda folder: pipe(folder / "train.bin"),
    "a pipe in the place of meta.json": lambda folder: pipe(folder / META),
    "a flipped bit in meta.json": lambda folder: flip(folder / META, 120),
    "half of meta.json": lambda folder: shorten(folder / META),
    "an empty meta.json": lambda folder: (folder / META).write_bytes(b""),
    "meta.json is gone": lambda folder: (folder / META).unlink(),
    "meta.json of another version": lambda folder: (folder / META).write_text(
        '{"dtype": "uint16", "splits": {}}'
    ),
    "a deeply nested meta.json": lambda folder: (folder / META).write_text("[" * 100_000),
    "a list in meta.json": lambda folder: (folder / META).write_text("[1, 2]"),
    "names instead of sizes in meta.json": lambda folder: (folder / META).write_text(
        '{"facts": 1, "files": 2, "sha256": 3}'
    ),
    "no list of bad rows": lambda folder: (folder / "bad_rows.json").unlink(),
    "an empty folder": lambda folder: [file.unlink() for file in folder.iterdir()],
}


@pytest.mark.attack
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_cache_is_written_again(tokenizer, tmp_path, damage):
    (tmp_path / "text.txt").write_text(TEXT)
    first = tokenized(tokenizer, tmp_path / "text.txt", tmp_path / "cache")
    folder = Path(first["folder"])
    good = (folder / "train.bin").read_bytes()
    damage(folder)
    said = []
    if folder.joinpath(
        "train.bin"
    ).is_dir():  # a folder is not replaced by a file: it is nothing that a disk does
        with pytest.raises(UserError, match=r"cannot be written .*--cache_dir"):
            tokenized(tokenizer, tmp_path / "text.txt", tmp_path / "cache", said=said)
        return
    again = tokenized(tokenizer, tmp_path / "text.txt", tmp_path / "cache", said=said)
    assert again == first and (folder / "train.bin").read_bytes() == good
    assert len(said) == 1 and str(folder) in said[0] and "damaged" in said[0]
    assert (
        tokenized(tokenizer, tmp_path / "text.txt", tmp_path / "cache", said=said) == first
        and len(said) == 1
    )
    assert not list((tmp_path / "cache").glob(".writing-*"))


def test_a_run_that_uses_a_damaged_cache_keeps_what_it_has_mapped(tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    folder = Path(tokenized(tokenizer, tmp_path / "text.txt", tmp_path / "cache")["folder"])
    mapped = np.memmap(folder / "train.bin", dtype="uint16", mode="r")
    before = mapped.copy()
    missing, stop = [], threading.Event()

    def watch():
        while not stop.is_set():
            missing.extend([] if (folder / "train.bin").exists() else ["missing"])

    watcher = threading.Thread(target=watch)
    (folder / "bad_rows.json").write_text("[1]")
    watcher.start()
    tokenized(tokenizer, tmp_path / "text.txt", tmp_path / "cache")
    stop.set()
    watcher.join()
    assert not missing and (mapped == before).all()


def test_a_cache_that_another_run_writes_at_the_same_time(tokenizer, tmp_path):
    """Both write; the first to finish gives the folder its name, and the other one uses it."""
    facts, cache = {"n": 1}, Cache(tmp_path, [], print)

    def write(folder, depth=[]):  # noqa: B006 (the second call comes from within the first)
        (folder / "x.bin").write_bytes(b"tokens")
        if not depth:
            depth.append(1)
            Cache(tmp_path, [], print).get("name", write)
        return facts

    assert cache.get("name", write) == (tmp_path / "name", facts) == cache.get("name", None)


def test_modes_follow_the_umask(tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    before = os.umask(0o022)
    try:
        folder = Path(tokenized(tokenizer, tmp_path / "text.txt", tmp_path / "cache")["folder"])
    finally:
        os.umask(before)
    assert oct(folder.stat().st_mode & 0o777) == "0o755"
    assert {oct(file.stat().st_mode & 0o777) for file in folder.iterdir()} == {"0o644"}


SECOND_USER = """
import os, sys
from pathlib import Path
from support.files.cache import Cache
from support.errors import UserError
os.setgid(65534)
os.setuid(65534)  # after the imports: that user may have no access to them
def write(folder):
    (folder / "x.bin").write_bytes(b"tokens")
    return {"n": 1}
try:
    print(Cache(Path(sys.argv[1]), [], print).get("name", write)[1])
except UserError as error:
    print("refused:", error)
"""


@pytest.mark.attack
@pytest.mark.parametrize(
    "mode, damaged, said",
    [
        (0o755, False, "{'n': 1}"),  # may read and not write
        (0o755, True, "--cache_dir"),  # may not repair
        (0o777, True, "--cache_dir"),  # the damaged folder itself belongs to the first user
        (0o700, False, "--cache_dir"),  # may not even look
    ],
)
def test_two_users_share_a_cache(mode, damaged, said):
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own folders are closed to others
    try:
        root = folder / "cache"
        Cache(root, [], print).get(
            "name", lambda folder: (folder / "x.bin").write_bytes(b"tokens") and {"n": 1}
        )
        if damaged:
            (root / "name" / "x.bin").write_bytes(b"")
        folder.chmod(0o755)
        root.chmod(mode)
        command = [sys.executable, "-c", SECOND_USER, root]
        done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout.splitlines()[-1], done.stdout
    finally:
        shutil.rmtree(folder)


KILLED = """
import sys, time
from pathlib import Path
from support.files.cache import Cache
def write(folder):
    (folder / "x.bin").write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(60)
Cache(Path(sys.argv[1]), [], print).get("name", write)
"""


@pytest.mark.attack
def test_a_run_that_is_killed_while_it_writes_the_cache(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    process.kill()
    process.communicate()
    said = []
    folder, facts = Cache(tmp_path, [], said.append).get(
        "name", lambda to: (to / "x.bin").write_bytes(b"tokens") and {"n": 1}
    )
    assert (folder / "x.bin").read_bytes() == b"tokens" and facts == {"n": 1} and not said
    assert [path.name for path in tmp_path.iterdir()] == [
        "name"
    ]  # nothing of the killed run is left


def test_the_store_gets_no_more_for_a_hundred_thousand_bad_rows(tokenizer, tmp_path):
    """Its values have a limit of 8 MB, and every rank of a node gets this one."""
    (tmp_path / "a.jsonl").write_text("{\n" * 120_000 + FINE)
    found = tokenized(tokenizer, tmp_path / "a.jsonl", tmp_path / "cache", bad=120_000)
    assert len(json.dumps(found)) < 2000 and len(bad_rows_in(found["folder"])) == 120_000
    with pytest.raises(UserError, match=r"line 120000, .*--max_bad_rows 119999"):
        tokenized(tokenizer, tmp_path / "a.jsonl", tmp_path / "cache", bad=119_999)


@pytest.mark.soak
def test_two_ranks_and_a_hundred_thousand_bad_rows(script, tmp_path):
    (tmp_path / "a.jsonl").write_text("{\n" * 120_000 + (json.dumps({"text": TEXT * 9}) + "\n") * 9)
    run = script(
        "--dataset",
        tmp_path / "a.jsonl",
        "--max_bad_rows",
        "150000",
        "--seq_length",
        "64",
        "--max_steps",
        "2",
        "--no_eval",
        "--no_export",
        launcher="torchrun",
        ranks=2,
    )
    assert len(run.results["dataset"]["bad_rows"]) == 120_000 and run.out.count("Left out") == 11


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_cache_that_cannot_be_written(tokenizer, tmp_path, monkeypatch, error):
    def fail(*_):
        raise OSError(error, os.strerror(error))

    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=rf"cannot be written.*{os.strerror(error)}.*--cache_dir"):
        tokenized(tokenizer, tmp_path / "text.txt", tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


# ----------------------------------------------------------------------------------- rows and files

DEEP = "[" * 100_000 + "]" * 100_000
# A file's name and content; how many texts it has; and, for each bad row, words of its line.
FILES = {
    "deep row": (
        "a.jsonl",
        f'{FINE}\n{{"text": {DEEP}}}\n{FINE}\n',
        2,
        ["a.jsonl, line 2: .*nested"],
    ),
    "deep value in another key": (
        "a.jsonl",
        f'{{"text": "x", "more": {DEEP}}}\n{FINE}\n',
        1,
        ["line 1: .*nested"],
    ),
    "huge number": (
        "a.jsonl",
        f'{FINE}\n{{"text": "x", "id": {"7" * 5000}}}\n',
        1,
        ["line 2: .*4300 digits"],
    ),
    "number as text": (
        "a.jsonl",
        f'{{"text": {"7" * 4000}}}\n{FINE}\n',
        1,
        ["line 1: .*not a text"],
    ),
    "list as text": (
        "a.jsonl",
        f'{{"text": {[[1] * 9] * 99_999}}}\n{FINE}\n',
        1,
        ["line 1: .*not a text"],
    ),
    "key twice": (
        "a.jsonl",
        f'{{"text": "a", "text": "b"}}\n{FINE}\n',
        1,
        ["line 1: .*'text' is given twice"],
    ),
    "key twice inside": (
        "a.jsonl",
        '{"messages": [{"role": "user", "role": "assistant"}]}',
        0,
        ["'role' is given"],
    ),
    "NaN": (
        "a.jsonl",
        f'{{"text": NaN}}\n{{"text": "x", "score": NaN}}\n{FINE}\n',
        2,
        ["line 1: .*not a text"],
    ),
    "a million keys": (
        "a.jsonl",
        json.dumps({f"k{n}": 1 for n in range(100_000)}) + f"\n{FINE}\n",
        1,
        ["line 1: no 'text'"],
    ),
    "control characters": ("a.jsonl", f'{{"a\\u001b[2J\\nb": 1}}\n{FINE}\n', 1, [r"\\x1b\[2J\\nb"]),
    "half a surrogate pair": (
        "a.jsonl",
        f'{{"text": "\\ud800"}}\n{FINE}\n',
        1,
        ["line 1: .*not UTF-8"],
    ),
    "a key that is no text": ("a.jsonl", f'{{"\\ud800": 1}}\n{FINE}\n', 1, ["line 1: no 'text'"]),
    "NUL bytes in a text": ("a.txt", "a\0b" * 100, 1, []),
    "NUL bytes in JSON": ("a.jsonl", f"\0\0\0\n{FINE}\n", 1, ["line 1, column 1: not valid JSON"]),
    "NUL bytes in a table": ("a.csv", "text\na\0b\nfine\n", 2, []),
    "a byte-order mark": ("a.jsonl", "\ufeff" + FINE, 1, []),
    "a byte-order mark in a table": ("a.csv", "\ufefftext\nfine\n", 1, []),
    "Windows line ends": ("a.jsonl", f"{FINE}\r\n{FINE}\r\n\r\n", 2, []),
    "Windows line ends in a table": ("a.csv", 'text\r\n"a\r\nb"\r\nfine\r\n', 2, []),
    "old Macintosh line ends": ("a.jsonl", f"{FINE}\r{FINE}\r", 2, []),
    "line separators in a text": ("a.jsonl", '{"text": "a\u2028b\x85c"}\n', 1, []),
    "blank lines only": ("a.jsonl", "\n \n\t\n", 0, []),
    "mixed encodings": (
        "a.jsonl",
        FINE.encode() + b'\n{"text": "caf\xe9"}\n{"text": "caf\xc3\xa9"}\n',
        2,
        ["line 2: .*UTF-8"],
    ),
    "UTF-16": ("a.jsonl", FINE.encode("utf-16"), 0, ["a.jsonl is UTF-16"]),
    "UTF-16 text": ("a.txt", TEXT.encode("utf-16"), 0, ["a.txt is UTF-16"]),
    "gzip": ("a.json", gzip.compress(FINE.encode()), 0, ["a.json is compressed with gzip"]),
    "gzip text": ("a.txt", gzip.compress(FINE.encode()), 0, ["a.txt is compressed with gzip"]),
    "a document of Word": ("a.txt", b"PK\x03\x04" + b"\0" * 100, 0, ["a.txt is a zip"]),
    "deep file": ("a.json", DEEP, 0, ["a.json: .*nested"]),
    "deep entry": ("a.json", f'[{FINE}, {{"text": {DEEP}}}]', 0, ["a.json: .*nested"]),
    "huge number in a file": ("a.json", f"[{FINE}, {'7' * 5000}]", 0, ["a.json: .*4300 digits"]),
    "an end that is missing": ("a.json", f"[{FINE},\n {FINE}", 0, ["a.json, line 2, column"]),
    "a number": ("a.json", "7", 0, ["entry 1: neither"]),
    "null": ("a.json", "null", 0, ["entry 1: neither"]),
    "strings": ("a.json", '["one", "two", 3]', 2, ["entry 3: neither"]),
    "an empty list": ("a.json", "[]", 0, []),
    "a thousand lists": (
        "a.json",
        json.dumps({f"k{n}": [1] for n in range(1000)}),
        0,
        ["several lists, k0, .*k9, …:"],
    ),
    "no columns": ("a.csv", "\n\n", 0, []),
    "a header only": ("a.csv", "text\n", 0, []),
    "not Parquet": (
        "a.parquet",
        b"PAR1" + b"\0" * 100 + b"PAR1",
        0,
        ["a.parquet is not a Parquet file"],
    ),
    "half of a name": ("a.parquet", b"PA", 0, ["a.parquet is not a Parquet file"]),
}


@pytest.mark.attack
@pytest.mark.parametrize("name, content, texts, bad", FILES.values(), ids=FILES)
def test_what_a_file_may_hold(tmp_path, name, content, texts, bad):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    found, wrong, _ = items(tmp_path / name)
    assert len(found) == texts and len(wrong) == len(bad), wrong
    for line, words in zip(wrong, bad, strict=True):
        assert re.search(words, line) and name in line and len(line) < 1000 and "\n" not in line, (
            line
        )


def test_a_row_of_50_million_characters(tokenizer, tmp_path):
    with open(tmp_path / "a.jsonl", "w") as file:
        for size in (1, 2_000_000, 1):
            file.write(
                json.dumps({"text": TEXT * size if size == 1 else "lazy dog " * (size * 3)}) + "\n"
            )
    texts, bad, _ = items(tmp_path / "a.jsonl")
    assert [len(text) for text in texts] == [len(TEXT), 54_000_000, len(TEXT)] and not bad


def test_a_row_that_is_too_long_for_any_row(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "LONGEST_ROW", 100)
    rows = [FINE, json.dumps({"text": "x" * 950}), FINE, json.dumps({"text": "y" * 99})]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    texts, bad, _ = items(tmp_path / "a.jsonl")
    assert texts == ["fine"] * 2 and ["line 2" in bad[0], "line 4" in bad[1]] == [True, True]


def test_a_json_file_that_does_not_fit_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "JSON_IN_MEMORY", 1 << 40)
    write_table(tmp_path / "a.json", ["fine"])
    texts, [line], _ = items(tmp_path / "a.json")
    assert not texts and "memory" in line and ".jsonl" in line


@pytest.mark.soak
def test_a_json_file_of_a_gigabyte(tmp_path):
    path = tmp_path / "a.json"
    row = json.dumps({"text": TEXT})
    with open(path, "w") as file:
        file.write("[" + row)
        for _ in range(2**30 // len(row)):
            file.write(",\n" + row)
        file.write("]")
    code = (
        "import resource; import sys; from support.cli.parse import parse_arguments; from support.data.formats import Document, RowOptions; from support.data.sources import open_source\n"
        "rows = sum(isinstance(i, Document) for i in open_source(sys.argv[1], parse_arguments([]), RowOptions()).splits['train']())\n"
        "print(rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, cwd=PROJECT, check=True
    )
    rows, peak = map(int, done.stdout.split())
    print(f"{rows:,} rows, {peak / 1e9:.2f} GB, {time.monotonic() - begin:.0f} s")
    assert rows == 2**30 // len(row) + 1 and peak < 6e9


# -------------------------------------------------------------------------------- files and folders


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.parquet"])
@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOENT])
def test_an_error_while_reading_names_the_file_that_is_read(
    tokenizer, tmp_path, monkeypatch, name, error
):
    """And not the cache. The first time it is read, for its digest, nothing is wrong yet."""
    write_table(tmp_path / name, ["fine"])
    source = open_source(str(tmp_path / name), parse_arguments([]), RowOptions())

    def fail(*args, **_kwargs):
        raise OSError(error, os.strerror(error), str(args[0]))

    import pyarrow.parquet

    read = Path.read_text
    monkeypatch.setattr(corpus, "open", lambda path, *rest, **more: fail(path), raising=False)
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, **more: fail(path) if path.name == name else read(path, **more),
    )
    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", fail)
    with pytest.raises(
        UserError, match=rf"{re.escape(str(tmp_path / name))} cannot be read: {os.strerror(error)}"
    ):
        tokenize_once(source, tokenizer, Cache(tmp_path / "cache", [], print), lambda n: None, 9)


def write_table(path: Path, texts: list, **columns) -> Path:
    """The same rows in each format."""
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": text} for text in texts]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(
            pyarrow.table({"text": texts, **columns}), path, row_group_size=1024
        )
    elif path.suffix == ".csv":
        path.write_text("text\n" + "".join(f'"{text}"\n' for text in texts))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n".join(texts))
    return path


def test_a_parquet_file_that_is_damaged_inside(tokenizer, tmp_path):
    """Before its first row it is a bad row; behind it the run ends, because nobody knows how much
    would be lost.
    """
    path = write_table(tmp_path / "a.parquet", [f"{n} {TEXT}" for n in range(3000)])
    good = path.read_bytes()
    end = good.rindex(b"PAR1") - 4 - int.from_bytes(good[-8:-4], "little")
    for begin, said in (
        (4, "a.parquet is not a Parquet file"),
        (end * 2 // 3, "a.parquet: what follows row [0-9]+"),
    ):
        path.write_bytes(good[:begin] + b"\xff" * 2000 + good[begin + 2000 :])
        with pytest.raises(UserError, match=said):
            tokenized(tokenizer, path, tmp_path / "cache")


def test_what_a_parquet_file_may_hold(tmp_path):
    import pyarrow

    path = tmp_path / "a.parquet"
    write_table(path, [None, "fine", None], more=[1, None, 3])
    assert items(path)[:2] == (["", "fine", ""], [])
    write_table(path, pyarrow.array([None, None]))
    assert items(path)[:2] == (["", ""], [])
    write_table(path, [1, 2])
    assert ["row 1: 'text' is not a text but 1" in items(path)[1][0], len(items(path)[1])] == [
        True,
        2,
    ]
    write_table(path, [b"bytes", None])
    assert "is not a text but b'bytes'" in items(path)[1][0]
    write_table(path, pyarrow.array([], pyarrow.string()))
    assert items(path)[:2] == ([], [])
    write_table(path, [["a", "b"]])
    assert "is not a text but ['a', 'b']" in items(path)[1][0]
    bad_utf8 = pyarrow.Array.from_buffers(
        pyarrow.string(),
        1,
        [
            None,
            pyarrow.py_buffer(np.array([0, 4], np.int32).tobytes()),
            pyarrow.py_buffer(b"caf\xe9"),
        ],
    )
    write_table(path, bad_utf8)
    assert "a.parquet is not a Parquet file" in items(path)[1][0]
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), path)
    assert "two columns have the same name, text" in items(path)[1][0]


def test_a_table_without_text_in_a_folder_is_one_bad_row(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2]}), tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_text(TEXT)
    texts, bad, _ = items(tmp_path)
    assert texts == [TEXT] and len(bad) == 1 and "a.parquet: no 'text'" in bad[0]


def test_an_encrypted_parquet_file(tmp_path):
    path = write_table(tmp_path / "a.parquet", ["fine"])
    path.write_bytes(b"PARE" + path.read_bytes()[4:-4] + b"PARE")  # the mark of an encrypted footer
    assert "a.parquet is not a Parquet file" in items(path)[1][0]


def test_pipes_links_and_hidden_or_empty_files_in_a_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "self.txt").symlink_to(tmp_path / "self.txt")
    (tmp_path / "nowhere.txt").symlink_to(tmp_path / "no" / "such")
    (tmp_path / "device.txt").symlink_to("/dev/zero")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text(TEXT)
    assert items(tmp_path)[0] == [TEXT]


@pytest.mark.parametrize(
    "make",
    [
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("/dev/null"),
        lambda path: path.symlink_to(path.name),
    ],
    ids=["pipe", "zeros", "null", "loop"],
)
def test_what_is_neither_a_file_nor_a_folder(tmp_path, make):
    with pytest.raises(UserError, match=r"x cannot be read: File name too long"):
        files_of(tmp_path / ("x" * 5000), "--dataset x")
    make(tmp_path / "x.txt")
    with pytest.raises(UserError, match=r"pipe or a device|no such file"):
        files_of(tmp_path / "x.txt", "--dataset x.txt")


@pytest.mark.parametrize("name", ["b.txt", "b.jsonl"])
@pytest.mark.parametrize("change", ["grow", "vanish", "replace"])
def test_a_file_that_changes_while_it_is_read(tokenizer, tmp_path, name, change):
    write_table(tmp_path / "a.txt", ["first"])
    path = write_table(tmp_path / name, ["second"])
    found = open_source(str(tmp_path), parse_arguments([]), RowOptions()).splits["train"]()
    next(found)
    if change == "grow":
        path.write_text(path.read_text() * 2)
    else:
        path.unlink()
    if change == "replace":
        write_table(path, ["secone"])
    with pytest.raises(UserError, match=rf"{name} (has changed|cannot be read: No such file)"):
        list(found)


def test_names_that_are_no_text_and_names_with_line_ends(tokenizer, tmp_path):
    for name in (b"caf\xe9.txt", b"two\nlines.txt", b"-o.txt", b"%s {0}.txt"):
        (tmp_path / os.fsdecode(name)).write_text(f"{name} {TEXT}")
    assert tokenized(tokenizer, tmp_path, tmp_path.parent / "cache")["splits"]["train"]["rows"] == 4
    (tmp_path / os.fsdecode(b"\xe9\n.jsonl")).write_text("{")
    [line] = items(tmp_path)[1]
    line.encode()
    assert "\n" not in line


def test_a_file_of_another_type_in_a_folder_of_texts(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT + "more")
    (tmp_path / "package.json").write_text('{"name": "x", "version": 1}')
    with pytest.raises(UserError, match=r"package.json, entry 1: no 'text'.*--include '\*.txt'"):
        tokenized(tokenizer, tmp_path, tmp_path.parent / "cache")
    found = tokenized(tokenizer, tmp_path, tmp_path.parent / "cache", include="*.txt")
    assert found["splits"]["train"]["rows"] == 2


def test_the_same_content_is_used_once(tokenizer, tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("a.txt", "b.txt", "c.md", "d.jsonl"):
        (tmp_path / "data" / name).write_text(
            TEXT if name != "d.jsonl" else json.dumps({"text": "other"})
        )
    texts, bad, notices = items(tmp_path / "data")
    assert texts == [TEXT, "other"] and not bad
    assert (
        len(notices) == 2 and "b.txt has the same content as" in notices[0] and "c.md" in notices[1]
    )
    alone = tmp_path / "alone"
    shutil.copytree(tmp_path / "data", alone)
    for name in ("b.txt", "c.md"):
        (alone / name).unlink()
    found = [
        tokenized(tokenizer, folder, tmp_path / "cache") for folder in (tmp_path / "data", alone)
    ]
    assert found[0] == found[1]  # one folder of the cache, and one text for --resume


@pytest.mark.parametrize(
    "first, second",
    [
        ("a.json", "b.txt"),
        ("a.jsonl", "b.txt"),
        ("a.csv", "b.txt"),
        ("a.parquet", "b.txt"),
        ("a.txt", "b.json"),
        ("a.jsonl", "b.parquet"),
        ("a.csv", "b.json"),
    ],
)
def test_the_same_text_in_two_formats_is_used_once(tokenizer, tmp_path, first, second):
    texts = [f"{number} {TEXT}" for number in range(10)]
    for name in (first, second):
        write_table(tmp_path / name, texts)
    (tmp_path / "c.md").write_text(TEXT)  # is part of the others, and not the same
    found = tokenized(tokenizer, tmp_path, tmp_path.parent / "cache")
    (tmp_path / second).unlink()
    alone = tokenized(tokenizer, tmp_path, tmp_path.parent / "cache")
    assert found["splits"] == alone["splits"] and alone["notices"] == []
    assert len(found["notices"]) == 1 and re.search(
        f"{second} has the same text as .*{first}", found["notices"][0]
    )


def test_texts_that_differ_are_all_used(tokenizer, tmp_path):
    write_table(tmp_path / "a.json", ["one", "two"])
    write_table(tmp_path / "b.jsonl", ["one", "two", "three"])
    write_table(tmp_path / "c.txt", ["one"])
    write_table(tmp_path / "d.txt", ["two", "one"])
    assert len(items(tmp_path)[0]) == 7 and items(tmp_path)[2] == []


# ----------------------------------------------------------------------------------- chat templates

TEMPLATES = {  # a template, whether it ends the run or is a bad row, and what is said
    "a range of 10^9": (
        "{% for i in range(10**9) %}x{% endfor %}",
        False,
        "power|[Rr]ange too big",
    ),
    "loops in loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        True,
        "does not end",
    ),
    "a macro that calls itself": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        False,
        "nested too deeply",
    ),
    "a huge text": ("{{ 'a' * 10**10 }}", False, "repeated too often"),
    "a text that is long enough to fill the memory when it is tokenized": (
        "{% for i in range(99999) %}{{ 'abc' * 100 }}{% endfor %}{{ messages[0].content }}",
        False,
        "29,999,7.. characters of 4",
    ),
    "a text that is there nine times": (
        "{% for i in range(9) %}{{ messages[0].content }}{% endfor %}",
        False,
        "changes",
    ),
    "a loop in what is learned": (
        "{% generation %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endgeneration %}",
        True,
        "does not end",
    ),
    "a huge list": ("{{ ([1] * 999999999) | length }}", False, "repeated too often"),
    "a huge power": ("{{ 9**(9**9) }}", False, "too many digits"),
    "a huge power of a variable": (
        "{% set n = messages|length + 9 %}{{ n**(n**n) }}",
        False,
        "too many digits",
    ),
    "squares of squares": (
        "{% set x = namespace(n=9) %}{% for i in range(99) %}{% set x.n = x.n * x.n %}{% endfor %}",
        False,
        "too many digits",
    ),
    "a text that doubles": (
        "{% set x = namespace(s='ab') %}{% for i in range(60) %}{% set x.s = x.s ~ x.s %}{% endfor %}",
        False,
        "more memory",
    ),
    "a list that doubles": (
        "{% set x = namespace(s=[1]) %}{% for i in range(60) %}{% set x.s = x.s + x.s %}{% endfor %}",
        False,
        "more memory",
    ),
    "a wide format": ("{{ '%099999999999d' % 1 }}", False, "refuses it"),
    "a centred text": ("{{ 'a' | center(99999999999) }}", False, "more memory"),
    "Lorem ipsum": ("{{ lipsum(n=99999999) }}", True, "does not end|more memory"),
    "a division by zero": ("{{ 1 / 0 }}", False, "division"),
    "a key that is not there": ("{{ messages[0].no.such }}", False, "no attribute|undefined"),
    "Python's insides": (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        False,
        "unsafe|undefined",
    ),
    "a file": ("{% include '/etc/passwd' %}", False, "refuses it"),
    "deep parentheses": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", False, "nested too deeply"),
    "an exception of its own": ("{{ raise_exception('two\nlines') }}", False, "refuses it: two"),
    "a filter that is not there": ("{{ 1 | nosuch }}", True, "cannot be read"),
}


@pytest.mark.attack
@pytest.mark.parametrize("template, ends, said", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_that_loops_or_fills_the_memory(
    tokenizer, monkeypatch, template, ends, said
):
    from copy import copy

    monkeypatch.setattr(templates, "SECONDS", 2)
    monkeypatch.setattr(templates, "BYTES", 1 << 29)
    attacked, example = (
        copy(tokenizer),
        Example("chat.jsonl, line 7", [{"role": "assistant", "content": "Yes."}]),
    )
    attacked.chat_template, begin = template, time.monotonic()
    try:
        [found] = Encoder(attacked).encode([example])
    except UserError as error:
        assert ends, error
        found = error
    assert isinstance(found, UserError) and re.search(said, str(found)), found
    assert "cannot be read" in str(found) or "chat.jsonl, line 7" in str(found)
    assert "\n" not in str(found) and time.monotonic() - begin < 60
    bytearray(1 << 29)  # the limits are those of before
