"""Settings, advice and names of files that follow from the flags."""

import platform
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.cli.ds_config import bucket_sizes
from support.memory.architectures import find_architecture
from support.memory.estimate import predict
from support.memory.fit import Limits, fitting_split, remedies
from support.memory.workload import Workload
from support.report.summary import say_files
from support.units import GB


def test_advice_for_any_batch_is_there_at_once():
    """After an out-of-memory error, where a signal can no longer end the process."""
    started = time.monotonic()
    work = Workload(find_architecture("gpt2"), world_size=1, batch_size=10**12, seq_length=512)
    ways = remedies(work, "dp", Limits(16 * GB))
    assert time.monotonic() - started < 2
    assert any(flags.startswith("--batch_size ") for flags in ways)


@pytest.mark.parametrize("batch_size", [1, 12, 97])
def test_the_split_that_fits_is_the_largest(batch_size):
    work = Workload(find_architecture("gpt2"), world_size=2, batch_size=batch_size, seq_length=256)
    for memory in (3, 6, 9, 20, 60):
        limits = Limits(memory * GB)
        splits = [
            replace(work, batch_size=size, accumulation=batch_size // size)
            for size in range(batch_size, 0, -1)
            if batch_size % size == 0
        ]
        wanted = next((split for split in splits if limits.hold(predict(split, "zero2"))), None)
        assert fitting_split(work, "zero2", limits) == wanted


@pytest.mark.parametrize("nodes, host_is_named", [(1, False), (2, True)])
def test_results_of_several_machines_name_their_host(nodes, host_is_named):
    lines = []
    console = SimpleNamespace(print0=lines.append)
    say_files(SimpleNamespace(nodes=nodes, console=console, simulated=False), Path("my x/a.json"))
    assert (platform.node() in lines[0]) == host_is_named
    assert lines[1].endswith("python scripts/report.py 'my x'")


def test_bucket_sizes_of_any_model():
    assert all(isinstance(size, int) for size in bucket_sizes(10**8, 10**20, False).values())
