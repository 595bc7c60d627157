"""--packing: the losses of the same examples without it, under every strategy and after a resume."""

import json

import numpy as np
import pytest


@pytest.fixture(scope="module")
def work(llama, tmp_path_factory):
    """Forty short pairs, of which four are held out."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    words = "the quick brown fox jumps over the lazy dog".split()
    random = np.random.default_rng(0)
    with open(file, "w") as stream:
        for size in random.integers(1, 5, 40):
            prompt, completion = (" ".join(random.choice(words, n)) for n in (1 + size % 3, size))
            stream.write(json.dumps({"prompt": f"{prompt}: ", "completion": completion}) + "\n")
    flags = ["--seq_length", "64", "--precision", "fp32", "--no_export", "--logging_steps", "1"]
    return ["--model", llama, "--dataset", file, *flags]


def test_losses_are_those_without_packing(script, work):
    """Three steps of a batch with all examples, and evaluations between them."""
    all_at_once = [*work, "--batch_size", "36", "--epochs", "3", "--lr", "1e-3"]
    plain, packed = script(*all_at_once), script(*all_at_once, "--packing")
    assert len(plain.losses) == 3 and plain.losses[-1] < plain.losses[0] - 0.01
    assert packed.losses == pytest.approx(plain.losses, rel=1e-6)
    evaluations = [
        [record["eval_loss"] for record in run.metrics if "eval_loss" in record]
        for run in (plain, packed)
    ]
    assert len(evaluations[0]) == 3 and evaluations[1] == pytest.approx(evaluations[0], rel=1e-6)
    assert packed.results["tokens"] == plain.results["tokens"]
    before, after = plain.results["dataset"], packed.results["dataset"]
    assert after["blocks"] < before["blocks"] / 2 and before["blocks"] == 36
    assert after["padding_share"] < 0.1 < before["padding_share"]


def test_strategies_agree_and_a_run_resumes_within_an_epoch(script, work):
    packed = [*work, "--packing", "--lr", "1e-2", "--no_eval", "--max_steps", "8"]
    whole = script(*packed, "--batch_size", "4")
    sharded = "--strategy fsdp --save_every 3 --batch_size 2".split()
    run = script(*packed, *sharded, launcher="torchrun", ranks=2)
    assert run.losses == pytest.approx(whole.losses, rel=1e-4)
    resume = ["--resume", run.folder / "checkpoints" / "step-00000003", "--batch_size", "4"]
    again = script(*packed, *resume)
    assert again.losses == pytest.approx(whole.losses[3:], rel=1e-4)
    refused = script(*[flag for flag in packed if flag != "--packing"], *resume, ok=False)
    assert refused.code == 2 and "packing" in refused.error
