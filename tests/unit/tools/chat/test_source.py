"""Which model scripts/chat.py talks to, and what it refuses before anything is loaded."""

import json
import shutil

import pytest

from distributed_training.errors import UserError
from distributed_training.trained.source import find_source

FLAGS = {"flags": {"no_export": True}, "status": "completed"}


def write(folder, **files):
    """Create a folder with files: objects as JSON, texts as they are; __ in a name is a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def model_in(folder):
    return write(folder, config__json={}, model__safetensors="x", tokenizer__json="{}")


def adapters_in(folder, base):
    config = {"base_model_name_or_path": str(base)}
    return write(folder, adapter_config__json=config, adapter_model__safetensors="x")


def run_in(folder, kind="text", export="hf", **flags):
    exported = {"export": {"folder": str(export)}} if export else {}
    facts = {"status": "completed", "dataset": {"kind": kind}, "flags": flags, **exported}
    return write(folder, results__json=facts)


@pytest.mark.parametrize(
    "kind, is_chat", [("text", False), ("pair", False), ("chat", True), ("mixed", None)]
)
def test_the_exported_model_of_a_run(tmp_path, kind, is_chat):
    run = run_in(tmp_path / "run", kind, "where/the/run/was/hf")  # the folder was moved since
    exported = model_in(run / "hf")
    for named in (run, exported):
        source = find_source(str(named))
        assert (source.folder, source.adapters, source.is_chat) == (exported, None, is_chat)


def test_a_run_may_have_exported_elsewhere(tmp_path):
    exported = model_in(tmp_path / "elsewhere")
    run = run_in(tmp_path / "run", export=exported, export_hf=str(exported))
    model_in(run / "hf")  # of an earlier run
    assert find_source(str(run)).folder == exported


def test_adapters_have_a_base_model(tmp_path):
    base = model_in(tmp_path / "base")
    source = find_source(str(adapters_in(tmp_path / "adapters", base)))
    assert (source.folder, source.adapters) == (base, tmp_path / "adapters")


def adapters_of_random_weights(folder):
    adapters_in(run_in(folder, from_scratch=True) / "hf", model_in(folder / "base"))


def adapters_of_adapters(folder):
    adapters_in(folder, adapters_in(folder / "first", model_in(folder / "base")))


REFUSED = {
    "config.json": lambda folder: write(folder),
    "--no_export": lambda folder: run_in(folder, export=None, no_export=True),
    "status is running": lambda folder: write(folder, results__json={"status": "running"}),
    "convert_checkpoint.py": lambda folder: write(
        run_in(folder, export=None, no_export=True) / "checkpoints" / "step-00000002"
    ),
    "is a checkpoint": lambda folder: write(folder, manifest__json={}),
    "eval|evaluated": lambda folder: run_in(folder, export=None, eval_only=True),
    "no weights": lambda folder: write(folder, config__json={}),
    r"no weights \(adapter_model": lambda folder: write(folder, adapter_config__json={}),
    "base model .* missing": lambda folder: adapters_in(folder, folder / "gone"),
    "base model .*None": lambda folder: write(
        folder, adapter_config__json={}, adapter_model__safetensors="x"
    ),
    "--merge_lora": lambda folder: adapters_in(folder, "tiny-gpt2"),
    "random weights": adapters_of_random_weights,
    "adapters as well": adapters_of_adapters,
    "adapter_config.json is not JSON": lambda folder: write(
        folder, adapter_config__json="{", adapter_model__safetensors="x"
    ),
    "results.json is damaged": lambda folder: write(folder, results__json={"export": 1}),
}


@pytest.mark.parametrize("says", REFUSED)
def test_a_folder_without_a_whole_model_is_refused(tmp_path, says):
    REFUSED[says](tmp_path / "given")
    with pytest.raises(UserError, match=says) as refused:
        find_source(str(tmp_path / "given"))
    assert refused.value.exit_code == 2 and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["./gone", "a/b/c", "/nowhere"])
def test_a_missing_folder_is_refused(name):
    with pytest.raises(UserError, match="no such folder"):
        find_source(name)


def test_a_file_and_the_untrained_model_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="no such folder"):
        find_source(str(tmp_path / "file"))
    with pytest.raises(UserError, match="random weights"):
        find_source("tiny-gpt2")


@pytest.mark.parametrize("offline", ["1", ""], ids=["set", "unreachable"])
def test_an_unknown_name_without_the_hub_is_refused(tmp_path, monkeypatch, offline):
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"nobody/nothing: there is no such folder.*hf download"):
        find_source("nobody/nothing")


def test_a_folder_that_is_moved_into_the_place_of_a_name_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.move(model_in(tmp_path / "x"), tmp_path / "gpt2")
    assert find_source("gpt2").name == "gpt2"
