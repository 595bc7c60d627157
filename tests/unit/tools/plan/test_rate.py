"""What a plan reads of a completed run: values that cannot be are named, or left out."""

import json

import pytest
from written_runs import RESULTS

from distributed_training.errors import UserError
from tools.plan.rate import Used, read_completed_run

DAMAGED = [None, -1, 0, "a", [], {}, True, 10**400, float("nan"), float("inf"), [None], {"a": []}]


@pytest.fixture
def read(tmp_path):
    """read(**values) -> results.json as a plan reads it."""

    def write_and_read(**values):
        text = json.dumps({**RESULTS, "tokens": 96, **values})
        (tmp_path / "results.json").write_text(text)
        return read_completed_run(str(tmp_path))[1]

    return write_and_read


def test_durations_that_cannot_be_are_ignored(read):
    """A clock that was set back an hour; before, the plan subtracted the hour from each job."""
    found = read(seconds_to_first_step=-3586.2, checkpoint_seconds=[2.0, -1.0, 0.5])
    assert found["seconds_to_first_step"] is None and found["checkpoint_seconds"] == [2.0, 0.5]
    assert read(seconds_to_first_step=13.8)["seconds_to_first_step"] == 13.8
    assert read(checkpoint_seconds=[-1.0])["checkpoint_seconds"] == []


@pytest.mark.parametrize("key", Used.__annotations__)
def test_a_damaged_value_is_named(read, key):
    for value in DAMAGED:
        try:
            read(**{key: value})
        except UserError as error:
            assert key in str(error) or "trained no step" in str(error)
