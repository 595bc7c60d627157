"""The fault of a published DeepSpeed release: shown where pip has a network, else left out."""

import os
import subprocess
import sys

import pytest
from conftest import PROJECT

from distributed_training.errors import TrainingError
from tools.faults import deepspeed_release


def show(**env):
    """Run the program; returns its exit code and output."""
    command = [sys.executable, "-m", "tools.faults.deepspeed_release"]
    variables = {**os.environ, **env}
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, env=variables)
    return done.returncode, done.stdout + done.stderr


def test_without_a_network_pip_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(TrainingError, match=r"needs a network.*deepspeed==0\.18\.2"):
        deepspeed_release.download(tmp_path)


def test_norms_that_agree_up_to_rounding_are_equal():
    assert deepspeed_release.differing_steps([(0.7789, 0.7789), (0.4751, 0.4752)]) == []
    assert deepspeed_release.differing_steps([(0.7789, 0.7789), (0.4751, 0.2776)]) == [2]


@pytest.mark.slow
def test_without_a_network_nothing_is_shown_and_nothing_fails():
    code, out = show(PIP_NO_INDEX="1")
    assert code == 0 and "DeepSpeed 0.18.2 is not shown" in out and "✅" not in out


@pytest.mark.slow
def test_the_release_is_refused_and_its_gradients_are_wrong():
    code, out = show()
    if "is not shown" in out:
        pytest.skip("pip cannot download DeepSpeed 0.18.2")
    assert code == 0, out
    assert "❌ tools/faults/deepspeed_loop.py, DeepSpeed 0.18.2" in out
    assert "✅ Refused by the project" in out
    assert "✅ Without the refusal, DeepSpeed 0.18.2: ❌ B: the losses" in out
    assert "✅ Without the refusal, DeepSpeed 0.19" in out and "✅ Equal losses" in out
