"""Models: the embedded one, other architectures, random weights, options of the forward pass."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from conftest import FAULT, STRATEGIES, assert_close, load_exported, slow, soak
from one_rank import one_rank
from safetensors.torch import load_file, save_file
from small_models import with_vision
from tokenizer_zoo import with_gap
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config

from distributed_training import open_model
from distributed_training.cli.parse import parse_arguments
from distributed_training.errors import UserError
from distributed_training.model.config import read_config
from distributed_training.model.spec import ModelSpec
from distributed_training.model_parts import transformer_blocks

WORK = "--seq_length 64 --num_samples 12 --batch_size 2 --precision fp32 --dropout 0".split()
WORK.append("--no_eval")
TWO = {"launcher": "torchrun", "ranks": 2}


@pytest.mark.slow
def test_random_weights_come_from_the_seed_and_are_the_same_for_every_strategy(
    script, llama, text_file
):
    work = ["--model", llama, "--from_scratch", "--dataset", text_file, *WORK]
    plain = script(*work, "--batch_size", "4")
    for strategy in ("zero3", "fsdp"):
        assert_close(script(*work, "--strategy", strategy, **TWO).losses, plain.losses, 1e-4)
    assert script(*work, "--batch_size", "4", "--seed", "7").losses[0] != plain.losses[0]


@pytest.mark.slow
def test_gpt2_architecture_needs_no_hub_from_scratch(script):
    work = "--model gpt2 --from_scratch --dataset pydocs --seq_length 16 --max_steps 1 --no_eval"
    run = script(*work.split(), "--batch_size", "1", env={"HF_HUB_OFFLINE": "1"})
    assert "124,439,808 parameters" in run.out
    assert "embedded" in run.out  # it says which tokenizer it took instead
    assert run.losses[0] == pytest.approx(10.9, abs=0.3)  # ln 50257 = 10.8


@pytest.mark.parametrize("strategy", ["dp", soak("zero3"), soak("fsdp")])
def test_gradient_checkpointing_computes_again_and_changes_no_loss(
    script, llama, text_file, strategy
):
    # Many narrow activations and few logits: what is not kept shows in the peak.
    work = f"--model {llama} --dataset {text_file} --seq_length 128 --num_samples 96".split()
    work += f"--batch_size 48 --precision fp32 --no_eval --strategy {strategy}".split()
    plain, again = script(*work), script(*work, "--gradient_checkpointing")
    assert_close(again.losses, plain.losses, 1e-5)
    peaks = [run.results["memory"]["host_peak_bytes"][0] for run in (again, plain)]
    assert peaks[0] < peaks[1] - 5e6


@pytest.mark.parametrize("strategy", [slow("dp"), *map(soak, STRATEGIES[1:])])
def test_compile_compiles_and_changes_no_loss(script, tmp_path, strategy):
    work = [*WORK, "--strategy", strategy, "--dropout", "0.1"]  # the same elements are dropped
    env = {"TORCHINDUCTOR_CACHE_DIR": tmp_path}
    compiled = script(*work, "--compile", env=env, **TWO, timeout=600)
    assert list(tmp_path.rglob("*.cpp"))  # the generated code
    assert_close(compiled.losses, script(*work, **TWO).losses, 1e-4)


@pytest.mark.parametrize("strategy", [slow("dp"), *map(soak, STRATEGIES[1:])])
def test_a_compiled_loss_is_the_same(script, tmp_path, strategy):
    work, env = [*WORK, "--strategy", strategy], {"TORCHINDUCTOR_CACHE_DIR": tmp_path}
    compiled = script(*work, "--compile_loss", env=env, **TWO, timeout=600)
    assert list(tmp_path.rglob("*.cpp"))
    assert_close(compiled.losses, script(*work, **TWO).losses, 1e-6)


@pytest.mark.slow
def test_a_loss_that_is_not_computed_in_chunks_is_not_compiled(script, tiny_tokenizer, tmp_path):
    folder = shutil.copytree(tiny_tokenizer, tmp_path / "model")
    sizes = {**MOE, "num_attention_heads": 2, "num_key_value_heads": 1}
    AutoConfig.for_model("gemma2", **sizes).save_pretrained(folder)
    work = ["--model", folder, "--from_scratch", "--dataset", "pydocs", *WORK, "--max_steps", "1"]
    run = script(*work, "--compile_loss")
    assert "--compile_loss: ignored" in run.out
    assert run.losses == script(*work).losses


@pytest.mark.slow
def test_compile_compiles_many_blocks_that_differ(script, small_gpt2, tmp_path):
    folder = shutil.copytree(small_gpt2, tmp_path / "model")
    differ = {"n_layer": 10, "scale_attn_by_inverse_layer_idx": True}  # by default 8 may differ
    GPT2Config.from_pretrained(folder, **differ).save_pretrained(folder)
    work = [*WORK, "--model", folder, "--from_scratch", "--dataset", "pydocs"]
    work += ["--lora_r", "4", "--gradient_checkpointing"]
    compiled, eager = script(*work, "--compile", timeout=600), script(*work)
    assert "recompile_limit" not in compiled.out + compiled.err
    assert_close(compiled.losses, eager.losses, 1e-4)


def test_blocks_are_found_in_sharded_models(small_gpt2):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small_gpt2))
    model._no_split_modules = ["GPT2MLP"]  # in no ModuleList
    layers = [block.mlp for block in model.transformer.h]
    for layer in layers:  # as fully_shard does
        layer.__class__ = type("FSDPGPT2MLP", (type(layer),), {})
    assert transformer_blocks(model) == layers


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero3", "fsdp"])
def test_text_leaves_a_vision_part_as_it_is(script, tiny_tokenizer, text_file, tmp_path, strategy):
    folder = shutil.copytree(tiny_tokenizer, tmp_path / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(with_vision()).save_pretrained(folder)
    work = ["--model", folder, "--dataset", text_file, *WORK, "--lr", "1e-2", "--weight_decay", "1"]
    run = script(*work, "--strategy", strategy, **TWO)
    before, after = (
        dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
        for path in (folder, run.folder / "hf")
    )
    kept = {name for name, weight in after.items() if torch.equal(weight, before[name])}
    assert kept == {name for name in before if "vision_tower" in name or "multi_modal" in name}
    assert "Text does not use" in run.out


SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
MOE = {**{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}}
MOE |= {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, sizes, flags",
    [
        ("openai-gpt", SMALL, []),  # its blocks return lists
        ("qwen3_moe", {**MOE, "moe_intermediate_size": 32}, ["--gradient_checkpointing"]),
        # With frozen embeddings the hooks of a block come before the gradients of its adapters.
        ("gpt2", SMALL, ["--lora_r", "4", "--lora_dora", "--lora_targets", "all-linear"]),
    ],
)
def test_zero3_gathers_blocks_of_any_kind(script, tiny_tokenizer, tmp_path, family, sizes, flags):
    folder = shutil.copytree(tiny_tokenizer, tmp_path / "model")
    special = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
    AutoConfig.for_model(family, **sizes, **special).save_pretrained(folder)
    work = ["--model", folder, "--from_scratch", "--dataset", "pydocs", *WORK, *flags, "--lr=1e-2"]
    found = script(*work, "--no_export", "--strategy", "zero3", **TWO)
    expected = script(*work, "--no_export", **TWO)
    assert_close(found.losses, expected.losses, 1e-5)
    norms = [[line["grad_norm"] for line in run.metrics] for run in (found, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_dropout_reaches_the_model(llama, probability):
    with one_rank() as ctx:
        settings = parse_arguments(["--model", str(llama), "--dropout", str(probability)])
        model = ModelSpec.find(settings, ctx).load(ctx).train()
    first, second = (model(input_ids=torch.arange(9)[None]).logits for _ in range(2))
    assert torch.equal(first, second) == (probability == 0)


def test_fused_gelu_computes_the_function_of_the_model(small_gpt2):
    logits = []
    with one_rank() as ctx:
        for flag in ("--fused_gelu", "--no_fused_gelu"):
            settings = parse_arguments(["--model", str(small_gpt2), "--from_scratch", flag])
            logits.append(
                ModelSpec.find(settings, ctx).load(ctx).eval()(torch.arange(9)[None]).logits
            )
    assert torch.allclose(*logits, atol=1e-5) and not torch.equal(*logits)


def test_deterministic_refuses_what_is_not(script):
    """With torch's warn_only attention's backward pass on a GPU would not be deterministic."""
    run = script(*WORK, "--deterministic", program=FAULT, env={"FAULT": "unordered:2"}, ok=False)
    assert run.code == 2 and "put_" in run.error and "run without --deterministic" in run.error


def test_embeddings_grow_only_when_the_tokenizer_needs_it(script, llama, text_file, tmp_path):
    from transformers import AutoTokenizer

    grown_model = shutil.copytree(llama, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(grown_model)
    tokenizer.add_tokens(["<|user|>", "<|assistant|>", *(f"<|{i}|>" for i in range(60))])
    tokenizer.save_pretrained(grown_model)
    assert len(tokenizer) > 300
    base = script("--model", llama, "--dataset", text_file, *WORK)
    work = ["--model", grown_model, "--dataset", text_file, *WORK]
    grown = script(*work)
    assert "enlarged" not in base.out and "enlarged" in grown.out
    new = 2 * 64 * (len(tokenizer) - 300)
    assert grown.results["parameters"] == base.results["parameters"] + new


def test_embeddings_grow_to_the_largest_id(llama, tmp_path):
    """Added tokens may leave a gap; what was trained is loaded with the same rows."""
    model = shutil.copytree(llama, tmp_path / "model")
    with_gap(1500).save_pretrained(model)
    flags = ["--model", str(model), "--strategy", "dp"]
    with one_rank() as ctx:
        spec = ModelSpec.find(parse_arguments(flags), ctx)
    assert spec.config.vocab_size == 1501
    assert open_model(model)[0].get_input_embeddings().weight.shape[0] == 1501


@pytest.mark.parametrize("padding", [300, None])
def test_a_padding_token_beyond_the_embedding_is_refused(llama, tmp_path, padding):
    """With the remedy of the message, null, the model is accepted."""
    values = json.loads((llama / "config.json").read_text()) | {"pad_token_id": padding}
    (tmp_path / "config.json").write_text(json.dumps(values))
    if padding is None:
        assert read_config(str(tmp_path), "--model X").pad_token_id is None
        return
    with pytest.raises(UserError, match=r"pad_token_id.*null"):
        read_config(str(tmp_path), "--model X")
    # The embedding of GPT-2 has no row for padding, and is enlarged to the tokenizer's ids later.
    GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=300, pad_token_id=300).save_pretrained(
        tmp_path
    )
    assert read_config(str(tmp_path), "--model X").pad_token_id == 300


@pytest.fixture(scope="module")
def own_head(small_gpt2, tmp_path_factory) -> Path:
    """A model with an output layer that differs from the embedding; its config.json ties them."""
    folder = shutil.copytree(small_gpt2, tmp_path_factory.mktemp("own_head") / "model")
    torch.manual_seed(0)
    config = GPT2Config.from_pretrained(folder, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tied = GPT2Config.from_pretrained(folder, tie_word_embeddings=True)
    tied.save_pretrained(folder)
    return folder


def test_an_output_layer_in_the_files_is_trained_although_the_configuration_ties_it(
    script, own_head, text_file
):
    """Under every strategy; the configuration of the export is that of its weights."""
    work = ["--model", own_head, "--dataset", text_file, *WORK, "--lr", "1e-2"]
    plain = script(*work, "--batch_size", "4", "--save_every", "1")
    sharded = script(*work, "--strategy", "fsdp", **TWO)
    assert_close(sharded.losses, plain.losses, 1e-4)
    step = plain.folder / "checkpoints" / "step-00000001"
    resumed = script(*work, "--strategy", "zero3", "--resume", step, **TWO)
    assert_close(resumed.losses, plain.losses[1:], 1e-4)
    tied = sum(parameter.numel() for parameter in from_configuration(own_head).parameters())
    for run in (plain, sharded, resumed):
        assert run.results["parameters"] == tied + 300 * 64
        model = load_exported(run.folder / "hf")
        assert not torch.equal(model.lm_head.weight, model.transformer.wte.weight)


def test_an_output_layer_of_its_own_stays_when_the_embedding_is_enlarged(own_head, tmp_path):
    """resize_token_embeddings and tie_weights drop it if the configuration still ties it."""
    folder = shutil.copytree(own_head, tmp_path / "model")
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<new {number}>" for number in range(100)])
    tokenizer.save_pretrained(folder)
    with one_rank() as ctx:
        flags = ["--model", str(folder), "--lora_r", "2"]
        for lora in ([], flags[2:]):  # adapters are attached after the enlargement
            spec = ModelSpec.find(parse_arguments([*flags[:2], *lora]), ctx)
            model = spec.load(ctx)
            assert not spec.tied and len(model.get_output_embeddings().weight) > 300
            assert torch.equal(model.get_output_embeddings().weight[:300], head)
            model.tie_weights()
            assert torch.equal(model.get_output_embeddings().weight[:300], head)
    trained = open_model(folder)[0].lm_head.weight[:300]
    assert torch.equal(trained.cpu(), head.to(trained.dtype))


def from_configuration(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("saved_as", ["safetensors", "pickle", "pickle of the inner model"])
@pytest.mark.parametrize("differs", [False, True])
def test_files_decide_whether_the_output_layer_is_the_embedding(
    own_head, tmp_path, saved_as, differs
):
    folder = shutil.copytree(own_head, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    if not differs:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    if saved_as == "safetensors":
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        (folder / "model.safetensors").unlink()
        if saved_as != "pickle":  # as in gpt2 on the hub
            tensors = {name.removeprefix("transformer."): t for name, t in tensors.items()}
        torch.save(tensors, folder / "pytorch_model.bin")
    with one_rank() as ctx:
        spec = ModelSpec.find(parse_arguments(["--model", str(folder)]), ctx)
        model = spec.load(ctx)
    assert spec.tied is not differs
    weights = model.transformer.wte.weight, model.lm_head.weight
    assert (weights[0] is weights[1]) is not differs
    assert torch.equal(weights[1], tensors["lm_head.weight"])


def code_in_a_module(folder: Path) -> None:
    """The configuration refers to a module in the folder, as models with code of their own do."""
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config |= {"model_type": "evil", "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(folder / 'executed')!r}, 'w')\n")


def code_in_pickled_weights(folder: Path) -> None:
    """Instead of safetensors there are weights of which reading executes a function."""

    class Evil:
        def __reduce__(self):
            return Path.touch, (folder / "executed",)

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Evil()}))


@pytest.mark.parametrize("attack", [code_in_a_module, code_in_pickled_weights])
def test_nothing_in_a_model_folder_is_executed(script, llama, tmp_path, attack):
    folder = shutil.copytree(llama, tmp_path / "model")
    attack(folder)
    work = f"--model {folder} --dataset pydocs --seq_length 32 --max_steps 1".split()
    run = script(*work, ok=False, timeout=90)
    assert run.code != 0 and run.error and not (folder / "executed").exists()
