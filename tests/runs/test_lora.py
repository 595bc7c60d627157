"""LoRA under every strategy: the same adapters, in peft's format, and the model that they make."""

import json
import shutil

import pytest
from conftest import assert_close, load_exported, slow, soak

TWO = {"launcher": "torchrun", "ranks": 2}
LORA = "--lora_r 4 --lora_alpha 12 --lr 1e-2".split()


@pytest.fixture(scope="module")
def work(llama, text_file):
    flags = "--seq_length 64 --max_steps 8 --precision fp32 --eval_samples 8".split()
    return ["--model", llama, "--dataset", text_file, *flags, *LORA]


@pytest.fixture(scope="module")
def plain(script, work):
    """dp in one process; it saves half way."""
    return script(*work, "--batch_size", "4", "--save_every", "4")


def adapters(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def logits(model):
    import torch

    with torch.no_grad():
        return model(torch.arange(32)[None]).logits


def with_adapters(base, folder):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, folder).eval()


def test_adapters_load_into_peft(plain, llama):
    found = plain.results
    config = json.loads((plain.folder / "hf" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {"q_proj", "v_proj"}
    assert (config["r"], config["lora_alpha"]) == (4, 12)
    assert plain.losses[-1] < plain.losses[0] - 0.1
    model = with_adapters(llama, plain.folder / "hf")
    trained = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    assert found["trainable_parameters"] == trained == 3 * (4 * (64 + 64) + 4 * (64 + 32))
    assert f"{trained:,} of {found['parameters']:,}" in plain.out
    with model.disable_adapter():
        base = logits(model)
    assert (logits(model) - base).abs().max() > 0.01


IN_SOAK = map(soak, ("zero1", "offload", "infinity"))


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp", *IN_SOAK])
def test_every_strategy_trains_the_same_adapters(script, plain, work, llama, strategy):
    """zero3 exports the merged model; stage 3 and FSDP shard frozen weights as well."""
    merged = ["--merge_lora"] if strategy == "zero3" else []
    run = script(*work, "--batch_size", "2", "--strategy", strategy, *merged, **TWO)
    assert_close(run.losses, plain.losses, 1e-4)
    assert run.results["eval_loss"] == pytest.approx(plain.results["eval_loss"], rel=1e-4)
    held, whole = (r.results["memory"]["categories_bytes"] for r in (run, plain))
    assert run.results["trainable_parameters"] == plain.results["trainable_parameters"]
    if strategy in ("zero3", "fsdp"):
        assert held["parameters"] < 0.6 * whole["parameters"]
    assert whole["gradients"] == 4 * plain.results["trainable_parameters"]
    if merged:
        expected = logits(with_adapters(llama, plain.folder / "hf"))
        assert (logits(load_exported(run.folder / "hf")) - expected).abs().max() < 1e-3
        return
    mine, theirs = adapters(run.folder / "hf"), adapters(plain.folder / "hf")
    assert mine.keys() == theirs.keys()
    assert all((mine[name] - theirs[name]).norm() <= 1e-3 * theirs[name].norm() for name in mine)


def test_a_checkpoint_of_adapters_goes_on_under_another_strategy(script, plain, work):
    """From dp to fsdp, from fsdp to zero3."""
    start = plain.folder / "checkpoints" / "step-00000004"
    half = [*work, "--batch_size", "2", "--no_export", "--strategy"]
    first = script(*half, "fsdp", "--resume", start, "--save_every", "2", **TWO)
    assert_close(first.losses, plain.losses[4:], 1e-4)
    then = first.folder / "checkpoints" / "step-00000006"
    second = script(*half, "zero3", "--resume", then, **TWO)
    assert_close(second.losses, plain.losses[6:], 1e-4)
    refused = script(*work, "--batch_size", "4", "--lora_r", "8", "--resume", start, ok=False)
    assert refused.code == 2 and "another run" in refused.error


def test_a_checkpoint_of_adapters_does_not_go_on_with_another_base(
    script, plain, work, llama, tmp_path
):
    from safetensors.torch import load_file, save_file

    changed = shutil.copytree(llama, tmp_path / "changed")
    tensors = load_file(llama / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    start = plain.folder / "checkpoints" / "step-00000004"
    flags = ["--batch_size", "4", "--model", changed, "--resume_force", "--resume", start]
    refused = script(*work, *flags, ok=False)
    assert refused.code == 2 and "frozen weights digest" in refused.error
    assert "Use the weights that the adapters were trained with" in refused.error


def test_rslora_scales_by_the_root_of_the_rank(script, plain, work):
    """6 / √4 is 12 / 4."""
    run = script(*work, "--batch_size", "4", "--use_rslora", "--lora_alpha", "6", "--no_eval")
    assert run.losses == plain.losses
    config = json.loads((run.folder / "hf" / "adapter_config.json").read_text())
    assert config["use_rslora"] and not config["use_dora"]


@pytest.fixture(scope="module")
def dora(script, work):
    return script(*work, "--lora_dora", "--batch_size", "4", "--save_every", "4")


def test_dora_loads_into_peft(dora, plain, llama):
    """The first step has the base model's loss, and the magnitudes are trained."""
    from peft import get_peft_model_state_dict

    assert_close(dora.losses[:1], plain.losses[:1], 1e-6)
    assert dora.losses[-1] < dora.losses[0] - 0.1 and dora.losses[-1] != plain.losses[-1]
    model = with_adapters(llama, dora.folder / "hf")
    saved = adapters(dora.folder / "hf")
    assert saved.keys() == get_peft_model_state_dict(model).keys()
    more = dora.results["trainable_parameters"] - plain.results["trainable_parameters"]
    assert more == 3 * (64 + 32)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    before = layer.base_layer.weight.norm(dim=1)
    assert (saved[f"{LAYER}.lora_magnitude_vector"] - before).abs().max() > 1e-3
    with model.disable_adapter():
        base = logits(model)
    assert (logits(model) - base).abs().max() > 0.01


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("strategy", ["fsdp", slow("zero2"), slow("offload"), soak("zero1")])
def test_dora_goes_on_under_another_strategy(script, dora, work, llama, strategy):
    """The merged model computes what peft computes with the adapters."""
    start = ["--resume", dora.folder / "checkpoints" / "step-00000004"]
    args = [*work, "--lora_dora", "--batch_size", "2", "--strategy", strategy, "--merge_lora"]
    run = script(*args, *start, **TWO)
    assert_close(run.losses, dora.losses[4:], 1e-4)
    expected = logits(with_adapters(llama, dora.folder / "hf"))
    assert (logits(load_exported(run.folder / "hf")) - expected).abs().max() < 1e-3


def test_a_checkpoint_of_lora_is_no_checkpoint_of_dora(script, plain, work):
    start = ["--resume", plain.folder / "checkpoints" / "step-00000004", "--lora_dora"]
    refused = script(*work, "--batch_size", "4", *start, ok=False)
    assert refused.code == 2 and "lora_dora False in the checkpoint" in refused.error


def test_frozen_weights_have_the_dtype_of_computations(script, plain, work):
    """Half of fp32's bytes under dp and fsdp; the losses agree within bf16's rounding."""
    args = [*work, "--precision", "bf16", "--no_export"]
    whole = script(*args, "--batch_size", "4")
    sharded = script(*args, "--batch_size", "2", "--strategy", "fsdp", **TWO)
    trained = plain.results["trainable_parameters"]
    frozen = plain.results["parameters"] - trained
    held = [run.results["memory"]["categories_bytes"]["parameters"] for run in (whole, sharded)]
    assert held == pytest.approx([2 * frozen + 4 * trained, frozen + 2 * trained], rel=0.02)
    assert_close(whole.losses, plain.losses, 1e-2)
    assert_close(sharded.losses, whole.losses, 1e-2)


@pytest.mark.parametrize("kind", [[], slow(["--lora_dora"])])
def test_gpt2_in_bf16_with_dropout(script, text_file, small_gpt2, tmp_path, kind):
    """Its linear layers store transposed weights, and its output layer is its embedding."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(0)
    shutil.copytree(small_gpt2, tmp_path, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small_gpt2))
    model.save_pretrained(tmp_path)
    work = f"--model {tmp_path} --dataset {text_file} --seq_length 32 --max_steps 6".split()
    work += ["--no_eval", "--precision", "bf16", "--lora_dropout", "0.1", *kind]
    refused = script(*work, *LORA, "--lora_targets", "c_attn,lm_head", ok=False)
    assert refused.code == 2 and "lm_head" in refused.error
    work += [*LORA, *"--lora_targets c_attn,mlp.c_proj --strategy zero2".split()]
    apart, together = script(*work), script(*work, "--merge_lora")
    assert apart.losses == together.losses
    expected = logits(with_adapters(tmp_path, apart.folder / "hf"))
    assert (logits(load_exported(together.folder / "hf")) - expected).abs().max() < 1e-4
    assert (logits(load_exported(tmp_path)) - expected).abs().max() > 1e-2


def test_rows_of_new_tokens_stay_as_they_were_drawn(script, text_file, llama, tmp_path):
    """The notice says how many rows these are; the rest of the weights comes from the files."""
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llama)
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    tokenizer.add_tokens([f"<|{number}|>" for number in range(302 - len(tokenizer))])
    tokenizer.save_pretrained(tmp_path)
    work = f"--model {tmp_path} --dataset {text_file} --seq_length 32 --max_steps 2".split()
    work += [*"--no_eval --precision fp32 --lr 1e-2".split(), *LORA]
    alone, whole = script(*work), script(*work, "--merge_lora")
    assert "The 2 new rows of the embedding are random" in alone.out
    assert "The 2 new rows of the embedding are random" in whole.out
    assert "--merge_lora exports" in alone.out and "--merge_lora exports" not in whole.out
    assert all("embed" not in name for name in adapters(alone.folder / "hf"))
    table = load_exported(whole.folder / "hf").model.embed_tokens.weight
    before = load_file(llama / "model.safetensors")["model.embed_tokens.weight"]
    assert len(table) == len(before) + 2 and (table[:-2] == before).all()


def test_adapters_go_where_peft_puts_them():
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    from distributed_training.workload.workload import USUAL_TARGETS

    for name in {"gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3"} & {*USUAL}:
        family = name if name in USUAL_TARGETS else "llama"
        assert ",".join(USUAL[name]) == USUAL_TARGETS[family], name  # an older peft lacks qwen3
