"""Which files of a folder are data, and which examples have a target."""

import json
from copy import copy

import numpy as np
import pytest
from streams import tokenized
from tokenizer_zoo import tokenizer_of

from support.cli.parse import parse_arguments
from support.data.corpus import open_split
from support.data.opening import check_validation
from support.data.sequences import Padding, Sequences
from support.errors import UserError
from support.files.folders import files_of
from support.units import IGNORED


def read(tokenizer, folder, length, conversations):
    """Labels and facts of conversations, given as lists of (role, content)."""
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in turns]}
        for turns in conversations
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = tokenized(folder / "chat.jsonl", tokenizer, folder)
    args = parse_arguments(["--seq_length", str(length)])
    sequences, facts = open_split(prepared, "train", args, Padding(length, 8))
    return *sequences.read(np.arange(1))[:2], facts


def test_an_example_without_a_target_in_the_sequence_is_skipped(tmp_path):
    """The first token of a sequence is not predicted, so it does not count as a target."""
    tokenizer = copy(tokenizer_of("gpt2"))
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    late = [("assistant", "a"), ("user", " and" * 50), ("assistant", "late")]
    early = [("assistant", "a long answer"), ("user", " and" * 50)]
    _, labels, facts = read(tokenizer, tmp_path, 16, [late, early])
    assert (facts["blocks"], facts["skipped"], facts["truncated"]) == (1, 1, 1)
    assert (labels[:, 1:] != IGNORED).any()


def test_the_plain_template_without_an_end_of_text_token(tmp_path):
    tokenizer = copy(tokenizer_of("gpt2"))
    tokenizer.eos_token, tokenizer.chat_template = None, None
    inputs, labels, _ = read(tokenizer, tmp_path, 64, [[("user", "fox?"), ("assistant", "dog")]])
    learned = inputs[0][labels[0] != IGNORED]
    assert "".join(tokenizer.convert_ids_to_tokens(learned)) == "dog"


def test_nothing_to_evaluate_on():
    with pytest.raises(UserError, match=r"nothing to evaluate on.*--eval_only"):
        check_validation(Sequences.none(Padding(8, 8)), parse_arguments(["--eval_only"]))


# patterns, and what they choose of a.txt, b.md, config.json, sub/a.txt, sub/deep/c.TXT
INCLUDED = [
    ("*.txt", ["a.txt", "sub/a.txt"]),
    ("sub/*", ["sub/a.txt", "sub/deep/c.TXT"]),
    (" *.md , *.json ", ["b.md", "config.json"]),
]


def test_include_chooses_files(tmp_path):
    for name in ("a.txt", "b.md", "config.json", "sub/a.txt", "sub/deep/c.TXT"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    for patterns, chosen in INCLUDED:
        found = files_of(tmp_path, "x", patterns)
        assert [str(file.relative_to(tmp_path)) for file in found] == chosen
    with pytest.raises(UserError, match=r"--include \*.csv.* 3 .txt"):
        files_of(tmp_path, "x", "*.csv")
