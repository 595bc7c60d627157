"""Whatever a user can get wrong ends before anything trains, with exit code 2 and one line that
says what to do.
"""

import json
import os
import re
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from conftest import FAULT, descendants_of_test, path_without, skip


@pytest.fixture
def refused(script):
    """refused(*args) -> the error line of a run that must not start."""

    def run(*args, timeout=60, **options):
        done = script(*args, ok=False, timeout=timeout, **options)
        # A launcher turns every exit code but 0 into its own.
        assert done.code == 2 if options.get("ranks", 1) == 1 else done.code != 0, (
            done.out + done.err
        )
        return done.error

    return run


def test_one_line_on_two_ranks_and_none_left(refused):
    assert "--batch_size" in refused("--batch_size", "0", launcher="torchrun", ranks=2)
    assert descendants_of_test() == []


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--seq_length 513", "512 positions"),
        ("--precision fp16", "fp16 needs a GPU"),
        ("--strategy infinity --nvme_path /no/such/disk", "no such folder"),
    ],
)
def test_flags_that_do_not_fit_the_model_or_the_machine(refused, flags, said):
    assert said in refused(*flags.split())


def test_fewer_gpus_than_ranks(script):
    done = script(
        launcher="torchrun", ranks=2, program=FAULT, env={"FAULT": "gpus:1"}, ok=False, timeout=60
    )
    assert done.code != 0
    assert "2 ranks were started on this node, but only 1 GPU(s) are visible" in done.error


def test_folder_that_is_no_model(refused, llama, tmp_path):
    assert "no such folder" in refused("--model", "./no/such/model")
    assert "config.json" in refused("--model", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    assert "not a causal language model" in refused("--model", tmp_path, "--dataset", "pydocs")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((llama / name).read_bytes())
    assert "no tokenizer" in refused("--model", tmp_path, "--dataset", "pydocs")


def test_model_without_weights(refused, llama, tmp_path):
    for file in llama.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    # One line, although both ranks fail.
    assert "cannot be loaded" in refused(
        "--model", tmp_path, "--dataset", "pydocs", launcher="torchrun", ranks=2
    )


# seconds: without a question of our own, Hugging Face's clients retry for 23 s to 11 minutes
ASKED_FIRST = 20


def test_hub_that_refuses(refused):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refused
        env = {"HF_ENDPOINT": f"http://127.0.0.1:{unused.getsockname()[1]}"}
        error = refused("--model", "gpt2", env=env, timeout=ASKED_FIRST)
        assert (
            "cannot be reached" in error and "--from_scratch" in error and "HF_HUB_OFFLINE" in error
        )
        assert "cannot be reached" in refused("--dataset", "wikitext", env=env, timeout=ASKED_FIRST)


def test_hub_that_never_answers(refused):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        env = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        assert "cannot be reached" in refused(
            "--model", "gpt2", env=env, launcher="torchrun", ranks=2, timeout=ASKED_FIRST
        )


def test_repositories_that_are_missing(refused, hub):
    env = {"HF_ENDPOINT": hub.url}
    assert "no such model" in refused("--model", "nobody/nothing", "--dataset", "pydocs", env=env)
    assert "nobody/nothing" in refused("--dataset", "nobody/nothing", env=env)


def test_gated_model(refused):
    class Gated(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200 if self.path == "/" else 403)
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Gated)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        assert "gated" in refused("--model", "some/gated-model", "--dataset", "pydocs", env=env)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("empty.txt", b"", "empty.txt is empty"),
        ("short.txt", b"a few words", "less than one sequence"),
        ("rows.jsonl", b'{"text": "x"}\n{"body": "x"}\n', "rows.jsonl, line 2: no .*, but body"),
    ],
)
def test_data_that_cannot_be_used(refused, tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    assert re.search(said, refused("--dataset", tmp_path / name))


def test_deepspeed_file_that_is_wrong(refused, tmp_path):
    """Before the data is read and the output folder is created."""
    content = {"zero_optimization": {"stage": 2}, "gradient_acumulation_steps": 2}
    (tmp_path / "mine.json").write_text(json.dumps(content))
    flags = ["--ds_config", tmp_path / "mine.json", "--output_dir", tmp_path / "out"]
    error = refused(*flags)
    assert "mine.json" in error and "did you mean gradient_accumulation_steps" in error
    assert not (tmp_path / "out").exists()


def test_nvme_path_that_is_too_small(refused, tmp_path):
    if os.geteuid() != 0:
        skip("needs root to mount a small file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    try:
        assert "infinity needs" in refused("--strategy", "infinity", "--nvme_path", tmp_path)
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_missing_libaio(refused, without_libaio):
    assert "libaio-dev" in refused("--strategy", "infinity", env=without_libaio)


def test_missing_compiler(refused, tmp_path):
    path = path_without(tmp_path, "c++", "g++", "clang++", "x86_64-linux-gnu-g++")
    env = {"PATH": path, "CXX": "c++", "TORCH_EXTENSIONS_DIR": tmp_path / "new"}
    assert "build-essential" in refused("--strategy", "offload", env=env)


def test_output_dir_that_holds_another_run(refused, script):
    first = script("--max_steps", "1", "--no_eval", "--seq_length", "32")
    assert "--overwrite" in refused("--output_dir", first.folder)
    script(
        *f"--max_steps 1 --no_eval --seq_length 32 --output_dir {first.folder} --overwrite".split()
    )
    assert "is a file" in refused("--output_dir", first.folder / "results.json")
