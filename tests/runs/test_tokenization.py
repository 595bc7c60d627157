"""Documents are tokenized in threads, in chunks and batches, with the ids of each whole document."""

from __future__ import annotations

import json
from pydoc_data.topics import topics

import numpy as np
import pytest
from tokenizer_zoo import random_text, tokenizer_of

from support.cli.parse import parse_arguments
from support.data.formats import RowOptions
from support.data.long_documents import DocumentTokenizer
from support.data.sources import open_source
from support.data.tokenize import tokenize_once
from support.errors import UserError
from support.files.cache import Cache

TEXTS = [topics[name] for name in sorted(topics)]


def whole(tokenizer, text: str) -> list[int]:
    """The ids that transformers gives for a document."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


@pytest.mark.parametrize("kind", ["gpt2", "llama2", "bert"])
def test_seams_in_a_short_and_in_a_long_overlap(kind):
    """Prose has seams in the short overlap, long words only in the long one."""
    tokenizer = tokenizer_of(kind)
    words = " ".join("".join(text.split())[:90] for text in TEXTS * 3)
    texts = ["".join(TEXTS)[:60_000], words, "", "short", random_text(1, 20_000)]
    documents, sizes, found = DocumentTokenizer(tokenizer, 2000, batch=9000), set(), []
    find = documents.find_seam

    def find_seam(left, right):
        seam = find(left, right)
        if seam:
            sizes.add(len(left.text))
        return seam

    documents.find_seam = find_seam
    for begins, ids in documents.encode([[text] for text in texts]):
        found += [[]] if begins else []
        found[-1] += ids
    assert found == [whole(tokenizer, text) for text in texts if text]
    assert sizes == {512, 2048}


def test_many_short_documents_are_in_their_order(tmp_path):
    tokenizer, lines = tokenizer_of("gpt2"), "\n".join(TEXTS).splitlines()[:9000]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    source = open_source(str(tmp_path / "a.jsonl"), parse_arguments([]), RowOptions())
    advanced = []
    prepared = tokenize_once(source, tokenizer, Cache(tmp_path, [], print), advanced.append, 0)
    found = np.fromfile(f"{prepared['folder']}/train.bin", dtype=prepared["dtype"]).tolist()
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    expected = [id for line in lines if line for id in [*end, *whole(tokenizer, line)]]
    assert found == expected[len(end) :]
    assert sum(advanced) == sum(map(len, lines))


def test_a_vocabulary_with_a_gap_has_ids_that_fit(tmp_path):
    """The number of tokens is small and an id is not."""

    class Gap:
        is_fast, eos_token_id, chat_template, added_tokens_decoder = False, None, None, {}

        def __call__(self, texts, **_):
            from transformers import BatchEncoding

            return BatchEncoding({"input_ids": [[70_000] * len(text) for text in texts]})

        def __len__(self):
            return 1

        def get_vocab(self):
            return {"a": 70_000}

    (tmp_path / "a.txt").write_text("aa")
    source = open_source(str(tmp_path / "a.txt"), parse_arguments([]), RowOptions())
    prepared = tokenize_once(source, Gap(), Cache(tmp_path, [], print), lambda n: None, 0)
    found = np.fromfile(f"{prepared['folder']}/train.bin", dtype=prepared["dtype"])
    assert found.tolist() == [70_000, 70_000]


def test_an_error_in_the_text_ends_tokenization():
    def pieces():
        yield TEXTS[0] * 9
        raise UserError("line 7")

    with pytest.raises(UserError, match="line 7"):
        list(DocumentTokenizer(tokenizer_of("gpt2"), batch=100).encode([["a" * 500], pieces()]))
