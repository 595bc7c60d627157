"""--optim: the strategies train the same model with each optimizer that they support, and resume it.

The tests with bitsandbytes are skipped where it is not installed.
"""

import functools
import importlib.util

import pytest
from conftest import assert_close, skip, slow, soak
from memory_checks import WORK, assert_as_predicted, simulate

TWO = {"launcher": "torchrun", "ranks": 2}
STEPS = ["--seq_length", "64", "--max_steps", "8", "--no_eval", "--no_export"]


@pytest.fixture(scope="module")
def bitsandbytes():
    if importlib.util.find_spec("bitsandbytes") is None:
        skip("needs bitsandbytes: pip install bitsandbytes")


@pytest.fixture(scope="module")
def half_way(script):
    """half_way(optim) trains 8 steps under dp in one process, and saves a checkpoint at step 4."""

    @functools.cache
    def run(optim):
        args = [*STEPS, "--optim", optim, "--precision", "fp32", "--weight_decay", "1"]
        run = script(*args, "--batch_size", "4", "--save_every", "4")
        start = ["--resume", run.folder / "checkpoints" / "step-00000004"]
        return run, [*args, "--batch_size", "2", *start]

    return run


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp", slow("offload"), soak("zero1")])
def test_sgd_is_the_same_under_every_strategy(script, half_way, strategy):
    whole, args = half_way("sgd")
    assert whole.losses[-1] < whole.losses[0] - 0.2
    run = script(*args, "--strategy", strategy, **TWO)
    assert_close(run.losses, whole.losses[4:], 1e-5)
    assert run.results["memory"]["moments_bytes"] < 100


def test_adafactor_resumes_on_two_ranks(script, half_way):
    whole, args = half_way("adafactor")
    assert whole.losses[-1] < whole.losses[0] - 0.2
    assert_close(script(*args, **TWO).losses, whole.losses[4:], 1e-5)
    parameters = whole.results["memory"]["categories_bytes"]["parameters"]
    assert whole.results["memory"]["moments_bytes"] < 0.02 * parameters


@pytest.mark.parametrize("strategy", ["zero3", slow("dp"), soak("zero1"), soak("zero2")])
def test_8bit_adamw_resumes_under_another_strategy(script, half_way, bitsandbytes, strategy):
    """Blocks of 8-bit values begin elsewhere in DeepSpeed's flat tensors, so they round otherwise."""
    whole, args = half_way("adamw_8bit")
    run = script(*args, "--strategy", strategy, **TWO)
    assert_close(run.losses, whole.losses[4:], 1e-5 if strategy == "dp" else 2e-3)
    adamw, _ = half_way("adamw")
    assert_close(whole.losses, adamw.losses, 1e-2)


def test_adamw_continues_with_8bit_moments(script, half_way, bitsandbytes):
    whole, args = half_way("adamw")
    run = script(*args, "--batch_size", "4", "--optim", "adamw_8bit")
    assert_close(run.losses, whole.losses[4:], 2e-3)


@pytest.mark.parametrize(
    "strategy, optim", [("dp", "adafactor"), ("zero2", "adamw_8bit"), slow("zero2", "sgd")]
)
def test_prediction_for_optimizers(request, script, strategy, optim):
    if optim == "adamw_8bit":
        request.getfixturevalue("bitsandbytes")
    run = simulate(script, *WORK, "--strategy", strategy, "--optim", optim, ranks=2)
    assert_as_predicted(run.results["memory"], strategy, run.results["precision"])
