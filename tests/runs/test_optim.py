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


@pytest.fixture(scope="module")
def muon(script, small_gpt2, text_file):
    """8 steps of a small GPT-2 under dp in one process, with a checkpoint at step 4."""
    args = ["--model", small_gpt2, "--from_scratch", "--dataset", text_file, "--seq_length", "32"]
    args += "--max_steps 8 --no_eval --no_export --precision fp32 --optim muon --lr 2e-3 --dropout 0".split()
    return script(*args, "--batch_size", "6", "--save_every", "4"), args


RANKS = [("fsdp", 3), slow("fsdp", 2), slow("dp", 2), slow("dp", 3), slow("fsdp", 1)]


@pytest.mark.parametrize("strategy, ranks", RANKS)
def test_muon_makes_the_same_updates_from_shards(script, muon, strategy, ranks):
    """On three ranks a matrix of 64 rows has shards of 22, 22 and 20 rows."""
    whole, args = muon
    assert whole.losses[-1] < whole.losses[0] - 0.2
    args = [*args, "--strategy", strategy, "--batch_size", 6 // ranks]
    run = script(*args, launcher="torchrun", ranks=ranks)
    assert_close(run.losses, whole.losses, 1e-5)


def test_muon_resumes_exactly(script, muon):
    whole, args = muon
    start = whole.folder / "checkpoints" / "step-00000004"
    assert script(*args, "--batch_size", "6", "--resume", start).losses == whole.losses[4:]


@pytest.mark.parametrize("again", [False, slow(True)])
def test_muon_goes_on_from_shards(script, muon, again):
    """With the states that dp has saved; then exactly with its own."""
    whole, args = muon
    args = [*args, "--batch_size", "3", "--strategy", "fsdp", "--save_every", "2", "--resume"]
    run = script(*args, whole.folder / "checkpoints" / "step-00000004", **TWO)
    assert_close(run.losses, whole.losses[4:], 1e-5)
    if again:
        then = script(*args, run.folder / "checkpoints" / "step-00000006", **TWO)
        assert then.losses == run.losses[2:]


def test_states_of_muon_are_converted(muon, tmp_path):
    import torch

    from distributed_training.checkpoints.convert import OwnCheckpoint, inspect, write_torch

    source = OwnCheckpoint(muon[0].folder / "checkpoints" / "step-00000004")
    write_torch(source, tmp_path)
    states = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert states.pop("step") == 4 and "momentum_buffer" in inspect(source)
    matrices = {n for n, shape in source.shapes.items() if ".h." in n and len(shape) == 2}
    assert len(matrices) == 2 * 4 and states["momentum_buffer"].keys() == matrices
    assert (
        states["exp_avg"].keys() == states["exp_avg_sq"].keys() == source.shapes.keys() - matrices
    )


@pytest.mark.parametrize(
    "strategy, optim",
    [
        ("dp", "adafactor"),
        ("zero2", "adamw_8bit"),
        slow("zero2", "sgd"),
        ("fsdp", "muon"),
        slow("dp", "muon"),
        slow("zero2", "muon"),
        slow("zero3", "muon"),
    ],
)
def test_prediction_for_optimizers(request, script, strategy, optim):
    if optim == "adamw_8bit":
        request.getfixturevalue("bitsandbytes")
    run = simulate(script, *WORK, "--strategy", strategy, "--optim", optim, ranks=2)
    assert_as_predicted(run.results["memory"], strategy, run.results["precision"])
