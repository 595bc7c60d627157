"""Models and datasets from the hub: real client code against a local stand-in."""

import math
import re
from ast import literal_eval
from pydoc_data.topics import topics

import numpy as np
import pytest
from local_hub import ARTICLES, GPT2, WIKITEXT, rows_of
from transformers import AutoTokenizer

GUIDE = "--model gpt2 --strategy dp --batch_size 4 --epochs 1 --num_samples 20".split()
GUIDE += ["--seq_length", "64"]


@pytest.fixture
def home(tmp_path):
    return {"HF_HOME": tmp_path / "hf"}


def test_a_run_repeats_from_the_cache_when_the_hub_is_gone(script, hub, home, tmp_path):
    """Pretrained weights, also on two ranks. An end-of-text token separates articles."""
    env = {"HF_ENDPOINT": hub.url, **home}
    work = [*GUIDE, "--precision", "fp32", "--dropout", "0", "--cache_dir", tmp_path]
    online = script(*work, env=env)
    assert "✅ Dataset ready: 20 samples" in online.out
    assert "Epoch 1 | Batch 0/5 | Loss: " in online.out
    assert online.losses[0] == pytest.approx(math.log(1000), rel=0.05)  # random weights
    sharded = ["--batch_size", "2", "--strategy", "zero3"]
    two = script(*work, *sharded, env=env, launcher="torchrun", ranks=2)
    assert two.losses == pytest.approx(online.losses, rel=1e-4)
    hub.close()
    gone = script(*work, env=env)
    assert "cannot be reached: using what is in the cache" in gone.out
    assert gone.losses == pytest.approx(online.losses, rel=1e-6)
    assert gone.results["eval_loss"] == pytest.approx(online.results["eval_loss"], rel=1e-6)
    [stream] = tmp_path.glob("*/validation.bin")
    tokens = np.fromfile(stream, dtype="uint16")
    [folder] = (tmp_path / "hf").glob("hub/models--*/snapshots/*")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template  # a file of its own since transformers 4.56
    articles = tokenizer.decode(tokens).split("<|endoftext|>")
    first = ARTICLES["test"]  # the topics before are in the test split
    names = sorted(topics)[first : first + ARTICLES["validation"]]
    assert [article[: article.find(" \n")] for article in articles] == [f" = {n} =" for n in names]


def test_splits_and_revisions(script, hub, home):
    """Parts of splits, at a commit; again from the cache with the hub gone."""
    commits = {name: repository.commit for name, repository in hub.repositories.items()}
    dataset = ["--train_split", "train[:50%]", "--eval_split", "test", "--dataset_revision"]
    dataset.append(commits[f"datasets/{WIKITEXT}"])
    model = ["--model_revision", commits[f"models/{GPT2}"]]
    env = {"HF_ENDPOINT": hub.url, **home}
    work = [*GUIDE[:-4], "--seq_length", "64", "--max_steps", "2", "--precision", "fp32"]
    run = script(*work, *dataset, *model, env=env)
    found = run.results["dataset"]
    held = found["validation"]  # the first row is empty, and precedes the first title
    assert held["rows"] - held["skipped"] == ARTICLES["test"]
    assert f"validation: {ARTICLES['test']} articles, " in run.out and "rows" not in run.out
    assert 1 < found["rows"] < ARTICLES["train"]
    wrong = script(*work, "--train_split", "training", env=env, ok=False)
    assert wrong.code == 2 and "--train_split" in wrong.error and "'validation'" in wrong.error
    wrong = script(*work, "--model_revision", "v9", env=env, ok=False)
    assert wrong.code == 2 and "v9" in wrong.error
    hub.close()
    env["HF_HUB_OFFLINE"] = "1"
    assert script(*work, *dataset, *model, env=env).losses == run.losses
    wrong = script(*work, "--dataset_revision", "v2", env=env, ok=False)
    assert wrong.code == 2 and "--dataset_revision v2" in wrong.error


def test_a_stream_of_a_split(script, hub, home):
    work = ["--dataset", "wikitext", "--streaming", "--max_steps", "1", "--seq_length", "32"]
    env = {"HF_ENDPOINT": hub.url, **home}
    run = script(*work, "--train_split", "test", "--no_eval", "--show_sample", env=env)
    shown = "".join(map(literal_eval, re.findall(r"^ +\d+ +\d+ \* (.+)$", run.out, re.MULTILINE)))
    articles = ["".join(rows_of(name)) for name in sorted(topics)[: ARTICLES["test"]]]
    assert len(shown) > 31 and any(shown in article for article in articles)
    assert not run.folder.exists()
