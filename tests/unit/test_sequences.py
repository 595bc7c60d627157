"""Which sequences a run reads: --packing, in a cached corpus and in a stream, and several datasets in
one order.
"""

import gzip
import itertools
import json
import os
from fractions import Fraction
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from streams import stream_of, tokenized
from tokenizer_zoo import tokenizer_of

from distributed_training.cli.parse import parse_arguments, parse_datasets
from distributed_training.data import opening
from distributed_training.data.corpus import open_split, split_sequences
from distributed_training.data.mixture import mix
from distributed_training.data.packing import pack
from distributed_training.data.sequences import Padding, Sequences, shares_of
from distributed_training.data.token_file import TokenFile
from distributed_training.errors import TrainingError, UserError
from distributed_training.loss_chunks import IGNORED
from distributed_training.settings.data import Dataset
from real_model_example import split_over_ranks

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


def sections(packing: bool, *flags: str):
    """The settings of data and training."""
    flags = (*"--batch_size 4 --seed 0 --seq_length".split(), str(LENGTH), *flags)
    settings = parse_arguments([*flags, *["--packing"] * packing])
    return settings.data, settings.training


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


@pytest.mark.parametrize(
    "seq_length, compiles, lengths",
    [
        (2048, True, [512, 1024, 1536, 2048]),
        (1000, True, [256, 512, 768, 1000]),
        (300, True, [128, 256, 300]),
        (64, True, [64]),
        (48, True, [48]),
        (256, False, [*range(64, 257, 64)]),
    ],
)
def test_lengths_of_micro_batches_are_few_if_each_is_compiled(seq_length, compiles, lengths):
    padding = Padding.of(seq_length, False, "cuda", compiles)
    assert sorted(set(padding.length(np.arange(1, seq_length + 1)).tolist())) == lengths
    assert all(padding.length(n) >= n for n in range(1, seq_length + 1))
    whole = Padding.of(seq_length, True, "cuda", compiles)
    assert whole.length(1) == seq_length


@pytest.mark.parametrize(
    "strategy, simulated, flag, longest",
    [
        ("dp", False, "--compile", 64),
        ("fsdp", False, "--compile", 64),
        ("infinity", False, "--compile", 256),
        ("infinity", False, "--compile_loss", 64),  # no layer is compiled
        ("dp", True, "--compile", 256),
    ],
)
def test_strategies_with_a_graph_for_each_layer_have_one_length(
    monkeypatch, strategy, simulated, flag, longest
):
    """Infinity's graphs would exceed torch's limit of 8 for each function."""
    settings = parse_arguments(["--strategy", strategy, flag, "--no_eval"])
    opened = []
    monkeypatch.setattr(
        opening, "open_datasets", lambda *args: opened.append(args[-1]) or MagicMock()
    )
    ctx = SimpleNamespace(simulated=simulated, device=torch.device("cpu"))
    opening.Datasets.open(settings, ctx, None, 256)
    assert opened[0].length(50) == longest


def test_packed_sequences_have_the_same_examples(pairs, tmp_path):
    prepared = tokenized(pairs, tokenizer_of("gpt2"), tmp_path)
    (plain, held_out, facts), (packed, held_out_packed, packed_facts) = (
        split_sequences(prepared, *sections(packing), PADDING) for packing in (False, True)
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
    ctx = SimpleNamespace(rank=0, world_size=1)
    for file, share in zip((plain, packed), shares, strict=True):
        order = file.epoch_order(0, 1)
        steps = list(split_over_ranks(file, order, itertools.repeat([4]), 1, ctx))
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
        assert resumed.state["kind"] == "pair"  # known before the next row, as in the whole run
        again = resumed.step_batches(cpu)
        for batch in batches[step + 1 : step + 4]:
            assert all(map(torch.equal, next(again).micro_batches[0], batch))
        resumed.summary()


def test_packing_is_refused_for_text(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "word " * 200}) + "\n")
    prepared = tokenized(tmp_path / "rows.jsonl", tokenizer_of("gpt2"), tmp_path)
    with pytest.raises(UserError, match="use --isolate_documents"):
        open_split(prepared, "train", sections(packing=True)[0], PADDING)
    with pytest.raises(UserError, match="always isolates"):
        parse_arguments(["--packing", "--no_isolate_documents"])


def test_a_percentage_is_held_out_only_without_a_validation_split(pairs, tmp_path):
    quarter = sections(False, "--validation_split_percentage", "25")
    counts = []
    for flags in ([], ["--validation_file", str(pairs)]):
        prepared = tokenized(pairs, tokenizer_of("gpt2"), tmp_path, *flags)
        train, validation, _ = split_sequences(prepared, *quarter, PADDING)
        counts.append((train.num_sequences, validation.num_sequences))
    assert counts == [(30, 10), (40, 40)]


@pytest.mark.parametrize("packing", [False, True])
def test_nothing_is_held_out_with_a_share_of_0(pairs, tmp_path, packing):
    prepared = tokenized(pairs, tokenizer_of("gpt2"), tmp_path)
    nothing = sections(packing, "--validation_split", "0")
    train, validation, facts = split_sequences(prepared, *nothing, PADDING)
    assert len(train.ranges) == 40 and validation.num_sequences == 0
    assert facts["validation"]["blocks"] == 0


@pytest.mark.parametrize(
    "weights, sizes, most, counts",
    [
        (["0.7", "0.3"], [70, 1000], None, [70, 30]),
        (["7", "3"], [1000, 30], None, [70, 30]),
        (["1", "1", "1"], [10, 10, 10], 10, [4, 3, 3]),
        (["1", "1"], [3, 5], 100, [3, 3]),
    ],
)
def test_dataset_weights_become_sequences_per_epoch(weights, sizes, most, counts):
    assert shares_of([Fraction(weight) for weight in weights], sizes, most) == counts


def part(folder, number, size):
    """Sequences of 1 + i % 5 tokens number * 1000 + i, on disk."""
    lengths = np.arange(size) % 5 + 1
    path = folder / f"{number}.bin"
    np.repeat(number * 1000 + np.arange(size), lengths).astype(np.int32).tofile(path)
    ends = lengths.cumsum()
    ranges = np.stack([ends - lengths, ends], axis=1)
    file = TokenFile(str(path), "int32", int(lengths.sum()))
    return Sequences.of(file, ranges, Padding(64, 8))


def names(mixture, order):
    return mixture.read(order)[0][:, 0].tolist()


def test_every_epoch_has_the_shares_and_nothing_is_repeated_before_all_was_used(tmp_path):
    mixture = mix([part(tmp_path, 1, 6), part(tmp_path, 2, 25)], [Fraction(6), Fraction(10)])
    assert mixture.shares == ((6, 6), (25, 10)) and mixture.num_sequences == 16
    epochs = [names(mixture, mixture.epoch_order(seed=7, epoch=n)) for n in range(1, 6)]
    for epoch in epochs:
        assert sorted(name for name in epoch if name < 2000) == list(range(1000, 1006))
        assert len(epoch) == 16 and epoch != sorted(epoch)
    second = [name for epoch in epochs for name in epoch if name >= 2000]
    assert sorted(second) == sorted([*range(2000, 2025)] * 2)
    assert len(set(map(tuple, epochs))) == 5
    assert names(mixture, mixture.epoch_order(7, 2)) == epochs[1]
    assert names(mixture, mixture.epoch_order(8, 2)) != epochs[1]


def test_without_weights_an_epoch_has_everything_once(tmp_path):
    mixture = mix([part(tmp_path, 1, 3), part(tmp_path, 2, 0), part(tmp_path, 3, 5)])
    everything = [*range(1000, 1003), *range(3000, 3005)]
    assert sorted(names(mixture, mixture.epoch_order(0, 3))) == everything
    assert names(mixture, np.arange(8)) == everything
    assert mixture.take(99) is mixture  # --num_samples larger than the data uses all of it
    fewer = mixture.take(4)
    assert fewer.num_sequences == 4 and names(fewer, np.arange(4)) == [1000, 1001, 3000, 3001]


def test_sequences_of_different_lengths_and_with_positions(tmp_path):
    np.arange(32, dtype=np.uint16).tofile(tmp_path / "a.bin")
    ranges = np.array([[0, 16], [16, 32]])
    file = TokenFile(str(tmp_path / "a.bin"), "uint16", 32, end_of_text=20)
    text = Sequences.of(file, ranges, Padding(16, 8))
    mixture = mix([part(tmp_path, 1, 5), text])
    inputs, labels, positions = mixture.read(np.array([6, 2]))
    assert inputs.shape == (2, 16) and inputs[0].tolist() == list(range(16, 32))
    assert inputs[1, :3].tolist() == [1002] * 3 and (labels[1, 3:] == IGNORED).all()
    assert positions[0].tolist() == [*range(5), *range(11)]
    assert positions[1, :3].tolist() == [0, 1, 2]
    assert mixture.tokens(np.array([6, 2])) == 16 + 3
    assert mixture.read(np.array([2]))[2] is None
    assert mixture.read(np.array([], dtype=np.int64))[0].shape == (0, 8)
    assert mixture.read(np.array([5]))[2].tolist() == [[*range(16)]]


def test_names_and_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes:3").write_text("x")
    assert parse_datasets(["a:0.7", "org/b:.3"]) == (Dataset("a", "0.7"), Dataset("org/b", ".3"))
    assert parse_datasets(["notes:3"]) == (Dataset("notes:3"),)
    assert parse_datasets(["a", "b"]) == (Dataset("a"), Dataset("b"))
    for wrong, said in (
        (["a:1"], "of several datasets"),
        (["a:1", "b"], "all or none have a weight"),
        (["a:1", "b:0"], "weight above 0"),
        (["a:1", "a:2"], "twice"),
    ):
        with pytest.raises(UserError, match=said):
            parse_datasets(wrong)


# ------------------------------------------------------------- files that change during training

CHANGES = {
    "cut": lambda path, size: os.truncate(path, size * 2 // 5),
    "emptied": lambda path, size: os.truncate(path, 0),
    "longer": lambda path, size: os.truncate(path, size + 4),
}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_tokens_that_change_after_they_were_verified_are_not_trained_on(
    pairs, tmp_path, change, packing
):
    prepared = tokenized(pairs, tokenizer_of("gpt2"), tmp_path / "cache")
    some = sections(packing, "--validation_split", "0.3")
    opened = split_sequences(prepared, *some, PADDING)[:2]
    file = f"{prepared['folder']}/train.bin"
    for sequences in opened:
        sequences.read(np.arange(2))
    change(file, os.stat(file).st_size)
    for sequences in opened:  # any of them, also one that is read from what is left
        with pytest.raises(TrainingError, match=f"{file} was changed"):
            sequences.read(np.arange(1))


def test_a_cache_that_is_removed_during_training_is_still_read(pairs, tmp_path):
    prepared = tokenized(pairs, tokenizer_of("gpt2"), tmp_path / "cache")
    sequences, _ = open_split(prepared, "train", sections(False)[0], PADDING)
    before = sequences.read(np.arange(40))
    for file in os.scandir(prepared["folder"]):
        os.unlink(file)
    assert all(map(torch.equal, sequences.read(np.arange(40))[:2], before[:2]))
    with pytest.raises(TrainingError, match=r"index\.bin"):
        open_split(prepared, "train", sections(False)[0], PADDING)


def test_an_index_that_changes_after_it_was_verified(pairs, tmp_path):
    prepared = tokenized(pairs, tokenizer_of("gpt2"), tmp_path / "cache")
    os.truncate(f"{prepared['folder']}/train.index.bin", 96)
    with pytest.raises(TrainingError, match=r"train\.index\.bin"):
        open_split(prepared, "train", sections(False)[0], PADDING)


ROW = json.dumps({"text": "the quick brown fox " * 40}) + "\n"
TEXT = "the quick brown fox \u00e9\n" * 800
RANDOM = "".join(json.dumps({"text": os.urandom(200).hex()}) + "\n" for _ in range(60))
STREAMED = {  # name: content, and the bytes that are left
    "line.jsonl": (ROW.encode() * 40, len(ROW) * 20),
    "half.jsonl": (ROW.encode() * 40, len(ROW) * 20 + 50),
    "text.txt": (TEXT.encode(), len(TEXT) // 2),
    "character.txt": (TEXT.encode(), TEXT.encode()[:10_000].rindex("\u00e9".encode()) + 1),
    "rows.jsonl.gz": (gzip.compress(RANDOM.encode()), 8_000),
}


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("read", [False, True])
def test_a_streamed_file_that_is_cut_or_removed(tmp_path, name, read):
    """While it is read, and before it is read again."""
    content, left = STREAMED[name]
    file = tmp_path / name
    file.write_bytes(content)
    stream = stream_of(file, tokenizer_of("gpt2"), max_steps=10_000)
    steps = stream.step_batches(torch.device("cpu"))
    if read:
        next(steps)
    os.truncate(file, left)
    with pytest.raises(TrainingError, match=f"{file} has changed"):
        for _ in steps:
            pass


def test_a_streamed_file_that_is_removed_or_touched(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(ROW * 20)
    stream = stream_of(file, tokenizer_of("gpt2"), max_steps=10_000)
    steps = stream.step_batches(torch.device("cpu"))
    for number, step in enumerate(steps):
        if number == 3:
            os.utime(file, (1, 1))
        if step.state["passes"] > 1:
            break
    file.unlink()
    with pytest.raises(TrainingError, match="cannot be read any more"):
        for _ in steps:
            pass
