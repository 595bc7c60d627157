#!/usr/bin/env bash
# release: peft 0.21.2, transformers 5.23.0, torch 2.13.0
# finding: target_modules="all-linear" means another part of each mixture of experts: in Mixtral and Qwen3-MoE it also adapts the fused experts and the router, which are no linear layers; in gpt-oss it adapts attention only.
# guess: Only linear layers are adapted, so attention's four in each; the experts, which are single parameters, and the router are not.
# matters: The router of a mixture is trained without having been asked for, and the number of trained weights is not what the same recipe has for gpt-oss.
# instead: Name the layers, and read print_trainable_parameters and the names before training.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile \
    peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 torch==2.13.0
cd "$work"
HF_HOME=$work/home "$work/env/bin/python" - <<'PROGRAM' 2> errors || { cat errors; exit 1; }
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from torch import nn

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2,
}
CONFIGS = {
    "Mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "Qwen3-MoE": Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16, head_dim=16),
    "gpt-oss": GptOssConfig(**SIZES, num_local_experts=4, head_dim=16),
}
ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}


def adapted(config):
    """The parts of the layer that get adapters, and the layer's linear layers."""
    model = AutoModelForCausalLM.from_config(config)
    layer = model.model.layers[0]
    linear = {name for name, part in layer.named_modules() if isinstance(part, nn.Linear)}
    names = [n for n, p in get_peft_model(
        model, LoraConfig(target_modules="all-linear")).named_parameters() if p.requires_grad]
    names = {name.split(".layers.0.")[1].split(".lora_")[0] for name in names}
    return {name.replace(".base_layer", "") for name in names}, linear


for name, config in CONFIGS.items():
    parts, linear = adapted(config)
    print(f"{name}: linear layers {sorted(linear)}")
    print(f"  also adapted: {sorted(parts - linear) or 'nothing'}")
    assert linear == ATTENTION and parts >= ATTENTION, (linear, parts)
    more = set() if name == "gpt-oss" else {"mlp.experts", "mlp.gate"}
    assert parts - linear == more, parts
PROGRAM
echo "As found: all-linear adapts what is no linear layer."
