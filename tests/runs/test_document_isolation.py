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
    losses, targets = [], []
    for index in indices:
        sequence = stream[index * LENGTH : (index + 1) * LENGTH]
        for part in np.split(sequence, np.flatnonzero(sequence == END) + 1):
            if len(part) > 1:
                ids = torch.tensor(part[None].astype(np.int64))
                with torch.no_grad():
                    losses.append(model(input_ids=ids, labels=ids).loss.item())
                targets.append(len(part) - 1)
    return np.average(losses, weights=targets)


def test_loss_is_that_of_the_documents_alone(script, llama, documents, tmp_path):
    """In a step whose batch has all sequences, and in an evaluation. (test_packed_examples.py has
    the losses of other strategies, for which sequences look the same.)
    """
    work = ["--model", llama, "--dataset", documents, *WORK]
    work += "--lr 1e-30 --max_steps 1 --batch_size 8 --num_samples 8 --save_every 1".split()
    run = script(*work, "--validation_split", "0.2", "--cache_dir", tmp_path)
    [file] = tmp_path.glob("*/train.bin")
    stream = np.fromfile(file, dtype="uint16")
    held_out = len(stream) // LENGTH // 5
    first = len(stream) // LENGTH - held_out
    evaluated = range(first, first + min(8, held_out))
    for found, indices in ((run.losses[0], range(8)), (run.results["eval_loss"], evaluated)):
        assert found == pytest.approx(loss_of_documents(llama, stream, indices), rel=1e-5)
    with_neighbors = script(*work, "--no_isolate_documents", "--no_eval")
    assert abs(with_neighbors.losses[0] / run.losses[0] - 1) > 1e-4
    resume = ["--resume", run.folder / "checkpoints" / "step-00000001", "--no_isolate_documents"]
    refused = script(*work, *resume, ok=False)
    assert refused.code == 2 and "isolate_documents" in refused.error
