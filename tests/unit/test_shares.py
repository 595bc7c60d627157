"""--rank_shares: the sequences of each rank."""

import argparse

import numpy as np
import pytest

from distributed_training import console
from distributed_training.cli.parse import parse_arguments
from distributed_training.rank_shares import divide, of_each_rank
from distributed_training.run.rounded_shares import are_exact, report
from distributed_training.settings import flag_types


@pytest.mark.parametrize("count", [0, 1, 5, 8, 17])
def test_equal_shares_are_those_of_array_split(count):
    expected = [len(part) for part in np.array_split(np.arange(count), 4)]
    assert list(divide(count, [1.0] * 4)) == expected


@pytest.mark.parametrize(
    ("count", "shares", "expected"),
    [
        (12, (2, 1), (8, 4)),
        (14, (4, 2, 1), (8, 4, 2)),
        (2, (3, 1), (2, 0)),
        (3, (1, 0.7, 0.5), (2, 1, 0)),
    ],
)
def test_each_sequence_goes_to_the_rank_that_finishes_it_first(count, shares, expected):
    assert divide(count, shares) == expected


def test_each_rank_gets_the_least_whatever_its_share():
    assert divide(4, (100, 1, 1), at_least=1) == (2, 1, 1)


def test_a_rank_gets_no_more_than_fits_its_memory():
    assert divide(12, (1, 1, 1), at_most=(2, 9, 9)) == (2, 5, 5)
    with pytest.raises(ValueError):
        divide(12, (1, 1, 1), at_most=(2, 4, 5))
    with pytest.raises(ValueError):
        divide(2, (1, 1, 1), at_least=1)


def test_no_division_ends_earlier():
    """Against all divisions of 9 sequences over three ranks."""
    shares = (1.0, 0.62, 0.31)

    def seconds(sequences):
        return max(n / share for n, share in zip(sequences, shares, strict=True))

    every = [(a, b, 9 - a - b) for a in range(10) for b in range(10 - a)]
    assert seconds(divide(9, shares)) == min(map(seconds, every))


@pytest.mark.parametrize("rows", [(8, 4), (5, 2, 1), (3, 3, 3), (1, 7)])
def test_a_short_micro_batch_has_no_more_sequences_of_a_rank_than_a_whole_one(rows):
    for count in range(sum(rows) + 1):
        short = divide(count, rows)
        assert all(few <= many for few, many in zip(short, rows, strict=True))
    assert divide(sum(rows), rows) == rows


def test_shares_are_given_for_ranks_or_nodes():
    assert of_each_rank(None, [0, 0]) == of_each_rank("auto", [0, 0]) == (1, 1)
    assert of_each_rank((3, 1), [0, 0]) == (3, 1)
    assert of_each_rank((3, 1), [0, 0, 1]) == (3, 3, 1)
    for given in ((1, 2), (1, 2, 3, 4)):
        with pytest.raises(ValueError):
            of_each_rank(given, [0, 0, 0])


def test_whole_sequences_may_differ_from_the_shares():
    for shares, sequences in (((3, 1), (6, 2)), ((1, 1), (4, 4)), ((0.3, 0.1), (3, 1))):
        assert are_exact(shares, sequences)
    for shares, sequences in (((3, 1), (1, 1)), ((1.5, 1), (5, 3))):
        assert not are_exact(shares, sequences)


def test_a_notice_has_the_shares_and_the_whole_sequences(monkeypatch, capsys):
    monkeypatch.setattr(console, "is_main", True)
    training = parse_arguments(["--rank_shares", "3,1"]).training
    report(training, [6, 2], node_of_rank=[0, 0])
    assert not capsys.readouterr().out
    report(training, [1, 1], node_of_rank=[0, 0])
    assert "--rank_shares 3,1 of the 2 sequences" in (said := capsys.readouterr().out)
    assert "1,1 in whole sequences" in said


@pytest.mark.parametrize("text", ["", "0,1", "-1,2", "2:1", "auto,1", "nan,1", "inf,1", "1,,2"])
def test_shares_that_are_no_positive_numbers_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        flag_types.shares(text)
    assert flag_types.shares("3, 1.5") == (3, 1.5)
