"""Long documents are tokenized in pieces, and the ids are those of the whole document."""

import base64
import json
import random
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from streams import ids_of, tokenized
from tokenizer_zoo import CHINESE, KINDS, SPECIAL, tokenizer_of

from distributed_training.data import document_tokenizer
from distributed_training.data.document_tokenizer import DocumentTokenizer

PYDOCS = "\n".join(topics[name] for name in sorted(topics))


def whole(tokenizer, text: str) -> list[int]:
    """The ids that transformers gives for a document."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def in_pieces(tokenizer, text: str, size: int, read: int = 777) -> tuple[int, list[int]]:
    """How many pieces a text has, and their ids, tokenized one by one from the last to the first."""
    documents = DocumentTokenizer(tokenizer, size)
    pieces = list(documents.pieces(text[at : at + read] for at in range(0, len(text), read)))
    assert "".join(piece for piece, _ in pieces) == text
    ids = [documents.encode([piece])[0].tolist() for piece in reversed(pieces)]
    return len(pieces), [id for part in reversed(ids) for id in part]


def documents_of_every_sort() -> dict[str, str]:
    draw = random.Random(1)
    ends = CHINESE[-2:]
    sentences = ["".join(draw.choices(CHINESE[:-2], k=20)) + draw.choice(ends) for _ in range(1000)]
    spaces = [" ", "\n", "\t", "\r\n", "\u3000"]
    runs = (draw.choice(spaces) * draw.choice([1, 2, 300]) + "word" for _ in range(60))
    special = (draw.choice([*SPECIAL, "  ", " some words", "\n"]) for _ in range(1500))
    return {
        "prose": PYDOCS[:40_000],
        "one line": " ".join(PYDOCS.split())[:40_000],
        "one line without spaces": "".join(PYDOCS.split())[:10_000],
        "source code": Path(random.__file__).read_text(encoding="utf-8"),
        "chinese lines": "\n".join(sentences),
        "whitespace": "".join(runs),
        "special tokens": "".join(special),
    }


@pytest.mark.parametrize("kind", [make.__name__ for make in KINDS])
def test_ids_of_pieces_are_those_of_the_whole_document(kind):
    tokenizer, numbers = tokenizer_of(kind), {}
    for name, text in documents_of_every_sort().items():
        numbers[name], ids = in_pieces(tokenizer, text, 1000)
        assert ids == whole(tokenizer, text), name
    assert numbers["prose"] > 25 and numbers["chinese lines"] > 8
    # A Unigram model is not cut between words.
    assert numbers["one line"] > 15 or kind == "unigram"


def texts_without_spaces() -> dict[str, str]:
    draw = random.Random(2)
    return {
        "base64": base64.b64encode(draw.randbytes(15_000)).decode(),
        "json": "".join(f'{{"key":[{draw.random()},"abc"]}},' for _ in range(600)),
        "one letter": "a" * 20_000,
        "runs": "".join(draw.choice("abc1<") * draw.choice([1, 5, 300, 700]) for _ in range(90)),
        "special tokens": "".join(draw.choices([*SPECIAL, "nd", "aaa", "x1", "_"], k=5000)),
    }


@pytest.mark.parametrize("kind", [make.__name__ for make in KINDS])
def test_a_very_long_text_without_spaces_is_cut_between_other_characters(kind, monkeypatch):
    monkeypatch.setattr(document_tokenizer, "PATIENCE", 2)
    tokenizer, numbers = tokenizer_of(kind), {}
    for name, text in texts_without_spaces().items():
        numbers[name], ids = in_pieces(tokenizer, text, 1000)
        assert ids == whole(tokenizer, text), name
    cut = kind != "unigram"  # its tokens may depend on distant characters
    assert numbers["base64"] > 5 * cut and numbers["json"] > 5 * cut and numbers["one letter"] == 1


@pytest.mark.parametrize("kind", [make.__name__ for make in KINDS])
def test_places_in_pieces_are_those_in_the_whole_text(kind):
    tokenizer = tokenizer_of(kind)
    for name, text in documents_of_every_sort().items():
        whole = tokenizer(
            text, add_special_tokens=False, verbose=False, return_offsets_mapping=True
        )
        ids, starts, ends = DocumentTokenizer(tokenizer, 1000).encode_with_places(text)
        assert ids == whole["input_ids"], name
        assert list(zip(starts, ends, strict=True)) == whole["offset_mapping"], name


def test_pieces_of_the_real_size_do_not_depend_on_how_the_file_is_read():
    tokenizer, expected = tokenizer_of("gpt2"), whole(tokenizer_of("gpt2"), PYDOCS)
    numbers = []
    for read in (777, 100_001):
        number, ids = in_pieces(tokenizer, PYDOCS, 1 << 16, read)
        numbers.append(number)
        assert ids == expected
    assert numbers[0] == numbers[1] >= 4


def test_documents_are_in_their_order(tmp_path):
    """Short rows in one batch, an empty one, and a long one in pieces."""
    tokenizer = tokenizer_of("gpt2")
    lines = [*PYDOCS.splitlines()[:5000], "", PYDOCS[:300_000], "end"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    prepared = tokenized(tmp_path / "a.jsonl", tokenizer, tmp_path)
    split, found = prepared["splits"]["train"], ids_of(prepared).tolist()
    end = tokenizer.eos_token_id
    expected = [id for line in lines if line for id in [end, *whole(tokenizer, line)]]
    assert found == expected[1:]
    assert split["tokens"] == len(found) and split["rows"] == len(lines)


def test_a_slow_tokenizer_with_a_large_id(tmp_path):
    """The number of tokens is small and an id is not."""

    class Gap:
        is_fast, eos_token_id, chat_template = False, None, None

        def __call__(self, texts, **_):
            return {"input_ids": [[70_000] * len(text) for text in texts]}

        def get_vocab(self):
            return {"a": 70_000}

        added_tokens_decoder = property(lambda self: {})

    (tmp_path / "a.txt").write_text("aa")
    assert ids_of(tokenized(tmp_path / "a.txt", Gap(), tmp_path)).tolist() == [70_000, 70_000]


def upper_case(tokenizer):
    """A class that changes texts before the tokenizers library gets them, as CPM's does."""

    class UpperCase(type(tokenizer)):
        def __call__(self, texts, **options):
            upper = texts.upper() if isinstance(texts, str) else [text.upper() for text in texts]
            return super().__call__(upper, **options)

    tokenizer.__class__ = UpperCase


def truncating(tokenizer):
    """As its tokenizer.json says, if it was saved after a call with `truncation` and `padding`."""
    tokenizer.backend_tokenizer.enable_truncation(max_length=8)
    tokenizer.backend_tokenizer.enable_padding(length=16)


def splitting_special_tokens(tokenizer):
    tokenizer.split_special_tokens = True


@pytest.mark.parametrize("change", [upper_case, truncating, splitting_special_tokens])
def test_what_a_tokenizer_does_besides_the_tokenizers_library(change):
    tokenizer, text = tokenizer_of("gpt2"), PYDOCS[:9_000] + "<|end|>" + PYDOCS[9_000:20_000]
    plain = whole(tokenizer, text)
    change(tokenizer)
    number, ids = in_pieces(tokenizer, text, 1000)
    assert number > 10 and ids == whole(tokenizer, text)
    assert (ids == plain) is (change is truncating)
