"""The weights under adapters: a run that resumes, merges or answers must have the same ones."""

import json
import shutil

import pytest
import torch
from one_rank import one_rank
from safetensors.torch import load_file, save_file
from small_models import CONFIGS
from transformers import AutoModelForCausalLM

from distributed_training import resolve_settings
from distributed_training.checkpoints.other_runs import (
    other_weights,
    refuse_other_run,
    report_changes,
)
from distributed_training.errors import UserError
from distributed_training.model import frozen, merging
from distributed_training.model.resolve import find_folders
from distributed_training.model.spec import WeightSource
from distributed_training.trained.load import load
from distributed_training.trained.source import find_source

CONFIG = CONFIGS["llama"]
NAME = "frozen weights digest"


@pytest.fixture
def base(tmp_path, tiny_tokenizer):
    """A model folder."""
    torch.manual_seed(0)
    config = CONFIG.to_dict() | {"vocab_size": 300}
    AutoModelForCausalLM.from_config(type(CONFIG)(**config)).save_pretrained(tmp_path / "base")
    shutil.copytree(tiny_tokenizer, tmp_path / "base", dirs_exist_ok=True)
    return tmp_path / "base"


def change(folder, name="model.norm.weight", index=-1):
    """Change one element of a model's weights."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name].reshape(-1)[index] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def digest_of(model, **flags):
    with one_rank() as ctx:
        settings = resolve_settings({"model": str(model), "lora_r": 4, **flags})
        found = find_folders(
            settings.model, settings.data, settings.training, settings.strategy, True, ctx
        )
        return found["frozen"]["digest"]


@pytest.mark.parametrize("index", [0, 4000, -1])
def test_each_element_counts(base, index):
    before = digest_of(base)
    assert digest_of(shutil.copytree(base, base.with_name("copy"))) == before
    change(base, "model.embed_tokens.weight", index)
    assert digest_of(base) != before


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_each_tensor_of_a_large_model_counts(base, monkeypatch, name):
    monkeypatch.setattr(frozen, "BLOCK", 64)
    monkeypatch.setattr(frozen, "MOST_BYTES", 6400)
    before = digest_of(base)
    change(base, name, 0)
    assert digest_of(base) != before


def test_the_number_and_the_kind_of_files_do_not_count(base):
    before = digest_of(base)
    tensors = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in {*files.values()}:
        save_file({n: t for n, t in tensors.items() if files[n] == file}, base / file)
    index = base / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert digest_of(base) == before
    index.unlink()
    torch.save(tensors, base / "pytorch_model.bin")
    first = digest_of(base)
    torch.save({**tensors, "model.norm.weight": torch.zeros(32)}, base / "pytorch_model.bin")
    assert digest_of(base) != first


def test_weights_drawn_from_the_seed_depend_on_the_configuration(base):
    """Not on the last bits: CPUs with other vector instructions draw those differently."""
    before = digest_of(base, from_scratch=True)
    assert digest_of(base, from_scratch=True) == before != digest_of(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "initializer_range": 0.03}))
    assert digest_of(base, from_scratch=True) != before
    before = frozen.digest_of_drawn(base)
    tensors = load_file(base / "model.safetensors")
    for tensor in (tensor for tensor in tensors.values() if tensor.ndim == 2):
        tensor *= 1 + 1e-7 * torch.randn_like(tensor)
    save_file(tensors, base / "model.safetensors")
    assert frozen.digest_of_drawn(base) == before


def test_the_base_of_an_enlarged_embedding_counts(base, tiny_tokenizer):
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    added = {"id": 300, "content": "<new>", "special": True, "normalized": False}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    tokenizer["added_tokens"].append(added)
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    before = digest_of(base)
    change(base)
    assert digest_of(base) != before


def test_the_commit_of_a_model_of_the_hub(base):
    snapshot = base.with_name("snapshots") / "abc"
    snapshot.parent.mkdir()
    base.rename(snapshot)
    assert frozen.identity_of(CONFIG, str(snapshot), "")["commit"] == "abc"


def signature(**entries):
    return {"hard": entries, "soft": {}, "told": {}}


def test_another_base_is_refused(capfd):
    saved, current = signature(**{NAME: "a", "lora_r": 4}), signature(**{NAME: "b", "lora_r": 4})
    for forced in (False, True):
        with pytest.raises(UserError, match=r"digest a in the checkpoint, b in this run\. Use the"):
            refuse_other_run(saved, current, forced)
    saved["told"]["commit of the frozen weights"] = "abc"
    with pytest.raises(UserError, match="--model_revision abc"):
        refuse_other_run(saved, current, False)
    assert "digest a" in other_weights(saved, current)
    # Checkpoints of earlier versions do not have the entry.
    old = signature(lora_r=4)
    refuse_other_run(old, current, False)
    report_changes(old, current)
    assert "does not record its frozen weights" in capfd.readouterr().out
    report_changes(current, current)
    report_changes(signature(), signature())
    assert capfd.readouterr().out == "" == other_weights(old, current)


def test_adapters_are_not_merged_with_weights_that_have_changed(base):
    found = frozen.identity_of(CONFIG, str(base), "")
    source = WeightSource(str(base), 0, frozen=found)
    frozen.refuse_changed(source.folder, CONFIG, found["digest"])
    change(base)
    spec = type("Spec", (), {"weights": source, "config": CONFIG})
    with pytest.raises(UserError, match="have changed since"):
        merging.load_frozen(spec, None)


def test_chat_says_that_the_base_of_adapters_has_changed(base, capfd):
    peft = pytest.importorskip("peft")
    run = base.with_name("run")
    model = AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(
        run / "hf"
    )
    results = {"status": "completed", "run_signature": {"hard": {NAME: digest_of(base)}}}
    (run / "results.json").write_text(json.dumps(results))
    said = "not those that the adapters were trained with"
    for changed in (False, True):
        if changed:
            change(base)
        for folder in (run, run / "hf"):
            capfd.readouterr()
            load(find_source(str(folder)), torch.device("cpu"), "fp32")
            assert (said in capfd.readouterr().out) == changed
