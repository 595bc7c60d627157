"""Whether fine-tuning helped: paired differences, losses of documents, values of lm-eval."""

import copy
import json
import shutil

import completion_server
import numpy as np
import pytest
import torch
from small_models import CONFIGS
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from distributed_training.data.rows import Row
from distributed_training.data.special_tokens import number_of_ids
from distributed_training.errors import UserError
from distributed_training.trained.source import find_source
from tools.hand_over import documents, harness
from tools.hand_over.paired import compare
from tools.hand_over.score import BETTER, SAME, WORSE, score_documents, score_tasks, verdict_of


def test_a_paired_difference_is_found_that_the_means_hide():
    generator = np.random.default_rng(1)
    before = 10 + 5 * generator.standard_normal(200)  # items differ much
    after = before - 0.1 + 0.2 * generator.standard_normal(200)
    found = compare(before, after)
    assert found.value == pytest.approx((after - before).mean())
    exact = (after - before).std(ddof=1) / 200**0.5
    assert found.error == pytest.approx(exact, rel=0.05)
    assert (found.low, found.high) == pytest.approx(
        (found.value - 1.96 * exact, found.value + 1.96 * exact), abs=0.2 * exact
    )
    assert verdict_of(found, smaller_is_better=True) == BETTER
    assert verdict_of(found, smaller_is_better=False) == WORSE


def test_chance_is_not_distinguishable():
    """In 95 of 100 comparisons of equal models, up to the error of 100 trials."""
    generator = np.random.default_rng(2)
    verdicts = [verdict_of(compare(*generator.standard_normal((2, 60))), True) for _ in range(100)]
    assert 88 <= verdicts.count(SAME) <= 100
    few = compare(np.ones(5), np.zeros(5))
    assert verdict_of(few, True) == SAME


def test_the_sums_are_divided_by_tokens():
    found = compare(np.array([2.0, 30.0]), np.array([1.0, 28.0]), np.array([1, 9]))
    assert (found.before, found.after) == (3.2, 2.9)


@pytest.mark.parametrize("window", [4, 100])
def test_the_loss_of_a_row_counts_each_token_once(window):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["gpt2"]).eval()
    stored = np.array([3, 7, ~1, 9, 4, ~2, 8, 5, 6, 7])
    loss, tokens = documents.row_loss(model, stored, window)
    ids = torch.tensor(np.where(stored < 0, ~stored, stored))
    expected = 0.0
    for begin in range(0, 9, window - 1):
        part = ids[begin : begin + window]
        log_p = model(input_ids=part[None]).logits[0].log_softmax(-1)
        for place in range(1, len(part)):
            if stored[begin + place] >= 0:
                expected -= log_p[place - 1, part[place]].item()
    assert tokens == 7 and loss == pytest.approx(expected, rel=1e-5)


def test_documents_and_pairs_have_the_ids_of_training(tiny_tokenizer):
    encode = documents.encoder_of(AutoTokenizer.from_pretrained(tiny_tokenizer))
    ids = encode(Row("x", pieces=["the quick ", "fox"]))
    assert ids[0] < 0 and (ids[1:] >= 0).all()
    pair = encode(Row("x", kind="pair", prompt="the quick", completion=" fox"))
    assert (pair < 0).any() and (pair >= 0).any()


@pytest.mark.parametrize("family", ["gpt2", "llama"])  # that of "llama" begins a text with <s>
def test_the_first_token_of_a_document_has_a_loss(family):
    """So models with and without a start token have to predict the same text."""
    tokenizer = completion_server.tokenizer_of(family)
    text = "the quick fox"
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = documents.encoder_of(tokenizer)(Row("x", pieces=[text]))
    before = tokenizer.bos_token_id if family == "llama" else tokenizer.eos_token_id
    assert ids.tolist() == [~before, *own]
    config = copy.deepcopy(CONFIGS["gpt2"])
    config.vocab_size = number_of_ids(tokenizer)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert documents.row_loss(model, ids, 100)[1] == len(own)
    tokenizer.eos_token, tokenizer.bos_token = None, None
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    assert documents.context_of(tokenizer) == []


def write_samples(folder, values) -> None:
    folder.mkdir(parents=True)
    lines = [
        {"doc_id": number, "filter": "none", "metrics": ["acc", "f1"], "acc": value, "f1": [1, 2]}
        for number, value in enumerate(values)
    ]
    lines[0]["doc"] = "a line\u2028and another"  # lm-eval escapes no characters
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n"
    (folder / "samples_my_task_2026-11-29T09-00-53.316268.jsonl").write_text(text)


def test_items_of_lm_eval_are_paired(tmp_path):
    write_samples(tmp_path / "a" / "model", [0.0, 1.0, 1.0])
    write_samples(tmp_path / "b" / "model", [1.0, 1.0])
    both = [harness.read_scores(tmp_path / name) for name in "ab"]
    [(key, first, second)] = harness.paired(*both)
    assert key == ("my_task", "acc")  # a pair of numbers is no value of an item
    assert (first.tolist(), second.tolist()) == ([0.0, 1.0], [1.0, 1.0])


def test_the_perplexity_of_an_item_is_a_log_likelihood(tmp_path, monkeypatch, capsys):
    """As lm-eval writes it for lambada_openai: a larger value is better."""
    for name, value in (("before", -5.0), ("after", -2.0)):
        lines = [{"doc_id": n, "metrics": ["perplexity"], "perplexity": value} for n in range(12)]
        (tmp_path / name).mkdir()
        file = tmp_path / name / "samples_lambada_2026.jsonl"
        file.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(harness, "scores_of", lambda of, *_: harness.read_scores(tmp_path / of))
    assert score_tasks("before", "after", "lambada", None) == [BETTER]
    assert "lambada, log-likelihood: -5.0000 → -2.0000" in capsys.readouterr().out


def test_lm_eval_says_whether_a_larger_value_is_better(tmp_path, monkeypatch):
    """As results_TIME.json has it; the names of metrics decide where it does not say so."""
    metrics = ["my_error", "ter_like", "brier_score", "agreement"]
    for name, value in (("before", 0.2), ("after", 0.1)):
        (tmp_path / name / "model").mkdir(parents=True)
        lines = [
            {"doc_id": n, "metrics": metrics, **dict.fromkeys(metrics, value)} for n in range(12)
        ]
        file = tmp_path / name / "model" / "samples_mine_2026-11-29T09-00-53.316268.jsonl"
        file.write_text("\n".join(map(json.dumps, lines)))
        says = {"my_error": False, "ter_like": True, "brier_score": None}
        content = {"results": {}, "higher_is_better": {"mine": says, "group": {}}}
        file.with_name("results_2026-11-29T09-00-53.316268.json").write_text(json.dumps(content))
    monkeypatch.setattr(harness, "scores_of", lambda of, *_: harness.read_scores(tmp_path / of))
    found = dict(zip(sorted(metrics), score_tasks("before", "after", "mine", None), strict=True))
    expected = {"my_error": BETTER, "ter_like": WORSE, "brier_score": BETTER, "agreement": WORSE}
    assert found == expected


@pytest.fixture
def models(tmp_path, tiny_tokenizer):
    """Folders of two models; the first one's logits are 40 times as large, so it is very wrong."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SIZES))
    for name, scale in (("before", 40), ("after", 1)):
        shutil.copytree(tiny_tokenizer, tmp_path / name)
        model.transformer.ln_f.weight.data.fill_(scale)
        model.save_pretrained(tmp_path / name)
    return tmp_path / "before", tmp_path / "after"


SIZES = {"vocab_size": 300, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0}


def test_the_command_compares_documents(main_of, models, tmp_path):
    file = tmp_path / "held_out.jsonl"
    texts = [f"the lazy dog {number}" * (1 + number % 3) for number in range(12)]
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    before, after = models
    found = main_of("hand_over", after, "--score", before, "--data", file)
    assert found.code == 0 and "12 documents" in found.out and BETTER in found.out
    assert main_of("hand_over", before, "--score", after, "--data", file).code == 1
    same = main_of("hand_over", after, "--score", after, "--data", file)
    assert same.code == 0 and "not distinguishable" in same.out
    missing = main_of("hand_over", after, "--score", before)
    assert missing.code == 2 and "--data FILE" in missing.err


def test_a_dataset_of_the_hub_has_a_remedy(models):
    results = {"flags": {"dataset": "someone/something"}, "dataset": {"validation": {"rows": 9}}}
    before, after = (find_source(str(folder)) for folder in models)
    with pytest.raises(UserError, match=r"someone/something is not on this machine.*--data FILE"):
        score_documents(before, after, results, None)


def test_the_command_runs_lm_eval(main_of, models, tmp_path, monkeypatch):
    """A stand-in for lm-eval, which gives the value 1 to each item of the second model."""
    package = tmp_path / "stand_in" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.syspath_prepend(package.parent)
    before, after = models
    argv = ["hand_over", after, "--score", before, "--tasks", "sums", "--include_path", tmp_path]
    found = main_of(*argv)
    assert found.code == 0, found.err
    assert "sums, acc: 0.0000 → 1.0000" in found.out and BETTER in found.out
    monkeypatch.setenv("FAIL", "1")
    failed = main_of(*argv)
    assert failed.code == 2 and "Tasks not found" in failed.err


STAND_IN = """
import argparse, json, os, pathlib, sys
parser = argparse.ArgumentParser()
for name in ("--output_path", "--model_args", "--tasks"):
    parser.add_argument(name)
arguments = parser.parse_known_args()[0]
if os.environ.get("FAIL"):
    sys.exit("ValueError: Tasks not found")
folder = pathlib.Path(arguments.output_path, "model")
folder.mkdir()
value = float("after" in arguments.model_args)
lines = [{"doc_id": n, "metrics": ["acc"], "acc": value} for n in range(20)]
name = f"samples_{arguments.tasks}_2026.jsonl"
folder.joinpath(name).write_text("\\n".join(map(json.dumps, lines)))
"""
