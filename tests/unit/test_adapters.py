"""What adapters compute, and what their weights are when they are added to those of the model."""

import pytest
import torch
from small_models import CONFIGS
from transformers import AutoModelForCausalLM

from distributed_training.model.lora import Lora, merged


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
