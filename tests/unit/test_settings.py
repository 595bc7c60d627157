"""Settings, advice and names of files that follow from the flags."""

import time
from dataclasses import replace

import pytest

from support.memory.architectures import find_architecture
from support.memory.estimate import predict
from support.memory.fit import Limits, fitting_split, remedies
from support.memory.workload import Workload
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
        assert fitting_split(work, "zero2", limits.hold) == wanted
