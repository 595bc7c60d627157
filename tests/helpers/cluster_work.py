"""What the tests on several hosts share: the work, its reference, a run file, the generator.

tests/conftest.py loads this module as a plugin, so its fixtures are at hand in every test.
"""

import subprocess
import sys
import time

import psutil
import pytest
from conftest import PROJECT, SCRIPT

# Global batch of 4 blocks on two ranks; 10 steps.
WORK = [
    *"--seq_length 32 --num_samples 40 --batch_size 2 --dropout 0 --no_eval --precision fp32".split(),
    *"--no_export".split(),
]
RUN_FILE = """
training:
  seq_length: 32
  num_samples: 40
  batch_size: 2
  dropout: 0
  eval: false
  mixed_precision: no
  no_export: true
  learning_rate: 5e-4
distributed:
  use_deepspeed: true
  strategy: zero1
"""


@pytest.fixture(scope="session")
def alone(script):
    """The same work in one process."""
    return script(*[*WORK, "--batch_size", "4"])


def wait_for(condition, seconds, what):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.2)


def setup(*args, cwd):
    """Run scripts/distributed_setup.py; returns exit code and output."""
    command = [sys.executable, PROJECT / "scripts" / "distributed_setup.py", *map(str, args)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def run_file(tmp_path):
    """A folder with a config.yaml of the guide's shape."""
    (tmp_path / "config.yaml").write_text(RUN_FILE)
    return tmp_path


def reached(process, text):
    while line := process.stdout.readline():
        if text in line:
            return
    pytest.fail(process.stderr.read())


def ranks_of(launcher) -> list[psutil.Process]:
    """The ranks that a launcher has started, by rank."""
    children = psutil.Process(launcher.pid).children(recursive=True)
    ranks = [child for child in children if str(SCRIPT) in child.cmdline()]
    return sorted(ranks, key=lambda child: int(child.environ()["RANK"]))
