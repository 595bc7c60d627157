"""The same script under every launcher."""

import os

import pytest
from conftest import STRATEGIES

pytestmark = pytest.mark.slow

WORK = ["--seq_length", "32", "--num_samples", "8", "--batch_size", "2", "--eval_samples", "3"]


def check(run, strategy, ranks):
    assert run.results["status"] == "completed"
    assert run.results["strategy"] == strategy
    assert run.results["world_size"] == ranks
    assert run.out.count("✅ Training Complete!") == 1  # rank 0 alone prints
    assert len(run.losses) == 8 // (2 * ranks)
    assert ("=== Distributed Setup ===" in run.out) == (ranks > 1)


# torchrun × 2 with every strategy is in test_equality.py, srun in test_slurm_jobs.py.
@pytest.mark.parametrize(
    "launcher, ranks, strategy",
    [("deepspeed", 2, "zero3"), ("accelerate", 1, "zero1"), ("accelerate", 2, "fsdp")],
)
def test_launcher(script, launcher, ranks, strategy):
    before = set(os.listdir("/dev/shm"))
    run = script(*WORK, "--strategy", strategy, launcher=launcher, ranks=ranks)
    check(run, strategy, ranks)
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if name.startswith("deepspeed")]
    by_accelerate = "torchrun" if ranks > 1 else "python"
    found = by_accelerate if launcher == "accelerate" else launcher
    assert run.results["launcher"] == found


@pytest.mark.soak
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "accelerate", "srun"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_strategy_under_every_launcher(script, request, launcher, ranks, strategy):
    if launcher == "srun":
        request.getfixturevalue("slurm")
    check(script(*WORK, "--strategy", strategy, launcher=launcher, ranks=ranks), strategy, ranks)
