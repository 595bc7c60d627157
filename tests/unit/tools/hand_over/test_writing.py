"""What --to writes, with a converter in place of llama.cpp's, and what it refuses."""

import json
import os

import completion_server
import pytest
import torch
from completion_server import CHATML, tokenizer_of
from jinja2 import Template
from transformers import AutoModelForCausalLM

from distributed_training.errors import UserError
from distributed_training.trained.source import find_source
from tools.hand_over.shim import NO_BOS
from tools.hand_over.to_ollama import CONVERSATIONS, Untranslatable, around_messages, modelfile

# Does what the shim relies on: classes that read settings and recognize tokenizers, SpecialVocab,
# and main(). As with transformers 5, the settings lack a key.
CONVERTER = """
import argparse, json, pathlib, gguf
class ModelBase:
    @staticmethod
    def load_hparams(folder, is_mistral_format):
        settings = json.loads((folder / "config.json").read_text())
        return {"vocab_size": settings["vocab_size"], "model_type": "read"}
class TextModel(ModelBase):
    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("BPE pre-tokenizer was not recognized")
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--outfile")
    parser.add_argument("--outtype")
    args = parser.parse_args()
    special = gguf.SpecialVocab(pathlib.Path(args.model))
    found = {"rule": TextModel().get_vocab_base_pre(None), "type": args.outtype}
    found |= {"adds": special.add_special_token, "ids": special.special_token_ids}
    settings = TextModel.load_hparams(pathlib.Path(args.model), is_mistral_format=False)
    found |= {"template": special.chat_template, "settings": settings}
    open(args.outfile, "w").write(json.dumps(found))
"""
GGUF = """
import json
class SpecialVocab:
    def __init__(self, path, load_merges=False):
        self.add_special_token, self.special_token_ids = {}, {"eos": 1}
        settings = json.loads((path / "tokenizer_config.json").read_text())
        file = path / "chat_template.jinja"  # transformers 4.51 writes no such file
        self.chat_template = file.read_text() if file.exists() else settings["chat_template"]
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return completion_server.write_model(tmp_path_factory.mktemp("model") / "hf", "llama")


@pytest.fixture
def llama_cpp(tmp_path):
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER)
    (folder / "gguf.py").write_text(GGUF)
    return folder


def test_the_converter_gets_what_it_cannot_find(main_of, exported, llama_cpp, tmp_path):
    out = tmp_path / "model.gguf"
    flags = ["--to", "gguf", "--llama_cpp", llama_cpp, "--out", out]
    assert main_of("hand_over", exported, *flags).code == 0
    found = json.loads(out.read_text())
    ends = json.loads((exported / "generation_config.json").read_text())["eos_token_id"]
    tokenizer = tokenizer_of("llama")
    assert found["rule"] == "gpt-2" and found["type"] == "f32"
    assert found["adds"] == {"bos": True}  # the tokenizer begins texts with <s>
    assert found["ids"]["eot"] in {*ends} - {tokenizer.eos_token_id}
    assert found["template"] == tokenizer.chat_template
    settings = json.loads((exported / "config.json").read_text())
    assert found["settings"] == {**settings, "model_type": "read"}
    again = main_of("hand_over", exported, *flags)
    assert again.code == 2 and "exists" in again.error


def test_the_template_of_a_tokenizer_without_a_bos_token(main_of, llama_cpp, tmp_path):
    """llama.cpp would write the token 11 for it, as llama-server did."""
    folder = completion_server.write_model(tmp_path / "model", "gpt2")
    out = tmp_path / "model.gguf"
    flags = ["--to", "gguf", "--llama_cpp", llama_cpp, "--out", out]
    assert main_of("hand_over", folder, *flags).code == 0
    found = json.loads(out.read_text())["template"]
    assert found == NO_BOS + CHATML
    assert Template(found).render(bos_token="+", messages=[]) == ""


def test_an_unknown_tokenizer_keeps_the_error_of_the_converter(
    main_of, exported, llama_cpp, tmp_path
):
    import shutil

    folder, out = shutil.copytree(exported, tmp_path / "other"), tmp_path / "model.gguf"
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    (folder / "tokenizer.json").write_text(json.dumps(content))
    flags = ["--to", "gguf", "--llama_cpp", llama_cpp, "--out", out]
    failed = main_of("hand_over", folder, *flags)
    assert failed.code == 1 and "was not recognized" in failed.error
    assert not out.exists() and not [*tmp_path.glob(".partial*")]


def test_the_converter_must_be_there(main_of, exported, tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    flags = ["--to", "gguf", "--out", tmp_path / "x"]
    for more, word in (([], "LLAMA_CPP"), (["--llama_cpp", tmp_path], "convert_hf_to_gguf.py")):
        failed = main_of("hand_over", exported, *flags, *more)
        assert failed.code == 2 and word in failed.error


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([], "--verify"),
        (["--to", "gguf", "--verify", "http://localhost"], "--verify"),
        (["--verify", "missing.gguf"], "no such file"),
        (["--verify", "http://127.0.0.1:9"], "start the server"),
        (["--verify", "{file}"], "--engine"),
        (["--verify", "{file}", "--engine", "{folder}"], "npm install"),
    ],
)
def test_wrong_usage_is_one_line(main_of, exported, tmp_path, flags, word):
    (tmp_path / "a.gguf").write_text("")
    values = {"file": tmp_path / "a.gguf", "folder": tmp_path}
    failed = main_of("hand_over", exported, *(flag.format(**values) for flag in flags))
    assert failed.code == 2 and word in failed.error


def test_adapters_are_merged_for_ollama(main_of, exported, tmp_path, monkeypatch):
    import peft

    monkeypatch.delenv("LLAMA_CPP", raising=False)
    base = AutoModelForCausalLM.from_pretrained(exported)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config).eval()
    adapted.peft_config["default"].base_model_name_or_path = str(exported)
    adapters = tmp_path / "adapters"
    adapted.save_pretrained(adapters)
    out = tmp_path / "Modelfile"
    assert main_of("hand_over", adapters, "--to", "ollama", "--out", out).code == 0
    merged = tmp_path / "Modelfile-merged"
    assert out.read_text().splitlines()[0] == f"FROM {merged}"
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
        found = AutoModelForCausalLM.from_pretrained(merged)(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert find_source(str(merged)).adapters is None and os.path.exists(merged / "tokenizer.json")


def test_a_template_becomes_one_of_go():
    tokenizer = tokenizer_of("llama")
    found = around_messages(tokenizer)
    options = {"tokenize": False, "add_generation_prompt": True}
    for conversation in CONVERSATIONS:
        text = tokenizer.apply_chat_template(conversation, **options)
        assert "<s>" + found.render(conversation) == text  # the engine adds <s>
    written = modelfile("./model.gguf", found.as_go(), ["<|im_end|>"])
    assert written.startswith('FROM ./model.gguf\nTEMPLATE """{{- range')
    assert r'{{ "<|im_start|>system\n" }}{{ .Content }}' in written
    assert written.endswith('PARAMETER stop "<|im_end|>"\n')


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("{{ m['content'] }}", "{{ loop.index }}{{ m['content'] }}"),
        CHATML.replace("{{ m['content'] }}", "{{ m['content'] | upper }}"),
        "{{ raise_exception('no') }}",
        '"""' + CHATML,
    ],
)
def test_a_template_without_an_equivalent_is_refused(template):
    tokenizer = tokenizer_of("gpt2")
    tokenizer.chat_template = template
    with pytest.raises(Untranslatable):
        around_messages(tokenizer).as_go()


def test_the_prompts_of_a_run_are_of_its_validation_data(tmp_path):
    from tools.hand_over.prompts import rows_of_run

    (tmp_path / "held.jsonl").write_text('{"text": "held out"}\n')
    (tmp_path / "train.jsonl").write_text('{"text": "trained"}\n')
    flags = {"dataset": str(tmp_path / "train.jsonl")}
    tokenizer = tokenizer_of("gpt2")

    def texts(**more):
        rows = rows_of_run({"flags": {**flags, **more}}, tokenizer)
        return ["".join(row.pieces) for row in rows]

    assert texts() == ["trained"]
    assert texts(validation_file=str(tmp_path / "held.jsonl")) == ["held out"]
    with pytest.raises(UserError, match="not on this machine"):
        texts(dataset="someone/something")
