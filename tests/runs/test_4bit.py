"""--load_in_4bit: adapters on weights in 4 bits (QLoRA). Skipped without bitsandbytes."""

import importlib.util

import pytest
from conftest import assert_close, load_exported, skip, slow
from memory_checks import WORK, assert_as_predicted, simulate

TWO = {"launcher": "torchrun", "ranks": 2}


@pytest.fixture(scope="module")
def work(llama, text_file):
    if importlib.util.find_spec("bitsandbytes") is None:
        skip("needs bitsandbytes: pip install bitsandbytes")
    args = ["--model", llama, "--dataset", text_file, "--seq_length", "64", "--max_steps", "8"]
    return [*args, "--lr", "1e-2", "--lora_r", "4", "--eval_samples", "8"]


@pytest.fixture(scope="module")
def packed(script, work):
    args = [*work, "--load_in_4bit", "--precision", "fp32"]
    return script(*args, "--batch_size", "4", "--save_every", "4", "--merge_lora")


def test_4bit_adapters_learn_what_others_learn(script, work, packed):
    """From the same initial adapters: the first losses differ by the rounding of the weights."""
    plain = script(*work, "--precision", "fp32", "--batch_size", "4")
    assert packed.losses != plain.losses
    assert_close(packed.losses, plain.losses, 2e-2)
    held = [run.results["memory"]["categories_bytes"]["parameters"] for run in (packed, plain)]
    assert held[0] < 0.8 * held[1]  # the embeddings of this small model stay in fp32
    assert load_exported(packed.folder / "hf").num_parameters() < plain.results["parameters"]


@pytest.mark.parametrize("strategy", ["zero2", slow("offload")])
def test_a_checkpoint_goes_on_under_another_strategy(script, work, packed, strategy):
    start = ["--resume", packed.folder / "checkpoints" / "step-00000004", "--no_export"]
    args = [*work, "--load_in_4bit", "--precision", "fp32", "--batch_size", "2", *start]
    run = script(*args, "--strategy", strategy, **TWO)
    assert_close(run.losses, packed.losses[4:], 1e-4)
    if strategy == "zero2":  # the base model is a part of the checkpoint
        refused = script(*work, "--precision", "fp32", "--batch_size", "4", *start, ok=False)
        assert refused.code == 2 and "4 bits" in refused.error


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp", "zero2"])
def test_dora_on_4bit_weights(script, work, packed, strategy):
    args = [*work, "--load_in_4bit", "--precision", "fp32", "--batch_size", "2", "--lora_dora"]
    run = script(*args, "--strategy", strategy, "--no_export", **TWO)
    assert_close(run.losses[:1], packed.losses[:1], 1e-5)
    assert run.losses[-1] < run.losses[0] - 0.1


@pytest.mark.parametrize("strategy", ["dp", slow("zero2")])
def test_prediction_for_4bit(script, work, strategy):
    args = [*work[:2], "--dataset", "pydocs", *WORK, "--lora_r", "8", "--load_in_4bit"]
    run = simulate(script, *args, "--strategy", strategy, "--precision", "bf16", ranks=2)
    assert_as_predicted(run.results["memory"], strategy, "bf16")
