"""Several datasets with weights: the same sequences for every strategy and rank count, and resumes."""

import json

import pytest
from conftest import assert_close

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then"]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Forty pairs, and a text."""
    folder = tmp_path_factory.mktemp("mixture")
    text = " ".join(WORDS[n % 11] + WORDS[n % 7] for n in range(600))
    (folder / "text.txt").write_text(text)
    rows = [
        {"prompt": WORDS[n % 11], "completion": " ".join(WORDS[: n % 9 + 1])} for n in range(40)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"{folder / 'rows.jsonl'}:3", f"{folder / 'text.txt'}:1"]


def test_the_same_losses_on_two_ranks_and_after_a_resume(script, llama, datasets):
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
