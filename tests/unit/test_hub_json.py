"""JSON files of the hub: their rows are those of the same files on a disk, also as a stream."""

import gzip
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from local_hub import serving
from project_copy import PROJECT

from distributed_training.cli.hub import has_dataset

# Of a column of several types `datasets` 5.2.0 parses every string that is valid JSON.
ANSWERS = [
    "8",
    "007",
    "null",
    "true",
    '{"city": "Bern"}',
    '"quoted"',
    "2024-01-01 10:00:00",
    "\u00e9",
]
PARTS = [{"type": "text", "text": "A list of parts changes the type of all contents."}]
CHATS = [
    {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]}
    for answer in [*ANSWERS, PARTS]
]
TRACE = {"id": "1", "source": "web", "model": "gpt", "system_prompt": "Be kind."}
# For each data set of the hub its files.
DATASETS = {
    "own/lines": {"train.jsonl": CHATS},
    "own/list": {"train.json": CHATS},
    "own/packed": {"train.jsonl.gz": CHATS},
    "own/trace": {"train.jsonl": [TRACE | chat for chat in CHATS]},
    "own/several": {"train-0.jsonl": CHATS[:5], "train-1.jsonl": CHATS[5:]},
    "own/texts": {"train.jsonl": [{"text": answer} for answer in ANSWERS * 300]},
}
# Prints the rows of each data set, of its files on the disk, and of the stream, also continued.
PROGRAM = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
from distributed_training.cli.parse import parse_arguments
from distributed_training.data.row_files import open_files
from distributed_training.data.row_hub import open_hub
from distributed_training.data.rows import BadRow, RowOptions
from distributed_training.data.stream_source import open_for_streaming

def contents(rows):
    return [str(row) if isinstance(row, BadRow) else [row.kind, row.as_json(), [*row.pieces]]
            for _, row in rows]

ctx = SimpleNamespace(is_main=True, broadcast_from_rank0=lambda x: x, all_gather=lambda x: [x])
root, found = Path(sys.argv[1]), {}
offline = os.environ.get("HF_HUB_OFFLINE")
for name in sys.argv[2:]:
    data = parse_arguments(["--dataset", name]).data
    rows = found[name] = {}
    rows["hub"] = contents(open_hub(name, data, RowOptions(), True).splits["train"](None))
    files = sorted((root / "datasets" / name).glob("train*"))
    rows["disk"] = contents(open_files({"train": files}, RowOptions()).splits["train"](None))
    if not offline:
        source = open_for_streaming(data, ctx, SimpleNamespace(chat_template=None))
        rows["stream"] = contents(source.splits["train"](None))
        places = [place for place, _ in source.splits["train"](None)]
        rows["continued"] = contents(source.splits["train"](json.loads(json.dumps(places[7]))))
print(json.dumps(found))
"""


def write(file: Path, rows: list) -> None:
    """Write rows as a list or as lines, as the suffix says."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    text = json.dumps(rows) if file.suffix == ".json" else text
    packed = file.suffix == ".gz"
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())


def run(program: str, *arguments: object, **env: object) -> str:
    """Run a program with the clients of the hub, which read their variables when imported."""
    env = {**os.environ, **{key: str(value) for key, value in env.items()}}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    pipes = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, env=env, cwd=PROJECT, **pipes)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """What the hub serves."""
    root = tmp_path_factory.mktemp("hub")
    for name, files in DATASETS.items():
        folder = root / "datasets" / name
        folder.mkdir(parents=True)
        for file, rows in files.items():
            write(folder / file, rows)
    # A file that is an object, with the rows under a key that the data set's card names.
    folder = root / "datasets" / "own" / "field"
    folder.mkdir()
    (folder / "train.json").write_text(json.dumps({"version": 1, "data": CHATS}))
    card = "configs:\n- config_name: default\n  data_files: train.json\n  field: data\n"
    (folder / "README.md").write_text(f"---\n{card}---\n")
    return root


def test_rows_of_the_hub_are_those_of_the_file(root, tmp_path, monkeypatch):
    with serving(root) as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": tmp_path}
        found = json.loads(run(PROGRAM, root, *DATASETS, "own/field", **env))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    assert all(map(has_dataset, DATASETS)) and not has_dataset("own/other")
    cached = json.loads(run(PROGRAM, root, *DATASETS, "own/field", HF_HUB_OFFLINE=1, **env))
    found["own/field"]["disk"] = found["own/list"]["disk"]  # the same rows under a key
    for name, rows in found.items():
        assert cached[name]["hub"] == rows["disk"], name
        assert rows["hub"] == rows["disk"] == rows["stream"], name
        assert rows["continued"] == rows["disk"][7:], name
    contents = [json.loads(row[1])[1]["content"] for row in found["own/lines"]["disk"]]
    assert contents == [*ANSWERS, PARTS[0]["text"]]
    assert len(found["own/texts"]["hub"]) == 8 * 300
    # datasets 3 wrote it next to the package, which may be read-only.
    assert not (PROJECT / "distributed_training.lock").exists()


REFUSED = """
from distributed_training.cli.parse import parse_arguments
from distributed_training.data.row_hub import open_hub
from distributed_training.data.rows import RowOptions
try:
    open_hub("own/lines", parse_arguments(["--dataset", "own/lines"]).data, RowOptions(), True)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_parsed_strings_in_the_cache_of_another_program_are_refused(root, tmp_path):
    if int(version("datasets").split(".")[0]) < 5:
        pytest.skip("earlier releases of datasets cannot read files with several types")
    load = "import datasets; print(datasets.load_dataset('own/lines')['train'].features)"
    with serving(root) as hub:
        types = run(load, HF_ENDPOINT=hub.url, HF_HOME=tmp_path)
    assert "Json" in types
    error = run(REFUSED, HF_HUB_OFFLINE=1, HF_HOME=tmp_path)
    assert error.startswith("UserError") and "--prefetch" in error
