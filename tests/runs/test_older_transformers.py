"""An exported model has the same loss and tokens under transformers 4.57, which pip installs."""

import os
import subprocess
import sys

import pytest
import torch
from small_models import SIZES
from tokenizer_zoo import tokenizer_of
from transformers import GenerationConfig, GPTNeoXConfig, LlamaConfig, Phi3Config, Qwen3MoeConfig

from distributed_training.model.description import write_description
from distributed_training.model.spec import ModelSpec, WeightSource
from distributed_training.model.weights import from_config

OLDER = ["transformers==4.57.6", "huggingface_hub<1", "tokenizers<=0.23.0"]
LOSS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
ids = torch.arange(3, 43)[None]
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        print(model(input_ids=ids, labels=ids).loss.item())
    print(*AutoTokenizer.from_pretrained(folder)("The <|user|> of the hand, 1999<|end|>")["input_ids"])
"""
BLOCKS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **SIZES}
BLOCKS |= {"num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 3.5]}
CONFIGS = {
    "llama": (LlamaConfig, {"rope_theta": 500.0, **YARN}),
    "gpt_neox": (GPTNeoXConfig, {"rope_theta": 500.0, "partial_rotary_factor": 0.5}),
    "phi3": (Phi3Config, {"rope_theta": 500.0, "rope_type": "longrope", **FACTORS}),
    "qwen3_moe": (Qwen3MoeConfig, {"rope_theta": 500.0, "rope_type": "default"}),
}
MORE = {
    "phi3": {"original_max_position_embeddings": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def losses(folders, **env):
    """The loss of each folder's model, and the ids of a text with special tokens."""
    command = [sys.executable, "-c", LOSS, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


@pytest.mark.slow
def test_the_loss_and_tokens_of_an_export_under_transformers_4_57(tmp_path):
    if not hasattr(LlamaConfig(), "rope_parameters"):
        pytest.skip("transformers 4 is installed")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    packages = tmp_path / "packages"
    if subprocess.run([*install, str(packages), *OLDER], capture_output=True).returncode:
        pytest.skip("pip cannot download transformers 4.57")
    folders = []
    for name, (kind, settings) in CONFIGS.items():
        config = kind(**BLOCKS, **MORE.get(name, {}), rope_parameters=settings)
        torch.manual_seed(0)
        model = from_config(config)
        model.save_pretrained(tmp_path / name)
        spec = ModelSpec(config, tokenizer_of("gpt2"), GenerationConfig(), WeightSource("", 0), 16)
        write_description(spec, tmp_path / name, "text", torch.float32)
        folders.append(tmp_path / name)
    found = losses(folders, PYTHONPATH=str(packages))
    assert found == pytest.approx(losses(folders), abs=1e-6)
