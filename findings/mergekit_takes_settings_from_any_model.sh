#!/usr/bin/env bash
# release: mergekit 0.1.5, transformers 5.23.0, torch 2.13.0
# finding: A merge without base_model takes config, tokenizer, chat template and generation settings from one of the models, and which one differs from run to run of the same recipe, because it is the first of a Python set. The weights are the same. With base_model it is that model.
# guess: The chat template and the generation settings are kept, from the base or the first model.
# matters: The same merge ends its answers at another token, or has another chat template or RoPE base, when it is repeated. A score of it cannot be reproduced.
# instead: Name one of the models as base_model. A linear merge uses it for these files only.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile \
    mergekit==0.1.5 transformers==5.23.0 torch==2.13.0
cd "$work"
HF_HOME=$work/home HF_HUB_OFFLINE=1 "$work/env/bin/python" - <<'PROGRAM' 2> errors || { cat errors; exit 1; }
import json
import subprocess
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def fine_tuned(name, end, theta):
    """Save a model of the common shape with its own end token, template and RoPE base."""
    torch.manual_seed(end)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, rope_theta=theta))
    model.generation_config = GenerationConfig(eos_token_id=end)
    model.save_pretrained(name)
    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(8)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"t{end}")
    tokenizer.chat_template = f"template of {name}"
    tokenizer.save_pretrained(name)


def merge(recipe):
    """Where the settings of a merge come from, and its weights."""
    Path("recipe.yml").write_text(json.dumps(recipe))  # JSON is valid YAML
    command = ["env/bin/mergekit-yaml", "recipe.yml", "merged", "--no-write-model-card"]
    subprocess.run(command, check=True)
    read = {name: json.loads(Path("merged", f"{name}.json").read_text())
            for name in ("config", "generation_config", "tokenizer_config")}
    settings = (
        Path("merged/chat_template.jinja").read_text(),
        read["tokenizer_config"]["eos_token"],
        read["generation_config"]["eos_token_id"],
        read["config"]["rope_parameters"]["rope_theta"],
    )
    return settings, load_file("merged/model.safetensors")


fine_tuned("first", 1, 10_000.0)
fine_tuned("second", 2, 500_000.0)
of_first = ("template of first", "t1", 1, 10_000.0)
of_second = ("template of second", "t2", 2, 500_000.0)
recipe = {
    "merge_method": "linear",
    "models": [{"model": name, "parameters": {"weight": 0.5}} for name in ("first", "second")],
}
seen = {}
for run in range(1, 12):  # ends as soon as both were seen
    settings, weights = merge(recipe)
    print(f"run {run}: {settings}")
    seen[settings] = weights
    if len(seen) == 2:
        break
assert set(seen) == {of_first, of_second}
for name, expected in (("first", of_first), ("second", of_second)):
    settings, weights = merge({**recipe, "base_model": name})
    print(f"base_model {name}: {settings}")
    assert settings == expected
    for others in seen.values():
        assert all(torch.equal(weight, others[key]) for key, weight in weights.items())
PROGRAM
echo "As found: the donor of the settings changes from run to run."
