"""--prove: the ways it compares, and what counts as equal."""

import math

import pytest

from tools.prove.prove import SEQUENCES, ways_of
from tools.prove.prove_difference import TOLERANCES, describe_problem


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16])
def test_each_way_makes_one_step_on_all_sequences(ranks):
    ways = ways_of("zero3", ranks)
    for way, count in zip(ways, [1, 1, ranks, 1, 1], strict=True):
        batch = way.flags["batch_size"] * way.flags.get("gradient_accumulation_steps", 1)
        assert batch * count == way.flags["num_samples"] >= SEQUENCES
        assert way.flags.get("strategy", "zero3") == ("zero3" if way is ways[2] else "dp")


@pytest.mark.parametrize("part", TOLERANCES)
@pytest.mark.parametrize("factor, is_equal", [(0.9, True), (1.1, False), (math.nan, False)])
def test_a_difference_above_the_tolerance_is_named(part, factor, is_equal):
    differences = dict.fromkeys(TOLERANCES, 0.0) | {part: factor * TOLERANCES[part]}
    line = describe_problem("a way", differences, "wte.weight")
    assert not line if is_equal else (f"in {part};" in line and "wte.weight" in line)
    assert "adds the balancing" not in line
    named = describe_problem("a way", differences, "wte.weight", "the balancing loss")
    assert is_equal or "Its loss adds the balancing loss" in named
