"""Several datasets with weights: the same sequences for every strategy and rank count, and resumes."""

import json

import pytest
from conftest import assert_close

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then"]


def test_the_same_losses_on_two_ranks_and_after_a_resume(script, llama, tmp_path):
    """Of a mixture of forty pairs and a text."""
    text = " ".join(WORDS[n % 11] + WORDS[n % 7] for n in range(600))
    (tmp_path / "text.txt").write_text(text)
    pairs = [(WORDS[n % 11], " ".join(WORDS[: n % 9 + 1])) for n in range(40)]
    rows = [json.dumps({"prompt": prompt, "completion": words}) for prompt, words in pairs]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    datasets = [f"{tmp_path / 'rows.jsonl'}:3", f"{tmp_path / 'text.txt'}:1"]
    work = ["--model", llama, "--dataset", *datasets, "--seq_length", "128", "--epochs", "2"]
    work += ["--precision", "fp32", "--lr", "1e-3", "--num_samples", "20", "--no_export"]
    one = script(*work, "--batch_size", "4", "--save_every", "3")
    found = one.results["dataset"]
    assert [part["blocks_per_epoch"] for part in found["datasets"]] == [15, 5]
    assert [part["kind"] for part in found["datasets"]] == ["pair", "text"]
    assert found["kind"] == "mixed" and found["blocks"] == 20 and len(one.losses) == 10
    two = script(*work, "--batch_size", "2", "--strategy", "zero2", launcher="torchrun", ranks=2)
    assert_close(two.losses, one.losses, 1e-4)
    assert two.results["eval_loss"] == pytest.approx(one.results["eval_loss"], rel=1e-4)
    checkpoint = one.folder / "checkpoints" / "step-00000003"
    resumed = script(*work, "--batch_size", "4", "--no_save", "--resume", checkpoint)
    assert resumed.losses == one.losses[3:]
    work[work.index(datasets[0])] = datasets[0][:-1] + "4"
    other = script(*work, "--batch_size", "4", "--no_save", "--resume", checkpoint, ok=False)
    assert other.code == 2 and "another run" in other.error
