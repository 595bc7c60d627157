"""The commands of docs/COMING_FROM.md: `make soak` runs them as written.

The models and datasets that they name are small ones, written here, in a stand-in for the hub.
"""

import json

import pytest
from documents import read
from local_hub import TOKEN, serving, write_repositories

pytestmark = [pytest.mark.slow, pytest.mark.soak]

COMMANDS = [  # that need the hub; test_documents_run.py runs the others
    words
    for _, words in read("docs/COMING_FROM.md").commands()
    if "real_model_example.py" in words and "--max_steps" not in words
]
MODELS = [
    *("NousResearch/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct"),
    *("meta-llama/Meta-Llama-3-8B-Instruct", "Qwen/Qwen2-0.5B"),
]
ALPACA = {"instruction": "Add 2 and 1.", "input": "", "output": "The sum is 3."}
MESSAGES = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "The sum is 3."}]
DATASETS = {
    "teknium/GPT4-LLM-Cleaned": ALPACA,
    "tatsu-lab/alpaca": {**ALPACA, "text": "all of it"},
    "trl-lib/Capybara": {"source": "written", "messages": MESSAGES},
}


@pytest.fixture(scope="module")
def named(tmp_path_factory, llama):
    """A stand-in for the hub with the models and datasets that the page names."""
    import pyarrow
    import pyarrow.parquet
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    root = tmp_path_factory.mktemp("named")
    write_repositories(root)
    config = AutoConfig.from_pretrained(llama, max_position_embeddings=2048)
    for name in MODELS:
        AutoModelForCausalLM.from_config(config).save_pretrained(root / "models" / name)
        AutoTokenizer.from_pretrained(llama).save_pretrained(root / "models" / name)
    for name, row in DATASETS.items():
        (root / "datasets" / name).mkdir(parents=True)
        table = pyarrow.Table.from_pylist(40 * [row])
        pyarrow.parquet.write_table(table, root / "datasets" / name / "train.parquet")
    with serving(root) as hub:
        yield hub


@pytest.mark.parametrize(
    "words", COMMANDS, ids=lambda words: words[words.index("--output_dir") + 1]
)
def test_command_as_written(script, named, tmp_path, words):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "alpaca_en_demo.json").write_text(json.dumps(40 * [ALPACA]))
    run = script(
        *words[words.index("real_model_example.py") + 1 :],
        env={"HF_ENDPOINT": named.url, "HF_HOME": tmp_path / "hf", "HF_TOKEN": TOKEN},
        cwd=tmp_path,
        folder=tmp_path / words[words.index("--output_dir") + 1],
        launcher=words[0],
        ranks=2,
    )
    assert run.results["status"] == "completed" and run.losses
    assert bool(named.pushed) == ("--push_to_hub" in words)
