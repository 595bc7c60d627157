"""llama.cpp itself: its converter and its engine give the tokens of transformers.

LLAMA_CPP names a folder of its source, and NODE_LLAMA_CPP one with node_modules/node-llama-cpp.
Without them, pip and npm download both (90 MB).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import completion_server
import pytest
from conftest import PROJECT, Run, finish, skip, start
from tokenizers import Regex, pre_tokenizers

from tools.hand_over.rules import LLAMA3

pytestmark = pytest.mark.slow
SOURCE = "llama-cpp-python==0.3.36"
# With the build for this machine only: all builds, those for GPUs too, are 725 MB.
ENGINE = ("node-llama-cpp@3.22.1", "@node-llama-cpp/linux-x64@3.22.1")


def download(command: list, what: str) -> None:
    """Run a command that downloads something; skip without a network."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=900)
    if done.returncode:
        skip(f"{what} cannot be downloaded: {(done.stderr or done.stdout)[-200:]!r}")


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory):
    """The folder of llama.cpp's source."""
    if named := os.environ.get("LLAMA_CPP"):
        return Path(named)
    folder = tmp_path_factory.mktemp("source")
    flags = ["--no-deps", "--no-binary", SOURCE.split("==")[0], "-d", folder]
    download([sys.executable, "-m", "pip", "download", *flags, SOURCE], SOURCE)
    shutil.unpack_archive(next(folder.glob("*.tar.gz")), folder)
    return next(folder.glob("*/vendor/llama.cpp"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The folder of node-llama-cpp."""
    if named := os.environ.get("NODE_LLAMA_CPP"):
        return Path(named)
    if not (shutil.which("npm") and shutil.which("node")):
        skip("npm and node are not installed")
    folder = tmp_path_factory.mktemp("engine")
    flags = ["--prefix", folder, "--ignore-scripts", "--omit=optional"]
    download(["npm", "install", *flags, *ENGINE], ENGINE[0])
    return folder


def hand_over(*argv) -> Run:
    """Run the command in its own process: the converter takes longer than `main_of` allows."""
    process = start([sys.executable, PROJECT / "scripts" / "hand_over.py", *argv])
    out, err = finish(process, 300)
    return Run(process.returncode, out, err)


def write_run(folder: Path, family: str, script) -> Path:
    """Write a model of a family; "run" is what the script exports by default."""
    if family == "run":
        flags = ["--max_steps", "4", "--seq_length", "64", "--no_eval", "--precision", "fp32"]
        return script(*flags).folder
    completion_server.write_model(folder, "llama" if family == "llama3" else family)
    if family == "llama3":
        file = folder / "tokenizer.json"
        words = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        content = json.loads(file.read_text())
        both = pre_tokenizers.Sequence([words, in_bytes])
        content["pre_tokenizer"] = json.loads(both.__getstate__())
        file.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("family", ["run", *completion_server.CONVERTED, "llama3"])
def test_llama_cpp_gives_the_tokens_of_transformers(script, llama_cpp, engine, family, tmp_path):
    model, out = write_run(tmp_path / "model", family, script), tmp_path / "model.gguf"
    done = hand_over(model, "--to", "gguf", "--llama_cpp", llama_cpp, "--out", out)
    assert done.code == 0, done.err
    found = hand_over(model, "--verify", out, "--engine", engine)
    assert found.code == 0, found.out
    assert "tokens of 20 prompts compared" in found.out
    assert "✅ equal" in found.out


def test_a_fault_of_a_file_is_named(llama_cpp, engine, tmp_path):
    """Without its chat template, and without the token that ends answers, as without the tool."""
    folder = completion_server.write_model(tmp_path / "model", "qwen2")
    for name, cause in (("chat_template.jinja", "template"), ("generation_config.json", "stop")):
        copy, out = shutil.copytree(folder, tmp_path / name), tmp_path / f"{name}.gguf"
        (copy / name).unlink()
        flags = ["--to", "gguf", "--llama_cpp", llama_cpp, "--out", out]
        assert hand_over(copy, *flags).code == 0
        found = hand_over(folder, "--verify", out, "--engine", engine)
        assert found.code == 1 and f"❌ different: {cause}" in found.out, found.out
