"""Models and datasets from the hub: real client code against a local stand-in."""

import math
from pydoc_data.topics import topics

import pytest
from local_hub import ARTICLES
from transformers import AutoTokenizer

GUIDE = [
    "--model",
    "gpt2",
    "--strategy",
    "dp",
    "--batch_size",
    "4",
    "--epochs",
    "1",
    "--num_samples",
    "20",
    "--seq_length",
    "64",
]


@pytest.fixture
def home(tmp_path):
    return {"HF_HOME": tmp_path / "hf"}


def test_guides_command_online_then_offline_with_the_hub_gone(script, hub, home):
    online = script(*GUIDE, env={"HF_ENDPOINT": hub.url, **home})
    assert "✅ Dataset ready: 20 samples" in online.out
    assert "Epoch 1 | Batch 0/5 | Loss: " in online.out
    assert online.losses[0] == pytest.approx(math.log(1000), rel=0.05)  # random weights
    hub.close()
    offline = script(*GUIDE, env={"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "1", **home})
    assert offline.losses == pytest.approx(online.losses, rel=1e-6)
    assert offline.results["eval_loss"] == pytest.approx(online.results["eval_loss"], rel=1e-6)
    gone = script(*GUIDE, env={"HF_ENDPOINT": hub.url, **home})
    assert "cannot be reached: using what is in the cache" in gone.out


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("fsdp", marks=pytest.mark.soak)])
def test_pretrained_weights_from_the_hub_on_two_ranks(script, hub, home, strategy):
    env = {"HF_ENDPOINT": hub.url, **home}
    one = script(*GUIDE, "--precision", "fp32", "--dropout", "0", env=env)
    two = script(
        *GUIDE,
        "--precision",
        "fp32",
        "--dropout",
        "0",
        "--batch_size",
        "2",
        "--strategy",
        strategy,
        env=env,
        launcher="torchrun",
        ranks=2,
    )
    assert two.losses == pytest.approx(one.losses, rel=1e-4)


def test_wikitext_is_split_into_articles(script, hub, home, tmp_path):
    """An end-of-text token stands between two articles of the validation split."""
    import numpy as np

    script(
        *GUIDE,
        "--cache_dir",
        tmp_path,
        "--max_steps",
        "1",
        "--no_eval",
        env={"HF_ENDPOINT": hub.url, **home},
    )
    [stream] = tmp_path.glob("*/validation.bin")
    tokens = np.fromfile(stream, dtype="uint16")
    [folder] = (tmp_path / "hf").glob("hub/models--*/snapshots/*")
    articles = AutoTokenizer.from_pretrained(folder).decode(tokens).split("<|endoftext|>")
    first = ARTICLES["test"]  # the topics before are in the test split
    names = sorted(topics)[first : first + ARTICLES["validation"]]
    assert [article[: article.find(" \n")] for article in articles] == [f" = {n} =" for n in names]


def test_any_hub_dataset_by_its_name(script, hub, home):
    run = script(
        "--dataset",
        "Salesforce/wikitext",
        "--dataset_config",
        "wikitext-2-raw-v1",
        "--seq_length",
        "64",
        "--max_steps",
        "2",
        "--no_eval",
        env={"HF_ENDPOINT": hub.url, **home},
    )
    assert run.results["dataset"]["name"] == "Salesforce/wikitext"
