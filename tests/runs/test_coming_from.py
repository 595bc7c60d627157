"""The commands of docs/COMING_FROM.md: `make soak` runs them as written.

The models and datasets that they name are small ones, written here, in a stand-in for the hub.
"""

import json
import re
import shlex
import threading

import pytest
from conftest import PROJECT
from local_hub import TOKEN, Hub, write_repositories

pytestmark = pytest.mark.slow

TEXT = (PROJECT / "docs" / "COMING_FROM.md").read_text().replace("\\\n", "")
COMMAND = re.compile(
    r"^<!-- needs-hub -->\n```bash\n((?:python|torchrun) .*real_model_example\.py .*)$",
    re.MULTILINE,
)
# Title of a section -> its command, on one line.
COMMANDS = {
    section.split()[0]: found[1]
    for section in TEXT.split("\n## ")
    for found in COMMAND.finditer(section)
}
MODELS = [
    *("NousResearch/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct"),
    *("meta-llama/Meta-Llama-3-8B-Instruct", "Qwen/Qwen2-0.5B"),
]
ALPACA = [
    {"instruction": f"Add {n} and 1.", "input": "", "output": f"The sum is {n + 1}."}
    for n in range(40)
]
ROLES = {"user": "instruction", "assistant": "output"}
CHATS = [
    {"source": "written", "messages": [{"role": r, "content": row[k]} for r, k in ROLES.items()]}
    for row in ALPACA
]
DATASETS = {
    "teknium/GPT4-LLM-Cleaned": ALPACA,
    "tatsu-lab/alpaca": [{**row, "text": "all of it"} for row in ALPACA],
    "trl-lib/Capybara": CHATS,
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
        folder = root / "models" / name
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    for name, rows in DATASETS.items():
        (root / "datasets" / name).mkdir(parents=True)
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, root / "datasets" / name / "train.parquet")
    hub = Hub(root)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    yield hub
    hub.shutdown()
    hub.server_close()


@pytest.mark.soak
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_command_as_written(script, named, tmp_path, command):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "alpaca_en_demo.json").write_text(json.dumps(ALPACA))
    given = shlex.split(command.partition("real_model_example.py ")[2])
    run = script(
        *given,
        env={"HF_ENDPOINT": named.url, "HF_HOME": tmp_path / "hf", "HF_TOKEN": TOKEN},
        cwd=tmp_path,
        folder=tmp_path / given[given.index("--output_dir") + 1],
        launcher=command.partition(" ")[0],
        ranks=2,
    )
    assert run.results["status"] == "completed" and run.losses
    assert bool(named.pushed) == ("--push_to_hub" in given)
