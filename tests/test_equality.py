"""Every strategy, on any number of ranks, trains the same model: one loss curve for one global batch.

In fp32; for bf16 see test_comparison.py.
"""

import pytest
from conftest import SAME_WORK, SPLIT, STRATEGIES, assert_close

FP32 = [*SAME_WORK, "--precision", "fp32"]


@pytest.fixture(scope="session")
def fp32_run(script):
    """fp32_run(strategy): that strategy on two ranks; each runs once for all tests that look at it."""
    done = {}

    def run(strategy):
        if strategy not in done:
            done[strategy] = script(*FP32, *SPLIT, "--strategy", strategy, launcher="torchrun", ranks=2)
        return done[strategy]

    return run


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_with_accumulation_equal_one_process_in_fp32(fp32_run, reference, strategy):
    run = fp32_run(strategy)
    assert_close(run.losses, reference.losses, 1e-5)
    # The norm of the whole gradient shows a wrong scale at once. Later it also magnifies rounding, so: the first steps.
    norms, wanted = ([m["grad_norm"] for m in r.metrics if "loss" in m][:5] for r in (run, reference))
    assert_close(norms, wanted, 1e-5)
    assert run.results["eval_loss"] == pytest.approx(reference.results["eval_loss"], rel=1e-4)


@pytest.mark.parametrize("batch_size, accumulation, ranks", [(4, 2, 1), (4, 1, 2)])
def test_other_splits_of_the_global_batch_give_the_same_curve(script, reference, batch_size, accumulation, ranks):
    launcher = "torchrun" if ranks > 1 else "python"
    split = ["--batch_size", batch_size, "--gradient_accumulation_steps", accumulation]
    run = script(*FP32, *split, launcher=launcher, ranks=ranks)
    assert_close(run.losses, reference.losses, 1e-4)


def test_no_strategy_is_another_in_disguise(fp32_run):
    """Bytes counted from live tensors, on two ranks."""
    held = {s: fp32_run(s).results["memory"] for s in STRATEGIES}
    kinds = {s: memory["categories_bytes"] for s, memory in held.items()}
    whole = kinds["dp"]["parameters"]
    assert kinds["dp"]["gradients"] == pytest.approx(whole, rel=0.02)
    assert kinds["dp"]["optimizer"] == pytest.approx(2 * whole, rel=0.02)  # two moments
    # DeepSpeed keeps fp32 masters of its own, so half of the states is half of masters and moments.
    for strategy in ("zero1", "zero2", "zero3", "offload"):
        assert kinds[strategy]["optimizer"] == pytest.approx(3 * whole / 2, rel=0.02), strategy
        assert held[strategy]["moments_bytes"] == pytest.approx(held["dp"]["moments_bytes"] / 2, rel=0.02), strategy
    assert kinds["fsdp"]["optimizer"] == pytest.approx(whole, rel=0.02)
    for strategy in ("zero1", "zero2", "offload"):
        assert kinds[strategy]["parameters"] == pytest.approx(whole, rel=0.02), strategy
    for strategy in ("zero3", "fsdp"):
        assert kinds[strategy]["parameters"] == pytest.approx(whole / 2, rel=0.02), strategy
    for strategy in ("zero2", "zero3", "fsdp"):
        assert kinds[strategy]["gradients"] == pytest.approx(whole / 2, rel=0.02), strategy

    assert held["offload"]["placement"]["optimizer"] == "host"
    assert held["zero2"]["placement"]["optimizer"] == "device"
    assert held["infinity"]["placement"] == {"parameters": "nvme", "gradients": "host", "optimizer": "nvme"}
    assert kinds["infinity"]["optimizer"] < 0.05 * whole  # in memory only while a part of it is updated
    assert held["infinity"]["nvme_bytes"] >= 3 * whole  # masters and moments of all parameters
    assert all(held[s]["nvme_bytes"] == 0 for s in STRATEGIES if s != "infinity")
