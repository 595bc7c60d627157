"""Task 7: what the ranks saw, and the answer about the peak; tests/runs/test_lab.py runs programs."""

import pytest

from tools.lab.tasks.sharding.check import judge_all, judge_peak


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (7.75, ""),
        (7.8, ""),
        (8, "peak_with_all_gradients"),  # as if the first block's gradient were reduced
        (8.25, "peak"),
        (24, "peak_of_dp"),
        (18.75, "peak_without_reshard"),
        (6, "peak_of_shards"),
        (6.75, "peak_without_one_block"),
        (5, "peak_without_reduced_gradients"),
        (4.75, "peak_without_shards"),
        (100, "peak"),
    ],
)
def test_a_wrong_peak_is_named(answer, name):
    assert judge_peak(answer).name == name


def seen():
    """What the three ranks of a right program write: three blocks of six parameters."""
    whole = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    parts = [whole[:2], whole[2:4], whole[4:]]
    same = {
        **{"shards": [2] * 3, "whole": [whole] * 3, "shards_in_memory": 6, "gathered_right": True},
        **{"alive_after_forward": 0, "calls_of_forward": 3, "calls": 6, "most_alive": 2},
        **{"gradients_in_memory": 6, "right": [whole] * 3, "own": [[0.0] * 6] * 3},
    }
    return [same | {"parts": [part] * 3, "gradients": [part] * 3} for part in parts]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, ""),
        # All blocks are gathered again before the backward pass of any.
        ({"most_alive": 3}, "gathered_too_early"),
        ({"gradients": [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]] * 3}, "whole_gradient"),
        ({"shards_in_memory": 18}, "view_of_the_whole"),
        ({"gradients_in_memory": 18}, "view_of_the_gradient"),
        ({"parts": [[1.0, 2.0]] * 3}, "same_part"),
        ({"gathered_right": False}, "gathered_wrong"),
        ({"late_binding": True}, "late_binding"),
    ],
)
def test_what_the_ranks_saw_is_judged(changed, name):
    findings = judge_all([rank | changed for rank in seen()], "")
    assert findings[-1].name == name and all(one.is_right for one in findings[:-1])


def test_ranks_that_differ_are_named():
    ranks = seen()
    assert judge_all([*ranks[:2], {}], "what it printed")[0].name == "error"
    assert judge_all([*ranks[1:], ranks[0]], "")[-1].name == "other_parts"
