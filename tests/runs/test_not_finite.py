"""A loss that is not finite leaves the weights as they are."""

import json
import subprocess
import sys

import pytest
from conftest import PROJECT


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_loss_that_is_not_finite_leaves_the_weights_in_bf16(strategy, preloaded):
    """Without DeepSpeed's own search, too: our flag makes the update do nothing."""
    command = [sys.executable, "-m", "tests.helpers.held_update", strategy]
    if preloaded:
        command = preloaded.replace(command)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {"changed": [True, False], "finite": True, "searches": 0}
