"""Every strategy, on any number of ranks, trains the same model: one loss curve for one global
batch.

In fp32; for bf16 see test_comparison.py.
"""

import pytest
from conftest import SAME_WORK, SPLIT, STRATEGIES, assert_close, load_exported


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


def test_accumulation_in_one_process_gives_the_same_curve(script, reference):
    split = ["--batch_size", "4", "--gradient_accumulation_steps", "2"]
    run = script(*SAME_WORK, "--precision", "fp32", *split)
    assert_close(run.losses, reference.losses, 1e-4)


# What each of two ranks stores, as a share of dp's parameters in fp32; None: see below.
# DeepSpeed's optimizer states include fp32 masters.
STORED = {
    "dp": (1, 1, 2),
    "zero1": (1, None, 1.5),
    "zero2": (1, 0.5, 1.5),
    "zero3": (0.5, 0.5, 1.5),
    "offload": (1, None, 1.5),
    "fsdp": (0.5, 0.5, 1),
}


def test_no_strategy_is_another_in_disguise(fp32_run):
    """Bytes counted from live tensors, on two ranks."""
    held = {s: fp32_run(s).results["memory"] for s in STRATEGIES}
    kinds = {s: memory["categories_bytes"] for s, memory in held.items()}
    whole = kinds["dp"]["parameters"]
    for strategy, shares in STORED.items():
        for kind, share in zip(("parameters", "gradients", "optimizer"), shares, strict=True):
            if share:
                expected = pytest.approx(share * whole, rel=0.02)
                assert kinds[strategy][kind] == expected, (strategy, kind)
    half = pytest.approx(held["dp"]["moments_bytes"] / 2, rel=0.02)
    assert all(held[s]["moments_bytes"] == half for s in ("zero1", "zero2", "zero3", "offload"))
    assert held["offload"]["placement"]["optimizer"] == "host"
    assert held["zero2"]["placement"]["optimizer"] == "device"
    on_nvme = {"parameters": "nvme", "gradients": "host", "optimizer": "nvme"}
    assert held["infinity"]["placement"] == on_nvme
    # In memory only while a part of it is updated; on NVMe masters and moments of all parameters.
    assert kinds["infinity"]["optimizer"] < 0.05 * whole
    assert held["infinity"]["nvme_bytes"] >= 3 * whole
    assert all(held[s]["nvme_bytes"] == 0 for s in STRATEGIES if s != "infinity")


IN_SOAK = [
    pytest.param(strategy, marks=pytest.mark.soak)
    for strategy in ("zero1", "zero2", "offload", "infinity", "fsdp")
]


@pytest.mark.parametrize("strategy", ["dp", "zero3", *IN_SOAK])
def test_simulated_rank_holds_what_a_real_one_does(script, fp32_run, strategy):
    """Rank 0 of two: model states within 2 %, activations within 10 %."""
    args = [*SAME_WORK[:2], "--dropout", "0", *SPLIT, "--precision", "fp32"]
    run = script(*args, "--strategy", strategy, "--simulate_gpus", "2")
    real, simulated = (
        found.results["memory"]["categories_bytes"] for found in (fp32_run(strategy), run)
    )
    for kind in ("parameters", "gradients", "optimizer"):
        assert simulated[kind] == pytest.approx(real[kind], rel=0.02), kind
    if strategy != "infinity":  # on a CPU what it reads from NVMe counts as activations
        assert simulated["activations"] == pytest.approx(real["activations"], rel=0.1)


def logits(model):
    import torch

    with torch.no_grad():
        return model(input_ids=torch.arange(32)[None]).logits


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_exported_model_is_the_live_one(fp32_run, strategy):
    import torch

    run = fp32_run(strategy)
    model = load_exported(run.folder / "hf")
    assert (logits(model) - torch.load(run.folder / "logits.pt")).abs().max() < 1e-5
    assert model.lm_head.weight is model.transformer.wte.weight  # tied, and stored once
    assert sorted(
        path.name for path in (run.folder / "hf").iterdir() if "token" not in path.name
    ) == ["README.md", "config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sample_is_the_same_from_every_strategy(fp32_run, strategy):
    sample = fp32_run(strategy).results["sample"]
    assert sample.startswith("The") and len(sample) > 50
    # Losses agree to 1e-5, so the first tokens are equal; later ones may differ at a near tie.
    assert sample[:20] == fp32_run("dp").results["sample"][:20]
    assert f"💬 {sample}" in fp32_run(strategy).out
