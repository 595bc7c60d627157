"""Bits per byte: the bytes of the text whose tokens have a loss."""

import json
import math
from pydoc_data.topics import topics

import numpy as np
import pytest
from streams import ids_of, tokenized
from tokenizer_zoo import CHINESE, KINDS, tokenizer_of
from tokenizers import decoders

from distributed_training.cli.parse import parse_arguments
from distributed_training.data.corpus import open_split, split_sequences
from distributed_training.data.facts import bits_per_byte
from distributed_training.data.sequences import Padding

LENGTH = 48
TEXT = topics["assert"][:3000] + CHINESE + " 1234 \U0001f600 end"


def sections(*flags: str):
    settings = parse_arguments(["--seq_length", str(LENGTH), *flags])
    return settings.data, settings.training


def write_rows(folder, rows):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("kind", ["gpt2", "qwen"])
def test_the_bytes_of_a_tokenizer_of_bytes_are_those_of_its_tokens(kind, tmp_path):
    """Of every sequence, without its first token, which has no loss."""
    tokenizer = tokenizer_of(kind)
    prepared = tokenized(write_rows(tmp_path, [{"text": TEXT}]), tokenizer, tmp_path)
    sequences, _ = open_split(prepared, "train", sections()[0], Padding(LENGTH, 8))
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    ids, compared = ids_of(prepared), 0
    for number in range(sequences.num_sequences):
        targets = ids[number * LENGTH + 1 : (number + 1) * LENGTH]
        text = tokenizer.decode(targets)
        if "\ufffd" not in text:  # a sequence may begin or end within a character
            found = sequences.select(np.array([number])).targets()
            assert found == {"tokens": LENGTH - 1, "bytes": len(text.encode())}, number
            compared += 1
    assert compared > 5


@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
def test_the_bytes_of_a_split_are_those_of_its_text(kind, tmp_path):
    """Also if a tokenizer adds a space, normalizes the text, or does not know its words."""
    texts = [TEXT, "A second document, \ufb01ne.", "a <|user|> b"]
    file = write_rows(tmp_path, [{"text": text} for text in texts])
    prepared = tokenized(file, tokenizer_of(kind), tmp_path)
    sizes = np.fromfile(f"{prepared['folder']}/train.bytes.bin")
    whole = sum(len(text.encode()) for text in texts)
    assert sizes[ids_of(prepared)].sum() == pytest.approx(whole, rel=1e-12)


def test_a_loss_in_bits_per_byte_does_not_depend_on_the_tokenizer(tmp_path):
    """A model that needs the same bits for the text, under tokenizers with other tokens."""
    file, found = write_rows(tmp_path, [{"text": TEXT}]), []
    for kind in ("gpt2", "llama2"):
        prepared = tokenized(file, tokenizer_of(kind), tmp_path)
        sequences, _ = open_split(prepared, "train", sections()[0], Padding(LENGTH, 8))
        targets = sequences.targets()
        nats = 0.5 * targets["bytes"] * math.log(2)  # half a bit for each byte
        found.append((nats / targets["tokens"], bits_per_byte(nats / targets["tokens"], targets)))
    (loss, bits), (other_loss, other_bits) = found
    assert bits == pytest.approx(other_bits) == pytest.approx(0.5)
    assert abs(loss - other_loss) > 0.1 * loss
    assert bits_per_byte(1.0, None) is None


@pytest.mark.parametrize("packing", [(), ("--packing",)])
def test_of_examples_only_the_trained_tokens_count(packing, tmp_path):
    answers = ["Two bytes: \u00e9.", "Yes, of the answers.", "no" * 9]
    rows = [{"prompt": "A question? " * 3, "completion": answer} for answer in answers]
    prepared = tokenized(write_rows(tmp_path, rows), tokenizer_of("gpt2"), tmp_path)
    nothing = sections("--validation_split", "0", *packing)
    sequences = split_sequences(prepared, *nothing, Padding(LENGTH, 8))[0]
    ids = [tokenizer_of("gpt2")(answer)["input_ids"] for answer in answers]
    assert sequences.targets() == {
        "tokens": sum(map(len, ids)) + len(answers),  # and the end-of-text tokens, without bytes
        "bytes": sum(len(answer.encode()) for answer in answers),
    }


def test_of_a_conversation_the_answers_count(tmp_path):
    said = [
        ("user", "Hi, you!"),
        ("assistant", "Good morning."),
        ("user", "And"),
        ("assistant", "so."),
    ]
    messages = [{"role": role, "content": text} for role, text in said]
    prepared = tokenized(
        write_rows(tmp_path, [{"messages": messages}]), tokenizer_of("qwen"), tmp_path
    )
    nothing = sections("--validation_split", "0")
    sequences = split_sequences(prepared, *nothing, Padding(256, 8))[0]
    assert sequences.targets()["bytes"] == len("Good morning.so.")
