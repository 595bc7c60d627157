"""Several datasets in one order: how many sequences each contributes, which, and what is read."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from support.cli.datasets import Dataset, parse_datasets
from support.cli.parse import parse_arguments
from support.cli.run_file import as_yaml
from support.data.batches import TokenFile, stack_examples
from support.data.mixture import Mixture, shares_of
from support.errors import UserError
from support.labels import IGNORED


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


class Part:
    """Sequences n * 1000 + i, of i % 5 + 1 tokens."""

    def __init__(self, number, size):
        self.number, self.num_sequences = number, size

    def read(self, indices):
        rows = []
        for index in indices:
            assert 0 <= index < self.num_sequences
            ids = np.full(index % 5 + 1, self.number * 1000 + index)
            rows.append((ids, ids))
        return stack_examples(rows, 64, fixed=False)

    def tokens(self, indices):
        return int(sum(index % 5 + 1 for index in indices))

    def take(self, count):
        return Part(self.number, min(count, self.num_sequences))


def names(mixture, order):
    return mixture.read(order)[0][:, 0].tolist()


def test_every_epoch_has_the_shares_and_nothing_is_repeated_before_all_was_used():
    mixture = Mixture.of([Part(1, 6), Part(2, 25)], [Fraction(6), Fraction(10)])
    assert mixture.counts == (6, 10) and mixture.num_sequences == 16
    epochs = [names(mixture, mixture.epoch_order(seed=7, epoch=n)) for n in range(1, 6)]
    for epoch in epochs:
        assert sorted(name for name in epoch if name < 2000) == list(range(1000, 1006))
        assert len(epoch) == 16 and epoch != sorted(epoch)
    second = [name for epoch in epochs for name in epoch if name >= 2000]
    assert sorted(second) == sorted([*range(2000, 2025)] * 2)
    assert len(set(map(tuple, epochs))) == 5
    assert names(mixture, mixture.epoch_order(7, 2)) == epochs[1]
    assert names(mixture, mixture.epoch_order(8, 2)) != epochs[1]


def test_without_weights_an_epoch_has_everything_once():
    mixture = Mixture.of([Part(1, 3), Part(2, 0), Part(3, 5)])
    everything = [*range(1000, 1003), *range(3000, 3005)]
    assert sorted(names(mixture, mixture.epoch_order(0, 3))) == everything
    assert names(mixture, np.arange(8)) == everything
    fewer = mixture.take(4)
    assert fewer.counts == (2, 0, 2) and names(fewer, np.arange(4)) == [1000, 1001, 3000, 3001]


def test_a_dataset_that_is_not_used_keeps_its_place():
    mixture = Mixture.of([Part(1, 1000), Part(2, 9)], [Fraction(9999), Fraction(1)])
    assert mixture.counts == (1000, 0) and mixture.take(100).counts == (100, 0)


def test_sequences_of_different_lengths_and_with_positions(tmp_path):
    np.arange(32, dtype=np.uint16).tofile(tmp_path / "a.bin")
    text = TokenFile(str(tmp_path / "a.bin"), "uint16", 16, 0, 2, end_of_text=20)
    mixture = Mixture.of([Part(1, 5), text])
    inputs, labels, positions = mixture.read(np.array([6, 2]))
    assert inputs.shape == (2, 16) and inputs[0].tolist() == list(range(16, 32))
    assert inputs[1, :3].tolist() == [1002] * 3 and (labels[1, 3:] == IGNORED).all()
    assert positions[0].tolist() == [*range(5), *range(11)]
    assert positions[1, :3].tolist() == [0, 1, 2]
    assert mixture.tokens(np.array([6, 2])) == 16 + 3
    assert mixture.read(np.array([2]))[2] is None
    assert mixture.read(np.array([], dtype=np.int64))[0].shape == (0, 8)
    torch.testing.assert_close(mixture.read(np.array([5]))[2], torch.arange(16)[None])


def test_names_and_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes:3").write_text("x")
    assert parse_datasets(["a:0.7", "org/b:.3"]) == (Dataset("a", "0.7"), Dataset("org/b", ".3"))
    assert parse_datasets(["notes:3"]) == (Dataset("notes:3"),)
    assert parse_datasets(["a", "b"]) == (Dataset("a"), Dataset("b"))
    for wrong, said in (
        (["a:1"], "a weight is for several"),
        (["a:1", "b"], "b has no weight"),
        (["a:1", "b:0"], "weight is 0"),
        (["a:1", "a:2"], "twice"),
    ):
        with pytest.raises(UserError, match=said):
            parse_datasets(wrong)


def test_a_run_file_cannot_add_flags(tmp_path):
    (tmp_path / "run.yaml").write_text("dataset: [a.txt, --lr=9]")
    with pytest.raises(UserError, match="dataset cannot be"):
        parse_arguments(["--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize("line", ["dataset: [a.txt:0.7, pydocs:.3]", "dataset: pydocs"])
def test_datasets_in_a_run_file(tmp_path, line):
    (tmp_path / "run.yaml").write_text(line)
    args = parse_arguments(["--config", str(tmp_path / "run.yaml"), "--max_steps", "1"])
    (tmp_path / "again.yaml").write_text(as_yaml(args))
    again = parse_arguments(["--config", str(tmp_path / "again.yaml")])
    assert (again.dataset, again.mixture) == (args.dataset, args.mixture)
    assert args.mixture == (
        () if "[" not in line else (Dataset("a.txt", "0.7"), Dataset("pydocs", ".3"))
    )
    other = parse_arguments(["--config", str(tmp_path / "run.yaml"), "--dataset", "b.txt"])
    assert other.dataset == "b.txt" and not other.mixture
