"""--load_in_4bit: adapters on weights in 4 bits (QLoRA). Skipped without bitsandbytes."""

import importlib.util
import shutil

import pytest
from conftest import assert_close, load_exported, skip, slow
from memory_checks import WORK, assert_as_predicted, simulate

from distributed_training.errors import MissingRequirement
from distributed_training.strategies.table import STRATEGIES

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
    return script(*args, "--batch_size", "6", "--save_every", "4", "--merge_lora")


def test_4bit_adapters_learn_what_others_learn(script, work, packed):
    """From the same initial adapters: the first losses differ by the rounding of the weights."""
    plain = script(*work, "--precision", "fp32", "--batch_size", "6")
    assert packed.losses != plain.losses
    assert_close(packed.losses, plain.losses, 2e-2)
    held = [run.results["memory"]["categories_bytes"]["parameters"] for run in (packed, plain)]
    assert held[0] < 0.8 * held[1]  # the embeddings of this small model stay in fp32
    assert load_exported(packed.folder / "hf").num_parameters() < plain.results["parameters"]


@pytest.mark.parametrize("strategy", ["zero2", slow("offload")])
def test_a_checkpoint_goes_on_under_another_strategy(script, work, packed, strategy):
    start = ["--resume", packed.folder / "checkpoints" / "step-00000004", "--no_export"]
    args = [*work, "--load_in_4bit", "--precision", "fp32", "--batch_size", "3", *start]
    run = script(*args, "--strategy", strategy, **TWO)
    assert_close(run.losses, packed.losses[4:], 1e-4)
    if strategy == "zero2":  # the base model is a part of the checkpoint
        refused = script(*work, "--precision", "fp32", "--batch_size", "6", *start, ok=False)
        assert refused.code == 2 and "4 bits" in refused.error


@pytest.fixture(scope="module")
def fsdp():
    try:
        STRATEGIES["fsdp"].check_4bit()
    except MissingRequirement as error:
        skip(str(error))
    return "fsdp"


@pytest.fixture(scope="module")
def sharded(script, work, packed, fsdp):
    args = [*work, "--load_in_4bit", "--precision", "fp32", "--batch_size", "3", "--save_every"]
    return script(*args, "4", "--merge_lora", "--strategy", fsdp, **TWO)


def test_4bit_weights_that_are_sharded_train_as_whole_ones(packed, sharded):
    assert_close(sharded.losses, packed.losses, 1e-5)
    norms = [[r["grad_norm"] for r in run.metrics if "loss" in r] for run in (sharded, packed)]
    assert_close(*norms, 1e-5)
    assert sharded.results["eval_loss"] == pytest.approx(packed.results["eval_loss"], rel=1e-5)
    merged = [load_exported(run.folder / "hf").state_dict() for run in (packed, sharded)]
    assert merged[0].keys() == merged[1].keys()
    for name, weight in merged[0].items():
        # AdamW enlarges the rounding of a gradient that is nearly 0: a few elements differ more.
        assert (merged[1][name] - weight).norm() <= 1e-4 * weight.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy, ranks", [("fsdp", 3), ("dp", 1)])
def test_a_run_with_sharded_4bit_weights_resumes(script, work, packed, sharded, strategy, ranks):
    """Of 3 ranks the last one has shorter shards of the packed weights than the others."""
    start = ["--resume", sharded.folder / "checkpoints" / "step-00000004", "--no_export"]
    args = [*work, "--load_in_4bit", "--precision", "fp32", "--batch_size", 6 // ranks, *start]
    launch = {"launcher": "torchrun", "ranks": ranks} if ranks > 1 else {}
    run = script(*args, "--strategy", strategy, **launch)
    assert_close(run.losses, packed.losses[4:], 1e-5)


WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}


@pytest.mark.slow
def test_two_ranks_have_half_of_the_4bit_weights(script, work, tiny_tokenizer, tmp_path, fsdp):
    """In a model whose layers are large enough: the scales and tables stay whole."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=300, max_position_embeddings=64, **WIDE, **heads)
    )
    model.save_pretrained(tmp_path / "wide")
    shutil.copytree(tiny_tokenizer, tmp_path / "wide", dirs_exist_ok=True)
    outside = sum(p.numel() for n, p in model.named_parameters() if not n.endswith("proj.weight"))
    flags = ["--load_in_4bit", "--precision", "fp32", "--batch_size", "1", "--max_steps", "1"]
    flags = ["--model", tmp_path / "wide", *work[2:], *flags, "--no_eval", "--no_export"]
    held = {}
    for strategy in ("dp", fsdp):
        results = script(*flags, "--strategy", strategy, **TWO).results
        memory, others = results["memory"], 4 * (outside + results["trainable_parameters"])
        for rank in memory["device_categories_bytes_by_rank"]:
            assert memory["predicted_bytes"]["parameters"] == pytest.approx(
                rank["parameters"], rel=0.05
            )
        shares = 2 if strategy == "fsdp" else 1
        held[strategy] = [
            rank["parameters"] - others / shares
            for rank in memory["device_categories_bytes_by_rank"]
        ]
    assert held["fsdp"] == pytest.approx([held["dp"][0] / 2] * 2, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp", "zero2"])
def test_dora_on_4bit_weights(script, work, packed, strategy):
    args = [*work, "--load_in_4bit", "--precision", "fp32", "--batch_size", "3", "--lora_dora"]
    run = script(*args, "--strategy", strategy, "--no_export", **TWO)
    assert_close(run.losses[:1], packed.losses[:1], 1e-5)
    assert run.losses[-1] < run.losses[0] - 0.1


@pytest.mark.parametrize("strategy", ["dp", slow("zero2"), slow("fsdp")])
def test_prediction_for_4bit(script, work, request, strategy):
    if strategy == "fsdp":
        request.getfixturevalue("fsdp")
    args = [*work[:2], "--dataset", "pydocs", *WORK, "--lora_r", "8", "--load_in_4bit"]
    run = simulate(script, *args, "--strategy", strategy, "--precision", "bf16", ranks=2)
    assert_as_predicted(run.results["memory"], strategy, "bf16")
