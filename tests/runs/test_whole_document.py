"""Documents are tokenized in chunks, and the ids are those of the whole document."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from tokenizer_zoo import CHINESE, EMOJI, KINDS, MARKS, SPECIAL, random_text, tokenizer_of

from support.data.long_documents import DocumentTokenizer
from support.errors import UserError

ALL = [make.__name__ for make in KINDS]
SPLIT_WORDS = [
    kind for kind in ALL if kind not in ("fixed_length", "three_words", "unigram_unsplit", "quotes")
]
SOAK = (
    "roberta",
    "qwen",
    "o200k",
    "deepseek",
    "superwords",
    "unigram_unsplit",
    "scripts",
    "fixed_length",
    "quotes",
)
SOME = [pytest.param(kind, marks=[pytest.mark.soak] if kind in SOAK else []) for kind in ALL]
PYDOCS = "\n".join(topics[name] for name in sorted(topics))
SMALL = {"chunk": 100, "overlap": 100, "batch": 700}


def whole(tokenizer, text: str) -> list[int]:
    """The ids that transformers gives for a document."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def check(tokenizer, text: str, **sizes) -> tuple[int, int]:
    """Compare with the whole document; returns how many seams were looked for, and how many found."""
    documents, seams = DocumentTokenizer(tokenizer, **sizes), []
    find = documents.find_seam
    documents.find_seam = lambda left, right: seams.append(find(left, right)) or seams[-1]
    assert documents.ids(text) == whole(tokenizer, text)
    return len(seams), len(seams) - seams.count(None)


def in_parts(tokenizer, text: str, **sizes) -> tuple[int, list[int]]:
    """How many parts a text has, and their ids, tokenized one by one from the last to the first."""
    documents = DocumentTokenizer(tokenizer, **sizes)
    parts = list(documents.parts([text[at : at + 1000] for at in range(0, len(text), 1000)]))
    ids = [documents.part_ids(part) for part in reversed(parts)]
    return len(parts), [id for part in reversed(ids) for id in part]


def documents_of_every_sort() -> dict[str, str]:
    draw = random.Random(1)
    sentences = [
        "".join(draw.choices(CHINESE[:-2], k=draw.randint(3, 30))) + draw.choice(CHINESE[-2:])
        for _ in range(160)
    ]
    spaces = "".join(
        draw.choice([" ", "\n", "\t", "\r\n", "\u3000"]) * draw.choice([1, 2, 300]) + "word"
        for _ in range(30)
    )
    return {
        "prose": PYDOCS[:8000],
        "one line": " ".join(PYDOCS.split())[:5000],
        "one line without spaces": "".join(PYDOCS.split())[:5000],
        "one letter": "a" * 3000,
        "digits": "".join(draw.choices("0123456789", k=3000)),
        "thousands": ",".join(f"{draw.randrange(1000):03}" for _ in range(800)),
        "source code": Path(random.__file__).read_text(encoding="utf-8")[:6000],
        "chinese": "".join(sentences),
        "chinese without punctuation": "".join(draw.choices(CHINESE[:-2], k=1500)),
        "emojis": "".join(draw.choices(EMOJI, k=800)),
        "marks": "".join(
            "e" + "".join(draw.choices(MARKS[1:3], k=draw.choice([1, 2, 300]))) for _ in range(30)
        ),
        "whitespace": spaces,
        "spaces, and a line end far away": "word \n" + " " * 900 + "\n" + " " * 400 + "end",
        "special tokens": "".join(
            draw.choice([*SPECIAL, "  ", " some words", "\n"]) for _ in range(500)
        ),
        "capitals, and a letter without case far away": "\u6f22"
        + "A" * 900
        + "\u6f22"
        + "A" * 400
        + "b",
        "quotes": " ".join(draw.choice(['"', "it", "is", "said,", '"']) for _ in range(900)),
    }


DOCUMENTS = documents_of_every_sort()


@pytest.mark.parametrize("kind", ALL)
def test_random_documents(kind):
    found = 0
    for seed in range(6):
        overlap = (96, 128, 200, 256)[seed % 4]
        found += check(
            tokenizer_of(kind), random_text(seed, 2500), chunk=overlap, overlap=overlap, batch=1000
        )[1]
    assert found >= 8 or kind not in SPLIT_WORDS


@pytest.mark.soak
@pytest.mark.parametrize("kind", ALL)
def test_more_random_documents(kind):
    for seed in range(100, 600):
        overlap = (64, 96, 128, 200)[seed % 4]
        check(tokenizer_of(kind), random_text(seed, 6000), chunk=32, overlap=overlap, batch=2000)


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_whole_document(kind, name):
    tokenizer, text = tokenizer_of(kind), DOCUMENTS[name]
    sought, found = check(tokenizer, text, **SMALL)
    if name in ("prose", "one line", "source code") and kind in SPLIT_WORDS:
        assert found > 0.9 * sought > 30
    try:
        number, ids = in_parts(tokenizer, text, **SMALL)
    except UserError as error:  # rather than other tokens
        assert kind == "three_words" and "far away" in str(error)
        return
    assert ids == whole(tokenizer, text)
    if name == "prose" and kind in SPLIT_WORDS:
        assert number > 40


def test_chunks_of_the_real_size():
    """Also: empty documents are left out, and documents are marked."""
    for kind in ("gpt2", "llama2", "xlnet", "bert"):
        tokenizer = tokenizer_of(kind)
        texts = [PYDOCS[:150_000], "", "short", PYDOCS[150_000:300_000]]
        pieces = [
            [text[at : at + 777] for at in range(0, len(text), 777)] or [""] for text in texts
        ]
        characters, found = [], []
        for begins, ids in DocumentTokenizer(tokenizer).encode(pieces, characters.append):
            found += [[]] if begins else []
            found[-1] += ids
        assert found == [whole(tokenizer, text) for text in texts if text]
        assert sum(map(len, texts)) <= sum(characters) < 1.1 * sum(map(len, texts))
        number, ids = in_parts(tokenizer, texts[0])
        assert number == 3 and ids == found[0]


def test_a_slow_tokenizer_gets_whole_documents():
    class Slow:
        is_fast, asked = False, []

        def __call__(self, texts, **options):
            from transformers import BatchEncoding

            self.asked += texts
            return BatchEncoding({"input_ids": [[ord(c) for c in text] for text in texts]})

    tokenizer = Slow()
    assert DocumentTokenizer(tokenizer).ids(PYDOCS) == [ord(c) for c in PYDOCS]
    assert tokenizer.asked == [PYDOCS]
    [part] = DocumentTokenizer(tokenizer).parts([PYDOCS[:100_000], PYDOCS[100_000:]])
    assert part.text == PYDOCS


# ------------------------------------------------------------------------- corpora, of the real size


@cache
def corpus(name: str) -> str:
    """Python's reference, or the source code of its library, of which 20 chunks."""
    if name == "reference":
        return PYDOCS
    files = sorted(Path(random.__file__).parent.glob("*.py"))
    return "".join(file.read_text(encoding="utf-8") for file in files)[: 20 * 65_536 - 1000]


CORPORA = [
    pytest.param(
        kind, name, marks=[] if (kind, name) == ("gpt2", "reference") else [pytest.mark.soak]
    )
    for kind in ("gpt2", "llama2", "llama3", "xlnet", "bert")
    for name in ("reference", "sources")
]


@pytest.mark.parametrize("kind, name", CORPORA)
def test_corpus(kind, name):
    tokenizer, text = tokenizer_of(kind), corpus(name)
    sought, found = check(tokenizer, text)
    assert sought == found == len(text) // 65_536
    if kind == "gpt2":
        parts = {"reference": 8, "sources": 20}[name]
        assert in_parts(tokenizer, text) == (parts, whole(tokenizer, text))
