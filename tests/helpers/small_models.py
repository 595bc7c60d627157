"""Configurations of models of two blocks, for tests that build a model in their own process."""

from transformers import GPT2Config, LlamaConfig

SIZES = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
CONFIGS = {
    # GPT-2's layers store transposed weights, and have biases.
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, **SIZES),
    "llama": LlamaConfig(
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, **SIZES},
    ),
}
