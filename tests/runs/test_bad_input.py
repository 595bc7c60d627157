"""Whatever a user can get wrong ends before anything trains, with exit code 2 and one line that
says what to do.
"""

import json
import os
import re
import shutil
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from conftest import FAULT, descendants_of_test, path_without
from one_rank import one_rank
from safetensors.torch import load_file, save_file

from distributed_training.cli.parse import parse_arguments
from distributed_training.errors import UserError
from distributed_training.model.spec import ModelSpec


@pytest.fixture
def refused(script):
    """refused(*args) -> the error line of a run that must not start."""

    def run(*args, timeout=60, **options):
        done = script(*args, ok=False, timeout=timeout, **options)
        # A launcher turns every exit code but 0 into its own.
        assert done.code == (2 if options.get("ranks", 1) == 1 else 1), done.out + done.err
        return done.error

    return run


def test_layers_of_fsdp_are_checked_before_the_data_is_read(refused, script, tmp_path):
    """A tied embedding cannot be sharded alone; a layer inside of a sharded one can."""
    file = tmp_path / "fsdp.json"
    work = ["--strategy", "fsdp", "--fsdp_config", file, "--max_steps", "1", "--seq_length", "32"]
    file.write_text('{"transformer_layer_cls_to_wrap": ["GPT2Block", "Embedding"]}')
    (data := tmp_path / "rows.jsonl").write_text("no row")
    assert "Embedding cannot be sharded on its own" in refused(*work, "--dataset", data)
    file.write_text('{"transformer_layer_cls_to_wrap": ["GPT2Block", "GPT2MLP"]}')
    assert script(*work, "--no_eval", "--no_export").results["status"] == "completed"


def test_flags_that_do_not_fit_the_model_or_the_machine(refused):
    assert "512 positions" in refused("--seq_length", "513")
    assert "fp16 needs a GPU" in refused("--precision", "fp16")
    assert "no such folder" in refused("--strategy", "infinity", "--nvme_path", "/no/such/disk")


def test_fewer_gpus_than_ranks(refused):
    error = refused(launcher="torchrun", ranks=2, program=FAULT, env={"FAULT": "gpus:1"})
    assert "use the same GPU: 2 ranks were started on this node" in error


def test_gpu_that_torch_cannot_use(refused, script, tmp_path):
    """Every way to train is refused, once for all ranks, unless the CPU is asked for."""
    fault = {"program": FAULT, "env": {"FAULT": f"unusable_gpu:{tmp_path}"}}
    work = ["--max_steps", "1", "--no_eval", "--no_export"]
    for flags in ([], ["--eval_only"], ["--simulate_gpus", "2"]):
        assert "NVIDIA GPU" in (error := refused(*flags, **fault)) and "--device cpu" in error
    assert "NVIDIA GPU" in refused("--prove", "1", **fault)
    assert "NVIDIA GPU" in refused(launcher="torchrun", ranks=2, **fault)
    assert script("--device", "cpu", *work, **fault).results["device"] == "cpu"
    hidden = {**fault["env"], "CUDA_VISIBLE_DEVICES": ""}
    assert script(*work, program=FAULT, env=hidden).results["device"] == "cpu"


def test_folder_that_is_no_model(refused, llama, tmp_path):
    assert "no such folder" in refused("--model", "./no/such/model")
    assert "config.json" in refused("--model", tmp_path)
    for content, said in (("{", "line 1"), ('{"model_type": "vit"}', "not a causal language")):
        (tmp_path / "config.json").write_text(content)
        assert said in refused("--model", tmp_path, "--dataset", "pydocs")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((llama / name).read_bytes())
    assert "no tokenizer" in refused("--model", tmp_path, "--dataset", "pydocs")


def test_model_without_weights(refused, llama, tmp_path):
    for file in llama.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    # One line, although both ranks fail.
    assert "has no weights" in refused(
        "--model", tmp_path, "--dataset", "pydocs", launcher="torchrun", ranks=2
    )
    assert descendants_of_test() == []


def change_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def pickled(folder, contents):
    (folder / "model.safetensors").unlink()
    torch.save(contents, folder / "pytorch_model.bin")


def quantized(folder, dtype, suffix="weight"):
    """Give a layer's weight the type and the name that a quantization gives it."""
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj."
    weights[name + suffix] = weights.pop(name + "weight").to(dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 2}
# The files of a model that a user has damaged: what is done, and the file that the message names.
DAMAGED = {
    "weights, empty": (lambda f: os.truncate(f / "model.safetensors", 0), "model.safetensors"),
    "weights, cut": (lambda f: os.truncate(f / "model.safetensors", 9999), "model.safetensors"),
    "pickle of objects": (lambda f: pickled(f, {"a": pytest.raises}), "pytorch_model.bin"),
    "pickle of no weights": (lambda f: pickled(f, [1]), "pytorch_model.bin"),
    "pickle, empty": (
        lambda f: (pickled(f, {}), os.truncate(f / "pytorch_model.bin", 0)),
        "pytorch_model.bin",
    ),
    "pickle, cut": (
        lambda f: (pickled(f, {"a": torch.ones(999)}), os.truncate(f / "pytorch_model.bin", 999)),
        "pytorch_model.bin",
    ),
    "shape": (lambda f: change_config(f, intermediate_size=80), "mlp.down_proj.weight"),
    "type": (lambda f: change_config(f, hidden_size="x"), "config.json.*hidden_size"),
    "a size of 0": (lambda f: change_config(f, hidden_size=0), "config.json"),
    "unknown activation": (lambda f: change_config(f, hidden_act="x"), "config.json"),
    "small vocabulary": (lambda f: change_config(f, vocab_size=9), "config.json.*lm_head"),
    "weights of another model": (lambda f: change_config(f, **GPT2), "lacks .* config.json"),
    "generation": (lambda f: (f / "generation_config.json").write_text("{"), "generation_config"),
    "tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json"),
    "tokenizer without entries": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer"),
    "tokenizer, no text": (lambda f: (f / "tokenizer.json").write_bytes(b"\xff"), "tokenizer.json"),
    "its settings": (
        lambda f: (f / "tokenizer_config.json").write_text("[]"),
        "tokenizer_config.json",
    ),
    "its template": (lambda f: (f / "chat_template.jinja").write_bytes(b"\xff"), "template.jinja"),
    "adapters": (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json"),
    "4 bits": (
        lambda f: change_config(f, quantization_config={"load_in_4bit": True}),
        "quantized .quantization_config in config.json.*load_in_4bit",
    ),
    "GPTQ": (
        lambda f: change_config(f, quantization_config={"quant_method": "gptq", "bits": 4}),
        "quantized .gptq.",
    ),
    "fp8, which config.json does not say": (
        lambda f: quantized(f, torch.float8_e4m3fn),
        "quantized .*up_proj.weight has the type F8_E4M3",
    ),
    "packed, which config.json does not say": (
        lambda f: quantized(f, torch.int32, "qweight"),
        "quantized .*up_proj.qweight has the type I32",
    ),
}


@pytest.mark.parametrize(("damage", "names"), DAMAGED.values(), ids=DAMAGED)
def test_the_damaged_file_of_a_model_is_named(llama, tmp_path, damage, names):
    folder = shutil.copytree(llama, tmp_path / "model")
    damage(folder)
    with one_rank() as ctx, pytest.raises(UserError, match=names) as refused:
        ModelSpec.find(parse_arguments(["--model", str(folder)]), ctx).load(ctx)
    assert refused.value.exit_code == 2


def test_quantized_weights_may_be_evaluated_whole_and_replaced(llama, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "model")
    change_config(folder, quantization_config={"quant_method": "fp8"})
    model = ["--model", str(folder), "--dataset", "pydocs"]
    with one_rank() as ctx:
        assert ModelSpec.find(parse_arguments([*model, "--eval_only"]), ctx)
        with pytest.raises(UserError, match="sharded"):
            ModelSpec.find(parse_arguments([*model, "--eval_only", "--strategy", "fsdp"]), ctx)
        spec = ModelSpec.find(parse_arguments([*model, "--from_scratch"]), ctx)
    assert not hasattr(spec.config, "quantization_config")


def test_weights_that_only_one_rank_reads_end_all_ranks(refused, llama, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "model")
    change_config(folder, intermediate_size=80)
    work = ["--model", folder, "--dataset", "pydocs", "--strategy", "fsdp"]
    assert "down_proj" in refused(*work, launcher="torchrun", ranks=2)
    assert descendants_of_test() == []


# seconds: without a question of our own, Hugging Face's clients retry for 23 s to 11 minutes
ASKED_FIRST = 20


@pytest.mark.parametrize("listens", [False, True])
def test_hub_that_refuses_or_never_answers(refused, listens):
    with socket.socket() as hub:
        hub.bind(("127.0.0.1", 0))
        if listens:
            hub.listen()
        env = {"HF_ENDPOINT": f"http://user:canary@127.0.0.1:{hub.getsockname()[1]}"}
        error = refused("--model", "gpt2", env=env, timeout=ASKED_FIRST)
        assert "cannot be reached" in error and "--from_scratch" in error and "canary" not in error
        assert "cannot be reached" in refused("--dataset", "wikitext", env=env, timeout=ASKED_FIRST)


def test_cache_without_the_model_or_with_a_part_of_it(refused, tmp_path):
    """As an offline node has it; a link to a file that is missing, and no tokenizer."""
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": tmp_path}
    error = refused("--model", "gpt2", "--dataset", "wikitext", env=env)
    assert "no dataset Salesforce/wikitext and no model gpt2" in error and "--prefetch" in error
    model = tmp_path / "hub" / "models--some--model"
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    for file in ("config.json", "model.safetensors"):
        (model / "snapshots" / "abc" / file).write_text("{}")
    (model / "snapshots" / "abc" / "model-00002.safetensors").symlink_to("../../blobs/gone")
    error = refused("--model", "some/model", "--dataset", "pydocs", env=env)
    assert "no tokenizer files of some/model" in error and "--prefetch" in error


def test_repositories_that_are_missing(refused, hub):
    env = {"HF_ENDPOINT": hub.url}
    assert "no such model" in refused("--model", "nobody/nothing", "--dataset", "pydocs", env=env)
    assert "nobody/nothing" in refused("--dataset", "nobody/nothing", env=env)


class Gated(BaseHTTPRequestHandler):
    """A hub whose models need a license to be accepted."""

    def do_HEAD(self):
        self.send_response(200 if self.path == "/" else 403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD


def test_gated_model(refused):
    with HTTPServer(("127.0.0.1", 0), Gated) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        assert "gated" in refused("--model", "some/gated-model", "--dataset", "pydocs", env=env)
        server.shutdown()


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


def test_nvme_path_that_is_too_small(refused, disk):
    nvme = disk(1)
    assert "infinity needs" in refused("--strategy", "infinity", "--nvme_path", nvme)
    assert list(nvme.iterdir()) == []


def test_missing_compiler_or_libaio(refused, tmp_path, without_libaio):
    assert "libaio-dev" in refused("--strategy", "infinity", env=without_libaio)
    path = path_without(tmp_path, "c++", "g++", "clang++", "x86_64-linux-gnu-g++")
    env = {"PATH": path, "CXX": "c++", "TORCH_EXTENSIONS_DIR": tmp_path / "new"}
    assert "build-essential" in refused("--strategy", "offload", env=env)


def test_output_over_other_files(refused, script, tmp_path):
    work = "--max_steps 1 --no_eval --seq_length 32".split()
    first = script(*work)
    assert "--overwrite" in refused("--output_dir", first.folder)
    script(*work, "--overwrite", "--output_dir", first.folder)
    assert "is a file" in refused("--output_dir", first.folder / "results.json")
    assert "is not empty" in refused("--export_hf", first.folder)
    assert "would replace" in refused("--output_dir", tmp_path / "a", "--export_hf", tmp_path)
