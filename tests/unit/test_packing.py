"""--packing: which examples share a sequence, in a cached corpus and in a stream."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from streams import stream_of, tokenized
from tokenizer_zoo import tokenizer_of

from support.cli.parse import parse_arguments
from support.data.corpus import open_split, split_sequences
from support.data.packing import pack
from support.data.sequences import Padding
from support.errors import UserError
from support.units import IGNORED

LENGTH = 64


def test_every_example_is_in_one_sequence_that_has_room_for_it():
    count = 3000
    lengths = np.random.default_rng(count).integers(1, 257, count)
    lengths[0] = 256
    members, ends = pack(lengths, 256)
    sequences = np.split(members, ends[:-1])
    assert sorted(members) == list(range(count)) and ends[-1] == count
    assert all(lengths[members].sum() <= 256 for members in sequences)
    assert len(sequences) <= 11 / 9 * np.ceil(lengths.sum() / 256) + 4
    firsts = [members[0] for members in sequences]
    assert firsts == sorted(firsts) == [min(members) for members in sequences]


@pytest.fixture
def pairs(tmp_path):
    """Forty short pairs, each with a number of its own."""
    rows = [
        {"prompt": f"the number {i}: ", "completion": "word " * (1 + 7 * i % 9)} for i in range(40)
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def arguments(packing: bool, **flags):
    args = parse_arguments(["--batch_size", "4", "--seq_length", str(LENGTH)])
    return args.replace(packing=packing, seed=0, **flags)


PADDING = Padding(LENGTH, 8)


def examples_of(inputs, labels, positions) -> list[tuple[list, list]]:
    """(ids, labels) of each example in a micro-batch, without the padding."""
    examples = []
    for rows in zip(inputs.tolist(), labels.tolist(), positions.tolist(), strict=True):
        for token, label, position in zip(*rows, strict=True):
            if position == 0:
                examples.append(([], []))
            examples[-1][0].append(token)
            examples[-1][1].append(label)
    # Each token of the padding is a document of one token.
    return [(ids, labels) for ids, labels in examples if len(ids) > 1]


def test_packed_sequences_have_the_same_examples(pairs, tmp_path):
    prepared = tokenized(pairs, tokenizer_of("gpt2"), tmp_path)
    (plain, held_out, facts), (packed, held_out_packed, packed_facts) = (
        split_sequences(prepared, arguments(packing), PADDING) for packing in (False, True)
    )
    for alone, together in ((plain, packed), (held_out, held_out_packed)):
        everything = np.arange(together.num_sequences)
        inputs, labels, _ = alone.read(np.arange(alone.num_sequences))
        rows = zip(alone.lengths, inputs.tolist(), labels.tolist(), strict=True)
        wanted = [(ids[:length], own[:length]) for length, ids, own in rows]
        assert sorted(examples_of(*together.read(everything))) == sorted(wanted)
        assert together.tokens(everything) == alone.tokens(np.arange(alone.num_sequences))
    assert held_out.num_sequences == 4 and packed.num_sequences < plain.num_sequences / 1.5
    shares = [f["train"]["padding_share"] for f in (facts, packed_facts)]
    assert shares[1] < 0.1 < shares[0]
    # The share is that of the batches of the first epoch.
    from real_model_example import split_over_ranks

    ctx = SimpleNamespace(rank=0, world_size=1)

    for file, share in zip((plain, packed), shares, strict=True):
        order = file.epoch_order(0, 1)
        steps = list(split_over_ranks(file, order, 4, 1, ctx))
        size = sum(step.micro_batches[0][0].shape[1] * 4 for step in steps[:-1])
        last = file.num_sequences - 4 * (len(steps) - 1)
        size += steps[-1].micro_batches[0][0].shape[1] * last
        assert 1 - sum(step.tokens for step in steps) / size == pytest.approx(share, abs=1e-4)


def test_a_packed_stream_has_each_example_once_in_a_pass(pairs):
    """And continues from each of its states with the same sequences."""
    tokenizer, cpu = tokenizer_of("gpt2"), torch.device("cpu")
    flags = {"packing": True, "seq_length": LENGTH, "shuffle_buffer": 8}
    stream = stream_of(pairs, tokenizer, **flags)
    batches, places = [], []
    for step in stream.step_batches(cpu):
        batches.append(step.micro_batches[0])
        places.append(json.loads(json.dumps(stream.progress())))
        if step.state["passes"] >= 2:
            break
    found = [tuple(ids) for batch in batches for ids, _ in examples_of(*batch)]
    stream.summary()
    assert max(map(found.count, found)) <= 3 and len(set(found)) == 40
    assert min(map(found.count, found)) >= 1
    assert all(((positions == 0) <= (labels == IGNORED)).all() for _, labels, positions in batches)
    for step in (0, 3, 6):
        resumed = stream_of(pairs, tokenizer, **flags)
        resumed.resume(places[step])
        again = resumed.step_batches(cpu)
        for batch in batches[step + 1 : step + 4]:
            assert all(map(torch.equal, next(again).micro_batches[0], batch))
        resumed.summary()


def test_packing_is_refused_for_text(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "word " * 200}) + "\n")
    tokenizer = tokenizer_of("gpt2")
    prepared = tokenized(tmp_path / "rows.jsonl", tokenizer, tmp_path)
    with pytest.raises(UserError, match="use --isolate_documents"):
        open_split(prepared, "train", arguments(packing=True), PADDING)
    stream = stream_of(tmp_path / "rows.jsonl", tokenizer, packing=True)
    with pytest.raises(UserError, match="use --isolate_documents"):
        next(stream.step_batches(torch.device("cpu")))
    with pytest.raises(UserError, match="always isolates"):
        parse_arguments(["--packing", "--no_isolate_documents"])


def test_a_percentage_is_held_out_only_without_a_validation_split(pairs, tmp_path):
    args = arguments(packing=False, validation_split_percentage=25)
    counts = []
    for flags in ([], ["--validation_file", str(pairs)]):
        prepared = tokenized(pairs, tokenizer_of("gpt2"), tmp_path, *flags)
        train, validation, _ = split_sequences(prepared, args, PADDING)
        counts.append((train.num_sequences, validation.num_sequences))
    assert counts == [(30, 10), (40, 40)]
