"""Realistic faults in data: in the token cache, in files and rows, and in chat templates."""

import errno
import gzip
import json
import os
import re
import signal
import subprocess
import sys
from copy import copy
from pathlib import Path

import pytest
from conftest import PROJECT
from streams import tokenized

from distributed_training.cli.parse import parse_arguments
from distributed_training.data.chat import Encoder
from distributed_training.data.examples import encode_example
from distributed_training.data.rows import Row, RowOptions
from distributed_training.data.sources import open_source
from distributed_training.errors import UserError
from distributed_training.files.cache import META, Cache
from distributed_training.files.folders import files_of

TEXT = "the quick brown fox jumps over the lazy dog\n" * 20
FINE = json.dumps({"text": "fine"})


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_tokenizer)


def items(path):
    """What a file or folder holds: its texts, and its bad rows (also that it cannot be read)."""
    texts, bad = [], []
    try:
        source = open_source(str(path), parse_arguments([]).data, RowOptions(), eval_only=False)
        for _, row in source.splits["train"](None):
            is_good = isinstance(row, Row)
            (texts if is_good else bad).append("".join(row.pieces) if is_good else str(row))
    except UserError as error:
        bad.append(str(error))
    return texts, bad


# ---------------------------------------------------------------------------------- the token cache


DAMAGE = {
    "other tokens": lambda folder: (folder / "train.bin").write_bytes(bytes(5000)),
    "no tokens": lambda folder: (folder / "train.bin").unlink(),
    "half of meta.json": lambda folder: os.truncate(folder / META, 50),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_cache_is_written_again(tokenizer, tmp_path, damage, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    first = tokenized(tmp_path / "text.txt", tokenizer, tmp_path / "cache")
    folder = Path(first["folder"])
    good = (folder / "train.bin").read_bytes()
    damage(folder)
    capsys.readouterr()
    again = tokenized(tmp_path / "text.txt", tokenizer, tmp_path / "cache")
    assert again == first and (folder / "train.bin").read_bytes() == good
    [said] = capsys.readouterr().out.splitlines()
    assert str(folder) in said and "damaged" in said


def write(folder: Path) -> dict:
    (folder / "x.bin").write_bytes(b"tokens")
    return {"n": 1}


def test_a_cache_that_another_run_writes_at_the_same_time(tmp_path):
    """Both write; the first to finish gives the folder its name, and the other one uses it."""

    def write_later(folder):
        Cache(tmp_path).get("name", write)
        return write(folder)

    assert Cache(tmp_path).get("name", write_later) == (tmp_path / "name", {"n": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_a_run_that_is_killed_while_it_writes_the_cache(tmp_path):
    program = """if True:
        import os, signal, sys
        from pathlib import Path
        from distributed_training.files.cache import Cache

        def write(folder):
            (folder / "x.bin").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

        Cache(Path(sys.argv[1])).get("name", write)
    """
    killed = subprocess.run([sys.executable, "-c", program, tmp_path], cwd=PROJECT)
    assert killed.returncode == -signal.SIGKILL and any(tmp_path.iterdir())
    folder, facts = Cache(tmp_path).get("name", write)
    assert (folder / "x.bin").read_bytes() == b"tokens" and facts == {"n": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["name"]  # nothing else is left


def test_a_cache_that_cannot_be_written(tokenizer, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=r"cannot be written.*No space left.*--cache_dir"):
        tokenized(tmp_path / "text.txt", tokenizer, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


# ----------------------------------------------------------------------------------- rows and files

DEEP = "[" * 100_000 + "]" * 100_000
# A file's name and content; how many texts it has; and, for each bad row, words of its line.
FILES = {
    "deep row": ("a.jsonl", f'{FINE}\n{{"text": {DEEP}}}\n{FINE}\n', 2, ["line 2: .*recursion"]),
    "list as text": ("a.jsonl", f'{{"text": [1]}}\n{FINE}\n', 1, ["line 1: .*not a string"]),
    "a byte-order mark": ("a.jsonl", "\ufeff" + FINE, 1, []),
    "commas": ("a.csv", 'id,text\r\n1,not quoted, so cut\n2,"a,\nb"\n3\n', 1, ["line 2", "line 5"]),
    "Latin-1 row": ("a.jsonl", FINE.encode() + b'\n{"text": "caf\xe9"}\n', 1, ["line 2: .*UTF-8"]),
    "UTF-16 text": ("a.txt", TEXT.encode("utf-16"), 1, []),
    "Latin-1 text": ("a.txt", b"caf\xe9 " * 9, 0, ["a.txt is not UTF-8 text.*iconv"]),
    "gzip": ("a.jsonl.gz", gzip.compress(f"{FINE}\n{FINE}".encode()), 2, []),
    "cut gzip": ("a.txt.gz", gzip.compress(TEXT.encode())[:-20], 0, ["cannot be read"]),
    "several lists": ("a.json", f'{{"train": [{FINE}], "test": []}}', 0, ["but train, test"]),
    "an end that is missing": ("a.json", f"[{FINE},\n {FINE}", 0, ["a.json: .*line 2 column"]),
    "strings": ("a.json", '["one", "two", 3]', 2, ["entry 3: neither"]),
}


@pytest.mark.parametrize("name, content, texts, bad", FILES.values(), ids=FILES)
def test_what_a_file_may_hold(tmp_path, name, content, texts, bad):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    found, wrong = items(tmp_path / name)
    assert len(found) == texts and len(wrong) == len(bad), wrong
    for line, words in zip(wrong, bad, strict=True):
        assert re.search(words, line) and name in line and len(line) < 1000 and "\n" not in line


def test_a_file_whose_rest_cannot_be_read_ends_the_run(tokenizer, tmp_path):
    broken = {"a.csv": b'text\nfine\n"never closed\nand more\n', "a.parquet": b"PAR1" * 30}
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            tokenized(tmp_path / name, tokenizer, tmp_path / "cache", bad=9)


def test_what_a_parquet_file_may_hold(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [None, "fine"], "more": [1, None]}), path)
    assert items(path) == (["", "fine"], [])
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), path)
    assert len(items(path)[1]) == 2 and "row 1: 'text' is not a string but 1" in items(path)[1][0]


def test_pipes_links_and_hidden_or_empty_files_in_a_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "device.txt").symlink_to("/dev/zero")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text(TEXT)
    assert items(tmp_path)[0] == [TEXT]
    with pytest.raises(UserError, match="pipe or a device"):
        files_of(tmp_path / "pipe.txt", "--dataset x")
    (tmp_path / "sub" / "a.txt").unlink()
    with pytest.raises(UserError, match="has no files"):
        files_of(tmp_path / "sub", "--dataset x")


def test_a_file_of_another_type_in_a_folder_of_texts(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT + "more")
    (tmp_path / "package.json").write_text('{"name": "x", "version": 1}')
    with pytest.raises(UserError, match=r"package.json, line 1: no .*'text', but name"):
        tokenized(tmp_path, tokenizer, tmp_path.parent / "cache")
    found = tokenized(tmp_path, tokenizer, tmp_path.parent / "cache", "--include", "*.txt")
    assert found["splits"]["train"]["rows"] == 2


# ----------------------------------------------------------------------------------- chat templates

TEMPLATES = {  # a template, whether it ends the run or is a bad row, and what is said
    "Python's insides": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", False, "unsafe|undef"),
    "a file": ("{% include '/etc/passwd' %}", False, "refuses it"),
    "an exception of its own": ("{{ raise_exception('two\nlines') }}", False, "refuses it: two"),
    "a filter that is not there": ("{{ 1 | nosuch }}", True, "cannot be read"),
}


@pytest.mark.parametrize("template, ends, said", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_that_fails(tokenizer, template, ends, said):
    """Nothing in it is executed outside of the sandbox, and no file is read."""
    wrong = copy(tokenizer)
    wrong.chat_template = template
    row = Row("chat.jsonl, line 7", "chat", messages=[{"role": "assistant", "content": "Yes."}])
    if ends:
        with pytest.raises(UserError, match=said):
            encode_example(Encoder(wrong), row)
        return
    bad = str(encode_example(Encoder(wrong), row))
    assert re.search(said, bad) and "chat.jsonl, line 7" in bad and "\n" not in bad
