#!/usr/bin/env bash
# release: peft 0.21.2, transformers 5.23.0, torch 2.13.0
# finding: ensure_weight_tying=True keeps a trained embedding and the head tied in Llama (embed_tokens), but not in GPT-2 (wte): the head stays as it was, and only a warning says that there is nothing to tie.
# guess: The embedding and the head stay tied in both.
# matters: New tokens that are trained as input of a GPT-2 are never learned as output, and the merged model is untied, larger by the embedding.
# instead: For GPT-2 name the head: modules_to_save=["lm_head"] ties both.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile \
    peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 torch==2.13.0
cd "$work"
HF_HOME=$work/home "$work/env/bin/python" - <<'PROGRAM' 2> errors || { cat errors; exit 1; }
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

GPT2 = GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=16)
LLAMA = LlamaConfig(
    vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
)


def after_a_step(config, saved, layer):
    """How far embedding and head are apart after an update, and warnings about the tie."""
    torch.manual_seed(0)
    lora = LoraConfig(target_modules=[layer], modules_to_save=[saved], ensure_weight_tying=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    said = [str(each.message) for each in caught if "ensure_weight_tying" in str(each.message)]
    trained = [each for each in model.parameters() if each.requires_grad]
    tokens = torch.randint(0, 50, (1, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.AdamW(trained, lr=0.1).step()
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    embedding, head = (
        end.modules_to_save["default"].weight if hasattr(end, "modules_to_save") else end.weight
        for end in ends
    )
    return (embedding - head).abs().max().item(), said


found = {}
for config, saved, layer in (
    (LLAMA, "embed_tokens", "q_proj"), (GPT2, "lm_head", "c_attn"), (GPT2, "wte", "c_attn"),
):
    name = f"{config.model_type}, {saved}"
    found[name], said = after_a_step(config, saved, layer)
    print(f"{name}: embedding and head differ by {found[name]:.2f}; {said or 'no warning'}")
apart = [value > 0 for value in found.values()]
assert apart == [False, False, True], found
PROGRAM
echo "As found: GPT-2's embedding loses its tie."
