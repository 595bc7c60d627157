"""Long documents are tokenized in pieces, and the ids are those of the whole document."""

from __future__ import annotations

import json
import random
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from tokenizer_zoo import CHINESE, EMOJI, KINDS, MARKS, SPECIAL, random_text, tokenizer_of

from support.cli.parse import parse_arguments
from support.data.formats import Document, RowOptions
from support.data.rows import open_source
from support.data.tokenize import DocumentTokenizer, tokenize_once
from support.errors import UserError
from support.files.cache import Cache

ALL = [make.__name__ for make in KINDS]
PYDOCS = "\n".join(topics[name] for name in sorted(topics))


def whole(tokenizer, text: str) -> list[int]:
    """The ids that transformers gives for a document."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def in_pieces(tokenizer, text: str, size: int, read: int = 777) -> tuple[int, list[int]]:
    """How many pieces a text has, and their ids, tokenized one by one from the last to the first."""
    documents = DocumentTokenizer(tokenizer, size)
    document = Document("x", [text[at : at + read] for at in range(0, len(text), read)])
    pieces = list(documents.pieces(document))
    assert "".join(piece.text for piece in pieces) == text
    ids = [documents.encode([piece])[0].tolist() for piece in reversed(pieces)]
    return len(pieces), [id for part in reversed(ids) for id in part]


def documents_of_every_sort() -> dict[str, str]:
    draw = random.Random(1)
    sentences = [
        "".join(draw.choices(CHINESE[:-2], k=draw.randint(3, 30))) + draw.choice(CHINESE[-2:])
        for _ in range(1000)
    ]
    spaces = [" ", "\n", "\t", "\r\n", "\u3000"]
    runs = (draw.choice(spaces) * draw.choice([1, 2, 300]) + "word" for _ in range(60))
    marks = ("e" + "".join(draw.choices(MARKS[1:3], k=draw.choice([1, 300]))) for _ in range(60))
    return {
        "prose": PYDOCS[:40_000],
        "one line": " ".join(PYDOCS.split())[:40_000],
        "one line without spaces": "".join(PYDOCS.split())[:10_000],
        "one letter": "a" * 5000,
        "source code": Path(random.__file__).read_text(encoding="utf-8"),
        "chinese": "".join(sentences),
        "chinese lines": "\n".join(sentences),
        "emojis": "".join(draw.choices(EMOJI, k=2000)),
        "marks": "".join(marks),
        "whitespace": "".join(runs),
        "special tokens": "".join(
            draw.choice([*SPECIAL, "  ", " some words", "\n"]) for _ in range(1500)
        ),
        "random": random_text(1, 20_000),
    }


DOCUMENTS = documents_of_every_sort()


@pytest.mark.parametrize("kind", ALL)
def test_whole_document(kind):
    tokenizer, numbers = tokenizer_of(kind), {}
    for name, text in DOCUMENTS.items():
        numbers[name], ids = in_pieces(tokenizer, text, 1000)
        assert ids == whole(tokenizer, text), name
    assert numbers["prose"] > 25 and numbers["chinese lines"] > 8
    # A Unigram model is not cut between words.
    assert numbers["one line"] > 15 or kind in ("xlnet", "unigram_unsplit")


def test_pieces_of_the_real_size():
    tokenizer = tokenizer_of("gpt2")
    number, ids = in_pieces(tokenizer, PYDOCS, 1 << 16)
    assert number >= 4 and ids == whole(tokenizer, PYDOCS)
    again = in_pieces(tokenizer, PYDOCS, 1 << 16, read=100_001)
    assert again == (number, ids)  # it does not matter how the file is read


def test_documents_are_in_their_order(tmp_path):
    """Short rows in one batch, an empty one, and a long one in pieces."""
    tokenizer = tokenizer_of("gpt2")
    lines = [*PYDOCS.splitlines()[:5000], "", PYDOCS[:300_000], "end"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    source, advanced = open_source(str(tmp_path / "a.jsonl"), parse_arguments([]), RowOptions()), []
    prepared = tokenize_once(source, tokenizer, Cache(tmp_path, [], print), advanced.append, 0)
    split = prepared["splits"]["train"]
    found = np.fromfile(f"{prepared['folder']}/train.bin", dtype=split["dtype"]).tolist()
    end = tokenizer.eos_token_id
    expected = [id for line in lines if line for id in [end, *whole(tokenizer, line)]]
    assert found == expected[1:] and sum(advanced) == sum(map(len, lines))
    assert split["tokens"] == len(found) and split["rows"] == len(lines)


def test_a_slow_tokenizer_with_a_large_id(tmp_path):
    """The number of tokens is small and an id is not."""

    class Gap:
        is_fast, eos_token_id, chat_template = False, None, None

        def __call__(self, texts, **_):
            return {"input_ids": [[70_000] * len(text) for text in texts]}

        def get_vocab(self):
            return {"a": 70_000}

    (tmp_path / "a.txt").write_text("aa")
    source = open_source(str(tmp_path / "a.txt"), parse_arguments([]), RowOptions())
    prepared = tokenize_once(source, Gap(), Cache(tmp_path, [], print), lambda n: None, 0)
    dtype = prepared["splits"]["train"]["dtype"]
    assert np.fromfile(f"{prepared['folder']}/train.bin", dtype=dtype).tolist() == [70_000, 70_000]


def test_an_error_in_the_text_ends_tokenization():
    def pieces():
        yield PYDOCS[:5000]
        raise UserError("line 7")

    documents = [Document("a", ["a" * 500]), Document("b", pieces())]
    with pytest.raises(UserError, match="line 7"):
        list(DocumentTokenizer(tokenizer_of("gpt2")).encode_documents(documents, print))


def test_a_text_that_cannot_be_cut_and_does_not_fit_into_memory(monkeypatch):
    """The library would end the process; a long line of words is cut, and needs little memory."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=200 << 20))
    documents = DocumentTokenizer(tokenizer_of("gpt2"))
    with pytest.raises(UserError, match=r"a.txt has 5,000,000 characters without a place"):
        list(documents.encode_documents([Document("a.txt", ["a" * 5_000_000])], print))
    words = Document("a.txt", ["the quick brown fox " * 250_000])
    assert sum(1 for _ in documents.encode_documents([words], lambda n: None)) > 30
