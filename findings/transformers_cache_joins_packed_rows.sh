#!/usr/bin/env bash
# release: transformers 5.23.0, torch 2.13.0
# finding: position_ids that start again at 0 keep packed documents apart only without a cache. With use_cache at its default, in training too, each document also attends to the ones before it; turning on gradient checkpointing, which turns the cache off, changes the loss.
# guess: Documents are kept apart with and without a cache (a doubt about the cache was noted). Nothing was guessed about gradient checkpointing.
# matters: Rows that were packed with position_ids and no attention mask train across documents, and whether they do depends on a switch for memory.
# instead: Pass use_cache=False, or set config.use_cache to False.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile transformers==5.23.0 torch==2.13.0
cd "$work"
HF_HOME=$work/home "$work/env/bin/python" - <<'PROGRAM' 2> errors || { cat errors; exit 1; }
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2,
))
first, second = torch.randint(0, 50, (2, 1, 5))
packed = torch.cat([first, second], dim=1)
positions = torch.arange(5).repeat(2).unsqueeze(0)


@torch.no_grad()
def distance(**options):
    """How far the second document's logits are from those that it has alone."""
    alone = model(second, use_cache=False).logits
    return (model(packed, position_ids=positions, **options).logits[:, 5:] - alone).abs().max()


found = {"no cache": distance(use_cache=False), "default": distance()}
model.train()
found["default, training"] = distance(labels=packed)
model.gradient_checkpointing_enable()
found["training with gradient checkpointing"] = distance(labels=packed)
for name, value in found.items():
    print(f"{name}: logits of the second document differ by {value:.1e}")
apart = [value < 1e-5 for value in found.values()]
assert apart == [True, False, False, True], found
PROGRAM
echo "As found: with the default cache packed documents see each other."
