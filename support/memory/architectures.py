"""Dimensions of a decoder-only transformer that determine memory, read from its config.json.

Needs neither PyTorch nor weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from support.cli.hub import download_config
from support.errors import UserError
from support.files.user_files import read_json, shown
from support.known_models import (
    EMBEDDED_MODEL,
    EMBEDDED_SHAPE,
    EMBEDDED_VOCABULARY,
    GPT2_SHAPES,
    LARGE_MODELS,
    name_on_hub,
)

MOST_OF_CONFIG = 16 << 20  # characters; some files list thousands of labels

# The supported families, with transformers' defaults for keys that config.json omits.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_positions": 1024,
        "vocab_size": 50257,
        "tie_word_embeddings": True,
        "activation_function": "gelu_new",
    },
    "gpt_neox": {"hidden_act": "gelu", "use_parallel_residual": True, "attention_bias": True},
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}


class Linear(NamedTuple):
    """Shape of a linear layer."""

    inputs: int
    outputs: int
    bias: bool

    def parameters(self) -> list[int]:
        """Return the elements of its weight and of its bias, if it has one."""
        return [self.inputs * self.outputs] + [self.outputs] * self.bias


@dataclass(frozen=True)
class Architecture:
    """Dimensions of a decoder-only transformer that determine memory."""

    family: str  # "gpt2", "gpt_neox" or "llama" (also for Mistral and Qwen)
    # As in config.json.
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int  # rows of a learned position embedding; 0 for rotary positions
    limit: int | None  # the longest sequence; None if the configuration does not state it
    tied: bool  # the output layer shares the weight of the input embedding
    activation: str  # of the MLP, by transformers' name
    # Biases on query, key and value; on attention's output; in the MLP. GPT-2 has all, GPT-NeoX the
    # last one, and with qkv_bias the first two.
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    # A norm on query and key; attention and MLP in parallel.
    qk_norm: bool = False
    parallel: bool = False

    @property
    def query(self) -> int:
        """Width of all queries together."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all keys together; less than `query` with grouped-query attention."""
        return self.kv_heads * self.head_dim

    def linear_layers(self) -> dict[str, Linear]:
        """Return the linear layers of a transformer block, in the model's order.

        The keys are suffixes of the layers' names in transformers.
        """
        h, f, q, k = self.hidden, self.intermediate, self.query, self.key
        if self.family == "gpt2":
            return {
                "attn.c_attn": Linear(h, 3 * h, True),
                "attn.c_proj": Linear(h, h, True),
                "mlp.c_fc": Linear(h, f, True),
                "mlp.c_proj": Linear(f, h, True),
            }
        if self.family == "gpt_neox":
            return {
                "attention.query_key_value": Linear(h, 3 * h, self.qkv_bias),
                "attention.dense": Linear(h, h, self.qkv_bias),
                "mlp.dense_h_to_4h": Linear(h, f, True),
                "mlp.dense_4h_to_h": Linear(f, h, True),
            }
        return {
            "self_attn.q_proj": Linear(h, q, self.qkv_bias),
            "self_attn.k_proj": Linear(h, k, self.qkv_bias),
            "self_attn.v_proj": Linear(h, k, self.qkv_bias),
            "self_attn.o_proj": Linear(q, h, self.out_bias),
            "mlp.gate_proj": Linear(h, f, self.mlp_bias),
            "mlp.up_proj": Linear(h, f, self.mlp_bias),
            "mlp.down_proj": Linear(f, h, self.mlp_bias),
        }

    def block(self) -> list[int]:
        """Return the elements of each parameter of one transformer block, in the model's order."""
        attention, mlp = [], []
        for name, layer in self.linear_layers().items():
            (mlp if name.startswith("mlp.") else attention).extend(layer.parameters())
        norm = [self.hidden, self.hidden]  # weight and bias
        if self.family == "gpt2":
            return [*norm, *attention, *norm, *mlp]
        if self.family == "gpt_neox":
            return [*norm, *norm, *attention, *mlp]
        head_norms = [self.head_dim, self.head_dim] if self.qk_norm else []
        return [*attention, *head_norms, *mlp, self.hidden, self.hidden]

    def parameters(self) -> list[int]:
        """Return the elements of each parameter, in the model's order."""
        h, norm = self.hidden, 1 if self.family == "llama" else 2
        embeddings = [self.vocabulary * h] + ([self.positions * h] if self.positions else [])
        head = [] if self.tied else [self.vocabulary * h]
        return [*embeddings, *self.layers * self.block(), *norm * [h], *head]

    def factored(self) -> int:
        """Return the rows and columns of all matrices, and the elements of all vectors.

        Adafactor's states have so many elements.
        """
        linear = self.linear_layers().values()
        vectors = sum(self.block()) - sum(layer.inputs * layer.outputs for layer in linear)
        block = sum(layer.inputs + layer.outputs for layer in linear) + vectors
        embeddings = [self.vocabulary] * (1 if self.tied else 2) + [self.positions] * bool(
            self.positions
        )
        norm = self.hidden * (1 if self.family == "llama" else 2)
        return self.layers * block + sum(rows + self.hidden for rows in embeddings) + norm

    @property
    def total(self) -> int:
        """Number of parameters; tied weights count once."""
        return sum(self.parameters())

    def is_matrix(self, numel: int) -> bool:
        """Return whether a parameter of this size is a matrix (weight decay), no bias or norm."""
        return numel > max(3 * self.hidden, self.intermediate, self.query)


def gpt2(
    layers: int, heads: int, hidden: int, vocabulary: int = 50257, positions: int = 1024
) -> Architecture:
    """Return a GPT-2 architecture of any size."""
    heads_and_size = (heads, heads, hidden // heads)
    return Architecture(
        *("gpt2", layers, hidden, *heads_and_size, 4 * hidden, vocabulary),
        *(positions, positions, True, "gelu_new"),
    )


def find_architecture(model: str) -> Architecture:
    """Return the architecture of a model that is known by its name, or of a config.json.

    Args:
        model: a model's name, a config.json, or the folder of one. The config.json of any other
            name is read from the cache or from the hub.
    Raises:
        UserError: the file does not exist or is invalid, or the planner does not support its
            family.
    """
    if model == EMBEDDED_MODEL:
        return gpt2(*EMBEDDED_SHAPE, vocabulary=EMBEDDED_VOCABULARY, positions=512)
    if model in GPT2_SHAPES:
        return gpt2(*GPT2_SHAPES[model])
    if name_on_hub(model) in LARGE_MODELS:
        return read_architecture(LARGE_MODELS[name_on_hub(model)][1], model)
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        path = Path(download_config(model))
    return read_architecture(
        read_json("--model", str(path), unique=False, most=MOST_OF_CONFIG), str(path)
    )


def checked_size(name: str, value, path: str) -> int:
    """Return a size from a config.json.

    Raises:
        UserError: it is not a whole number, or larger than any model's, so that the computation
            would take hours.
    """
    limit = 10_000 if "layer" in name else 10**8
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise UserError(
            f"--model {path}: {name} is {shown(str(value))}, "
            f"and must be a whole number from 1 to {limit:,}."
        )
    return value


SIZES = """
    num_hidden_layers n_layer hidden_size n_embd num_attention_heads n_head vocab_size n_positions
    max_position_embeddings
    """.split()


def check_config(path: str) -> None:
    """Check the sizes in a config.json before transformers builds the model.

    A configuration with a thousand million layers would exhaust memory.

    Raises:
        UserError: the file cannot be read, is not JSON, or has a size that is not a whole number or
            is too large.
    """
    config = read_json("--model", path, unique=False, most=MOST_OF_CONFIG)
    for part in (config, config.get("text_config")):
        for name in SIZES if isinstance(part, dict) else ():
            if part.get(name) is not None:
                checked_size(name, part[name], path)


def read_architecture(config: dict, path: str) -> Architecture:
    """Return the architecture that a config.json describes, with transformers' defaults.

    Raises:
        UserError: the family is not supported, or a size is missing or invalid.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in DEFAULTS:
        raise UserError(
            f"--model {path}: the memory estimate does not support model_type "
            f"{shown(str(family))}, only {', '.join(DEFAULTS)}."
        )
    given = {key: value for key, value in config.items() if value is not None}
    config = DEFAULTS[family] | given

    def size(name: str, default: int | None = None) -> int:
        return checked_size(name, config.get(name, default), path)

    hidden = size("n_embd" if family == "gpt2" else "hidden_size")
    heads = size("n_head" if family == "gpt2" else "num_attention_heads")
    if heads > hidden:
        raise UserError(f"--model {path}: {heads} attention heads do not fit a width of {hidden}.")
    if family == "gpt2":
        shape = gpt2(size("n_layer"), heads, hidden, size("vocab_size"), size("n_positions"))
        tied, activation = config["tie_word_embeddings"], config["activation_function"]
        return replace(
            shape, intermediate=size("n_inner", 4 * hidden), tied=bool(tied), activation=activation
        )
    neox = family == "gpt_neox"
    return Architecture(
        family="gpt_neox" if neox else "llama",
        layers=size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads),
        intermediate=size("intermediate_size"),
        vocabulary=size("vocab_size"),
        positions=0,
        limit=size("max_position_embeddings") if "max_position_embeddings" in config else None,
        tied=bool(config.get("tie_word_embeddings", False)),
        activation=config.get("hidden_act", "silu"),
        qkv_bias=family == "qwen2" or config.get("attention_bias", False),
        out_bias=family != "qwen2" and config.get("attention_bias", False),
        mlp_bias=config.get("mlp_bias", False),
        qk_norm=family == "qwen3",
        parallel=config.get("use_parallel_residual", False),
    )
