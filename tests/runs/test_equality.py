"""Every strategy, on any number of ranks, trains the same model: one loss curve for one global
batch.

In fp32; for bf16 see test_comparison.py.
"""

import pytest
from conftest import SAME_WORK, SPLIT, STRATEGIES, assert_close, load_exported, slow
from memory_checks import STATES


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_with_accumulation_equal_one_process_in_fp32(fp32_run, reference, strategy):
    run = fp32_run(strategy)
    assert_close(run.losses, reference.losses, 1e-5)
    # The norm of the whole gradient shows a wrong scale at once. Later it also magnifies rounding,
    # so: the first steps.
    norms, wanted = (
        [m["grad_norm"] for m in r.metrics if "loss" in m][:5] for r in (run, reference)
    )
    assert_close(norms, wanted, 1e-5)
    assert run.results["eval_loss"] == pytest.approx(reference.results["eval_loss"], rel=1e-4)


@pytest.mark.parametrize(
    "strategy", ["dp", "zero2", "fsdp", *map(slow, ("zero1", "zero3", "offload", "infinity"))]
)
def test_unequal_shares_train_the_same_model(script, reference, strategy):
    """With accumulation, short micro-batches, and an evaluation in which each token counts once."""
    flags = [*SAME_WORK, *SPLIT, "--precision", "fp32", "--strategy", strategy, "--profile_memory"]
    flags += ["--no_export", "--rank_shares", "2,1"]
    run = script(*flags, launcher="torchrun", ranks=2)
    assert_close(run.losses, reference.losses, 1e-5)
    norms, expected = ([m["grad_norm"] for m in r.metrics[:4]] for r in (run, reference))
    assert_close(norms, expected, 1e-5)
    assert run.results["eval_loss"] == pytest.approx(reference.results["eval_loss"], rel=1e-5)
    # Of four sequences rank 0 has computed three.
    assert run.results["rank_sequences"] == [3, 1]
    kinds = run.results["memory"]["device_categories_bytes_by_rank"]
    assert kinds[0]["activations"] > 2 * kinds[1]["activations"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_holds_what_is_predicted(fp32_run, strategy):
    """test_memory_prediction.py compares the prediction with simulated ranks, and the peaks."""
    memory = fp32_run(strategy).results["memory"]
    held, predicted = memory["device_categories_bytes_by_rank"][0], memory["predicted_bytes"]
    for kind in (*STATES, "activations", "logits"):
        assert held[kind] == pytest.approx(predicted[kind], rel=0.02 if kind in STATES else 0.1)


def test_infinity_stores_parameters_and_optimizer_states_on_nvme(fp32_run):
    results = fp32_run("infinity").results
    placement = {"parameters": "nvme", "gradients": "host", "optimizer": "nvme"}
    assert results["memory"]["placement"] == placement
    # The weights and two moments of both ranks.
    assert results["memory"]["nvme_bytes"] > 12 * results["parameters"]


@pytest.mark.parametrize("strategy", ["zero3", "infinity"])
def test_parameters_are_gathered_for_forward_and_again_for_backward(fp32_run, strategy):
    """In each of four micro-batches, and gradients are scattered once; a rank sends half of each."""
    results = fp32_run(strategy).results
    elements = results["communication_bytes_per_step"] / 4
    assert 12 <= elements / (results["parameters"] / 2) < 14


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_exported_model_is_the_live_one(fp32_run, strategy):
    import torch

    run = fp32_run(strategy)
    model = load_exported(run.folder / "hf")
    with torch.no_grad():
        logits = model(input_ids=torch.arange(32)[None]).logits
    assert (logits - torch.load(run.folder / "logits.pt")).abs().max() < 1e-5
    assert model.lm_head.weight is model.transformer.wte.weight  # tied, and stored once
    assert model.config.activation_function == "gelu_new"  # training computes a fused function
    names = {path.name for path in (run.folder / "hf").iterdir() if "token" not in path.name}
    assert names == {"README.md", "config.json", "generation_config.json", "model.safetensors"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sample_is_the_same_from_every_strategy(fp32_run, strategy):
    sample = fp32_run(strategy).results["sample"]
    assert sample.startswith("The") and len(sample) > 20
    # Losses agree to 1e-5, so the first tokens are equal; later ones may differ at a near tie.
    assert sample[:20] == fp32_run("dp").results["sample"][:20]
    assert f"💬 {sample}" in fp32_run(strategy).out
