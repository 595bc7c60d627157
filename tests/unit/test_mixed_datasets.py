"""Several datasets in one order: how many sequences each contributes, which, and what is read."""

from fractions import Fraction

import numpy as np
import pytest

from support.cli.arguments import Dataset
from support.cli.parse import parse_datasets
from support.data.mixture import mix
from support.data.sequences import Padding, Sequences, shares_of
from support.errors import UserError
from support.units import IGNORED


@pytest.mark.parametrize(
    "weights, sizes, most, counts",
    [
        (["0.7", "0.3"], [70, 1000], None, [70, 30]),
        (["7", "3"], [1000, 30], None, [70, 30]),
        (["1", "1", "1"], [10, 10, 10], 10, [4, 3, 3]),
        (["0.9", "0.1"], [9, 100], 5, [5, 0]),
        (["1", "1"], [3, 5], 100, [3, 3]),
    ],
)
def test_shares(weights, sizes, most, counts):
    assert shares_of([Fraction(weight) for weight in weights], sizes, most) == counts


def part(folder, number, size):
    """Sequences of 1 + i % 5 tokens number * 1000 + i, on disk."""
    lengths = np.arange(size) % 5 + 1
    path = folder / f"{number}.bin"
    np.repeat(number * 1000 + np.arange(size), lengths).astype(np.int32).tofile(path)
    ends = lengths.cumsum()
    ranges = np.stack([ends - lengths, ends], axis=1)
    return Sequences.of((str(path), "int32", None), ranges, Padding(64, 8))


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
    text = Sequences.of((str(tmp_path / "a.bin"), "uint16", 20), ranges, Padding(16, 8))
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
