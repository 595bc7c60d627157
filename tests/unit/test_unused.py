"""Weights that text does not use: found, not decayed, without adapters."""

import pytest
import torch
from small_models import CONFIGS, with_vision
from transformers import AutoModelForCausalLM

from distributed_training.errors import MissingRequirement
from distributed_training.model.lora import Lora
from distributed_training.model.loss import returns_plain_logits
from distributed_training.model.unused import outermost_modules, unused_by_text
from distributed_training.settings.training import TrainingSettings
from real_model_example import parameter_groups


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_config(with_vision())


@pytest.fixture(scope="module")
def unused():
    try:
        return unused_by_text(with_vision())
    except MissingRequirement as error:
        pytest.skip(str(error))


def is_of_vision(name: str) -> bool:
    return "vision_tower" in name or "multi_modal_projector" in name


def test_a_vision_part_is_found_and_the_loss_is_computed_in_chunks(model, unused):
    assert unused == {name for name, _ in model.named_parameters() if is_of_vision(name)}
    assert len(unused) > 10
    assert unused_by_text(CONFIGS["gpt2"]) == frozenset()
    assert returns_plain_logits(with_vision())


def test_the_outermost_modules_are_named():
    assert outermost_modules(dict.fromkeys(["a.b.x", "a.b.c.y", "d.z"]), ["a.e", "f"]) == [
        "a.b",
        "d",
    ]
    assert outermost_modules(dict.fromkeys(["a.x"]), ["a.y"]) == ["a.x"]


def test_weights_without_a_gradient_are_not_decayed(model, unused):
    decayed, others = parameter_groups(model, TrainingSettings(weight_decay=0.5, lr=0.1), unused)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
    assert not any(is_of_vision(names[parameter]) for parameter in decayed["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_they_get_no_adapters(unused):
    model = AutoModelForCausalLM.from_config(with_vision())
    Lora(4, 8.0, 0.0, "all-linear", "base", 0, unused=unused).attach(model)
    adapted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(adapted) == 2 * 7 and not any(map(is_of_vision, adapted))
    tokens = torch.arange(4)[None]
    model(input_ids=tokens, use_cache=False).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
