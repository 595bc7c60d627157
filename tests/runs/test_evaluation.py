"""The evaluation's loss is what Hugging Face computes, every token counted once."""

from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from tokenizer_zoo import tokenizer_of
from transformers import AutoModelForCausalLM, AutoTokenizer

SEQ_LENGTH, BLOCKS = 48, 7  # a number of blocks that 2 does not divide


def loss_by_transformers(model: str, rows) -> float:
    """The mean loss of blocks, which all have the same number of targets."""
    model = AutoModelForCausalLM.from_pretrained(model).float().eval()
    with torch.no_grad():
        losses = [model(input_ids=row, labels=row).loss.item() for row in torch.tensor(rows)]
    return np.mean(losses)


@pytest.fixture(scope="module")
def expected(llama, text_file):
    """The loss over the blocks that the documentation promises: the last tenth of the corpus."""
    tokenizer = AutoTokenizer.from_pretrained(llama)
    ids = tokenizer(text_file.read_text(), add_special_tokens=False)["input_ids"]
    total = len(ids) // SEQ_LENGTH
    blocks = np.array(ids[: total * SEQ_LENGTH]).reshape(total, 1, SEQ_LENGTH)
    return loss_by_transformers(llama, blocks[total - total // 10 :][:BLOCKS])


@pytest.mark.parametrize("strategy, ranks", [("dp", 1), ("dp", 2), ("zero3", 2), ("fsdp", 2)])
def test_evaluation_equals_transformers(script, llama, text_file, expected, strategy, ranks):
    run = script(
        *f"--model {llama} --dataset {text_file} --seq_length {SEQ_LENGTH} --eval_only".split(),
        *f"--eval_samples {BLOCKS} --batch_size 2 --precision fp32 --strategy {strategy}".split(),
        launcher="torchrun" if ranks > 1 else "python",
        ranks=ranks,
    )
    assert "validation samples" in run.out
    assert run.results["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert run.results["perplexity"] == pytest.approx(np.exp(expected), rel=1e-4)
    assert run.losses == []  # nothing was trained
    assert run.metrics == [
        {"step": 0, "eval_loss": run.results["eval_loss"], "perplexity": run.results["perplexity"]}
    ]


def test_perplexity_of_a_whole_document(script, llama, tmp_path):
    """A document of several chunks and a Llama-style tokenizer."""
    folder, file = tmp_path / "model", tmp_path / "text.txt"
    model = AutoModelForCausalLM.from_pretrained(llama)
    tokenizer = tokenizer_of("llama2")
    torch.manual_seed(1)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():  # losses that differ much between tokens
        for weight in model.parameters():
            weight.mul_(4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file.write_text("\n".join(topics[name] for name in sorted(topics))[:150_000])

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(file.read_text(), add_special_tokens=False, verbose=False)["input_ids"]
    blocks = np.array(ids[: len(ids) // 128 * 128]).reshape(-1, 1, 128)
    flags = f"--model {folder} --dataset {file} --validation_file {file} --eval_only".split()
    run = script(*flags, *"--seq_length 128 --batch_size 16 --precision fp32".split())
    assert run.results["dataset"]["validation"]["tokens"] == len(ids)
    expected = np.exp(loss_by_transformers(folder, blocks))
    assert run.results["perplexity"] == pytest.approx(expected, rel=1e-5)
