"""The evaluation's loss is what Hugging Face computes, every token counted once."""

import numpy as np
import pytest
import torch
from conftest import slow
from transformers import AutoModelForCausalLM, AutoTokenizer

SEQ_LENGTH, BLOCKS = 48, 7  # a number of blocks that 2 does not divide


@pytest.fixture(scope="module")
def expected(llama, text_file):
    """The loss over the blocks that the documentation promises: the last tenth of the corpus."""
    tokenizer = AutoTokenizer.from_pretrained(llama)
    ids = tokenizer(text_file.read_text(), add_special_tokens=False)["input_ids"]
    total = len(ids) // SEQ_LENGTH
    blocks = torch.tensor(ids[: total * SEQ_LENGTH]).reshape(total, 1, SEQ_LENGTH)
    blocks = blocks[-(total // 10) :][:BLOCKS]
    model = AutoModelForCausalLM.from_pretrained(llama).float().eval()
    with torch.no_grad():  # the mean of blocks, which all have the same number of targets
        return np.mean([model(input_ids=row, labels=row).loss.item() for row in blocks])


@pytest.mark.parametrize(
    "strategy, ranks", [("dp", 1), ("zero3", 2), slow("dp", 2), slow("fsdp", 2)]
)
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
    targets = run.results["dataset"]["validation"]["targets"]
    assert targets["tokens"] == BLOCKS * (SEQ_LENGTH - 1) and targets["bytes"] > targets["tokens"]
    bits = expected * targets["tokens"] / targets["bytes"] / np.log(2)
    assert run.results["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    found = {name: run.results[name] for name in ("eval_loss", "perplexity", "bits_per_byte")}
    assert run.metrics == [{"step": 0, **found}]  # nothing was trained
