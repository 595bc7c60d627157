"""--load_in_4bit under fsdp: the layers and weights are those that transformers quantizes."""

import copy

import pytest
import torch
from small_models import CONFIGS
from transformers import AutoModelForCausalLM

from distributed_training.model.lora import Lora
from distributed_training.model.weights import from_config, from_folder

pytest.importorskip("bitsandbytes")  # optional
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", CONFIGS)
def test_layers_and_weights_are_those_of_a_model_that_is_loaded_in_4_bits(family, tmp_path):
    from distributed_training.model import four_bit

    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[family])  # a model writes its dtype into its configuration
    whole = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    whole.save_pretrained(tmp_path)
    loaded, _ = from_folder(str(tmp_path), config, torch.bfloat16, CPU)
    with torch.device("meta"):
        sharded = from_config(config, torch.bfloat16)
    four_bit.replace_layers(sharded, torch.bfloat16)
    for model in (loaded, sharded, whole):
        Lora(4, 8.0, 0.0, None, "base", 0).attach(model)
    four_bit.give_packed_shapes(sharded)

    layers = four_bit.layers_in_4bit(loaded)
    assert four_bit.layers_in_4bit(sharded).keys() == layers.keys()
    assert len(layers) == 2 * {"gpt2": 4, "llama": 7}[family]
    for name, layer in layers.items():
        packed, scales = four_bit.quantized(whole.get_submodule(name), CPU)
        assert torch.equal(packed, layer.weight.data), name
        expected = layer.weight.quant_state
        assert torch.equal(scales.absmax, expected.absmax) and scales.shape == expected.shape
        assert torch.equal(scales.state2.absmax, expected.state2.absmax)
    expected = {name: (p.shape, p.dtype) for name, p in loaded.named_parameters()}
    assert {name: (p.shape, p.dtype) for name, p in sharded.named_parameters()} == expected
