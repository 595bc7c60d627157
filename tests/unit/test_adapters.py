"""What adapters compute, and what their weights are when they are added to those of the model."""

import json
import shutil
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from one_rank import one_rank
from packaging.version import Version
from small_models import CONFIGS
from transformers import AutoModelForCausalLM, DeepseekV3Config, GenerationConfig, Qwen3MoeConfig

from distributed_training.cli.parse import parse_arguments
from distributed_training.errors import UserError
from distributed_training.model.lora import Lora, merged
from distributed_training.model.spec import ModelSpec, WeightSource
from distributed_training.run.step_meter import loss_bytes


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("rslora, dora", [(False, False), (True, False), (False, True)])
def test_merged_weights_compute_the_same(family, rslora, dora):
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(CONFIGS[family]).eval()
    adapted = AutoModelForCausalLM.from_config(CONFIGS[family]).eval()
    adapted.load_state_dict(plain.state_dict())
    Lora(4, 8.0, 0.0, "all-linear", "base", 0, rslora, dora).attach(adapted)
    inputs = torch.arange(12)[None]
    with torch.no_grad():
        before = plain(inputs).logits
        assert torch.allclose(adapted(inputs).logits, before, atol=1e-5)  # B is 0, m is |W|
        trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
        for parameter in trained.values():
            parameter += 0.1 * torch.randn_like(parameter)
        expected = adapted(inputs).logits
        plain.load_state_dict(dict(merged(adapted, trained)), strict=False)
        assert torch.allclose(plain(inputs).logits, expected, atol=1e-5)
        assert (expected - before).abs().max() > 0.01
    assert sum(".lora_magnitude_vector." in name for name in trained) == dora * len(trained) // 3


@pytest.mark.parametrize("targets, chunked", [(["q_proj"], True), (["lm_head"], False)])
def test_an_output_layer_with_adapters_does_not_compute_the_loss(targets, chunked, capsys):
    """The measured memory of its loss is that of all logits, and --compile_loss has no effect."""
    lora = Lora(4, 8.0, 0.0, targets, "base", 0)
    source = WeightSource("", 0)
    spec = ModelSpec(CONFIGS["llama"], None, GenerationConfig(), source, 16, lora)
    assert spec.chunked_loss == chunked
    state, ctx = MagicMock(), SimpleNamespace(rank=0)
    state.ranks.at.return_value = [2]
    objects = SimpleNamespace(module=spec.on_meta_device())
    of_all_logits = 4 * 2 * 16 * CONFIGS["llama"].vocab_size
    assert loss_bytes(objects, spec, state, False, ctx)() == (0 if chunked else of_all_logits)
    spec._check_loss(parse_arguments(["--compile_loss"]).model)
    assert ("--compile_loss: ignored" in capsys.readouterr().out) != chunked


def test_scales():
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    Lora(16, 8.0, 0.0, ["q_proj"], "base", 0, rslora=True).attach(model)
    assert model.model.layers[0].self_attn.q_proj.scaling == {"default": 2.0}


@pytest.mark.parametrize("family", CONFIGS)
def test_merged_adapters_that_have_learned_nothing_change_no_weight_in_16_bit(family):
    """peft rounds the magnitudes and the norms of DoRA to the dtype of the frozen weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]).to(torch.bfloat16)
    before = {name: weight.float() for name, weight in model.state_dict().items()}
    Lora(4, 8.0, 0.0, "all-linear", "base", 0, dora=True).attach(model)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for name, weight in merged(model, trained):
        assert torch.allclose(weight, before[name], rtol=1e-6, atol=0), name


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
EXPERTS |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
EXPERTS |= {"num_attention_heads": 4, "num_key_value_heads": 2}
fused = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5"), reason="each expert is a module"
)


@fused
@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_fused_experts_get_no_adapters_and_a_notice(targets, capsys):
    config = Qwen3MoeConfig(**EXPERTS)
    lora = Lora(4, 8.0, 0.0, targets, "base", 0)
    for device in ("meta", "cpu"):  # as a run does
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
        lora.attach(model)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        assert len(trained) == 2 * 2 * 4 and all("self_attn" in name for name in trained)
    assert capsys.readouterr().out.count("get no adapters") == 1
    assert lora.settled.target_modules == ["k_proj", "o_proj", "q_proj", "v_proj"]


@fused
def test_names_of_fused_experts_are_refused():
    """DeepSeek-V3 has linear layers of these names as well, in its shared experts."""
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    sizes |= {"v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    config = DeepseekV3Config(**EXPERTS | sizes | {"first_k_dense_replace": 1})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=r"fused experts .*kv_b_proj"):
        Lora(4, 8.0, 0.0, ["o_proj", "gate_proj"], "base", 0).attach(model)


def test_a_notice_says_that_no_balancing_loss_is_added(llama, tmp_path, capsys):
    folder = shutil.copytree(llama, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "output_router_logits": True}))
    for model, count in ((llama, 0), (folder, 1)):
        with one_rank() as ctx:
            ModelSpec.find(parse_arguments(["--model", str(model)]), ctx)
        assert capsys.readouterr().out.count("leave out the load-balancing loss") == count
