"""Which files of a folder are data, where the cache is, and bad rows of a stream."""

import errno
import json
import os
from copy import copy
from pathlib import Path

import numpy as np
import pytest
from tokenizer_zoo import tokenizer_of

from support.cli.parse import parse_arguments
from support.data.batches import IGNORED, open_split
from support.data.formats import RowOptions
from support.data.rows import open_source
from support.data.sequences import Padding
from support.data.tokenize import tokenize_once
from support.errors import UserError
from support.files.cache import Cache
from support.files.user_files import files_of


def tokenized(tokenizer, folder, conversations):
    """A tokenized corpus of conversations, given as lists of (role, content)."""
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in turns]}
        for turns in conversations
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(str(folder / "chat.jsonl"), parse_arguments([]), RowOptions())
    return tokenize_once(source, tokenizer, Cache(folder, [], print), lambda n: None, 0)


def test_an_example_without_a_target_in_the_sequence_is_skipped(tmp_path):
    """The first token of a sequence is not predicted, so it does not count as a target."""
    tokenizer = copy(tokenizer_of("gpt2"))
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    late = [("assistant", "a"), ("user", " and" * 50), ("assistant", "late")]
    early = [("assistant", "a long answer"), ("user", " and" * 50)]
    prepared = tokenized(tokenizer, tmp_path, [late, early])
    args = parse_arguments(["--seq_length", "16"])
    file, facts = open_split(prepared, "train", args, Padding(args.seq_length, 8))
    assert (facts["blocks"], facts["skipped"], facts["truncated"]) == (1, 1, 1)
    assert (file.read(np.arange(1))[1][:, 1:] != IGNORED).any()


def test_the_plain_template_without_an_end_of_text_token(tmp_path):
    tokenizer = copy(tokenizer_of("gpt2"))
    tokenizer.eos_token, tokenizer.chat_template = None, None
    prepared = tokenized(tokenizer, tmp_path, [[("user", "fox?"), ("assistant", "dog")]])
    args = parse_arguments(["--seq_length", "64"])
    sequences, _ = open_split(prepared, "train", args, Padding(args.seq_length, 8))
    inputs, labels, _ = sequences.read(np.arange(1))
    learned = inputs[0][labels[0] != IGNORED]
    assert "".join(tokenizer.convert_ids_to_tokens(learned)) == "dog"


PLACES = {
    "a file": lambda path: path.write_text("x"),
    "a link to nothing": lambda path: path.symlink_to("no/such"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "/proc": lambda path: path.symlink_to("/proc"),
    "a name that is too long": lambda path: path.with_name("x" * 300),
}


@pytest.mark.parametrize("make", PLACES.values(), ids=PLACES)
def test_a_place_where_no_cache_can_be(tmp_path, make):
    said, place = [], tmp_path / "place"
    place = made if isinstance(made := make(place), Path) else place
    with pytest.raises(UserError, match=r"cannot be written.*use --cache_dir"):
        Cache(place, [], said.append).get("name", lambda folder: {})
    assert not said


def test_a_folder_in_a_folder_that_may_not_be_read(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("fine")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("sub"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"sub cannot be read: Permission denied"):
        files_of(tmp_path, "--dataset x")


# patterns, and what they choose of a.txt, b.md, config.json, sub/a.txt, sub/deep/c.TXT
INCLUDED = [
    ("*.txt", ["a.txt", "sub/a.txt"]),
    ("sub/*", ["sub/a.txt", "sub/deep/c.TXT"]),
    (" *.md , *.json ", ["b.md", "config.json"]),
    ("[!a]*", ["b.md", "config.json", "sub/deep/c.TXT"]),
]


@pytest.mark.parametrize("patterns, chosen", INCLUDED)
def test_include_chooses_files(tmp_path, patterns, chosen):
    for name in ("a.txt", "b.md", "config.json", "sub/a.txt", "sub/deep/c.TXT"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert [str(file.relative_to(tmp_path)) for file in files_of(tmp_path, "x", patterns)] == chosen


def test_include_that_fits_nothing_says_what_there_is(tmp_path):
    for name in ("a.txt", "b.txt", "c.md", "README"):
        (tmp_path / name).write_text("x")
    with pytest.raises(UserError, match=r"--include \*.json.* 2 .txt, 1 (.md|without a suffix), 1"):
        files_of(tmp_path, "x", "*.json")


@pytest.mark.parametrize("line", ["include: '*.txt,*.md'", "include: ['*.txt', '*.md']"])
def test_include_in_a_run_file(tmp_path, line):
    from support.cli.run_file import as_yaml

    (tmp_path / "run.yaml").write_text(line)
    args = parse_arguments(["--config", str(tmp_path / "run.yaml")])
    assert args.include == "*.txt,*.md" and "include: '*.txt,*.md'" in as_yaml(args)
    with pytest.raises(UserError, match="--include"):
        parse_arguments(["--include", " "])
