"""--isolate_documents: losses as if each document of a sequence were processed alone."""

import json

import numpy as np
import pytest

LENGTH, END = 64, 0  # END is the id of <|end|>
WORK = ["--seq_length", str(LENGTH), "--precision", "fp32", "--isolate_documents", "--no_export"]


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Documents of 3 to 90 tokens, so that sequences of 64 tokens begin and end within them."""
    file = tmp_path_factory.mktemp("documents") / "rows.jsonl"
    words = "the quick brown fox jumps over the lazy dog".split()
    random = np.random.default_rng(0)
    rows = [" ".join(random.choice(words, size)) for size in random.integers(1, 25, 200)]
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return file


def loss_of_documents(folder, stream, indices):
    """transformers' loss of each part of a sequence that belongs to one document, on its own."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for index in indices:
        sequence = stream[index * LENGTH : (index + 1) * LENGTH]
        for part in np.split(sequence, np.flatnonzero(sequence == END) + 1):
            if len(part) > 1:
                ids = torch.tensor(part[None].astype(np.int64))
                with torch.no_grad():
                    total += model(input_ids=ids, labels=ids).loss.item() * (len(part) - 1)
                count += len(part) - 1
    return total / count


def test_loss_is_that_of_the_documents_alone(script, llama, documents, tmp_path):
    """In a step whose batch has all sequences, and in an evaluation."""
    still = ["--lr", "1e-30", "--max_steps", "1", "--batch_size", "8", "--num_samples", "8"]
    work = ["--model", llama, "--dataset", documents, *WORK]
    run = script(*work, *still, "--validation_split", "0.2", "--cache_dir", tmp_path)
    [file] = tmp_path.glob("*/train.bin")
    stream = np.fromfile(file, dtype="uint16")
    held_out = len(stream) // LENGTH // 5
    first = len(stream) // LENGTH - held_out
    assert run.losses[0] == pytest.approx(loss_of_documents(llama, stream, range(8)), rel=1e-5)
    assert run.results["eval_loss"] == pytest.approx(
        loss_of_documents(llama, stream, range(first, first + min(8, held_out))), rel=1e-5
    )
    with_neighbors = script(*work, *still, "--no_isolate_documents", "--no_eval")
    assert abs(with_neighbors.losses[0] / run.losses[0] - 1) > 1e-4


def test_strategies_agree_and_another_setting_is_not_resumed(script, llama, documents, tmp_path):
    work = ["--model", llama, "--dataset", documents, *WORK, "--no_eval", "--lr", "1e-2"]
    whole = script(*work, "--batch_size", "4", "--max_steps", "6", "--gradient_checkpointing")
    sharded = [*work, "--batch_size", "2", "--strategy", "zero3"]
    start = [*sharded, "--max_steps", "6", "--output_dir", tmp_path / "run", "--save_every", "3"]
    run = script(*start, launcher="torchrun", ranks=2, folder=tmp_path / "run")
    assert run.losses == pytest.approx(whole.losses, rel=1e-4)
    assert whole.losses[-1] < whole.losses[0] - 0.1
    resumed = ["--resume", tmp_path / "run" / "checkpoints" / "step-00000003", "--max_steps", "6"]
    again = script(*work, "--batch_size", "4", *resumed)
    assert again.losses[-1] == pytest.approx(whole.losses[-1], rel=1e-4)
    refused = script(*work, "--batch_size", "4", *resumed, "--no_isolate_documents", ok=False)
    assert refused.code == 2 and "isolate_documents" in refused.error
