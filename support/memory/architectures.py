"""Dimensions of a decoder-only transformer that determine memory, read from its config.json.

Needs neither PyTorch nor weights.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from support.cli.hub import download_config
from support.errors import UserError
from support.files.user_files import read_json, shown
from support.known_models import CONFIGS, name_on_hub

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
# Keys of config.json that GPT-2 names differently.
GPT2_KEYS = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}
SIZES = """
    num_hidden_layers n_layer hidden_size n_embd num_attention_heads n_head vocab_size n_positions
    max_position_embeddings
    """.split()


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
    qk_norm: bool = False  # a norm on query and key
    parallel: bool = False  # attention and MLP have the same input

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

    @property
    def norm(self) -> list[int]:
        """Elements of the parameters of one norm: a weight, and a bias except in RMSNorm."""
        return [self.hidden] * (1 if self.family == "llama" else 2)

    def block(self) -> list[int]:
        """Return the elements of each parameter of one transformer block, in the model's order."""
        attention, mlp = [], []
        for name, layer in self.linear_layers().items():
            (mlp if name.startswith("mlp.") else attention).extend(layer.parameters())
        if self.family == "gpt2":
            return [*self.norm, *attention, *self.norm, *mlp]
        if self.family == "gpt_neox":
            return [*self.norm, *self.norm, *attention, *mlp]
        head_norms = [self.head_dim, self.head_dim] if self.qk_norm else []
        return [*attention, *head_norms, *mlp, *self.norm, *self.norm]

    @property
    def tables(self) -> list[int]:
        """Rows of the token embedding, of learned positions, and of an untied output layer."""
        positions = [self.positions] if self.positions else []
        return [self.vocabulary, *positions, *([] if self.tied else [self.vocabulary])]

    def parameters(self) -> list[int]:
        """Return the elements of each parameter, in the model's order."""
        tables = [rows * self.hidden for rows in self.tables]
        head = [] if self.tied else [tables.pop()]
        return [*tables, *self.layers * self.block(), *self.norm, *head]

    def factored(self) -> int:
        """Return the rows and columns of all matrices, and the elements of all vectors.

        Adafactor's states have so many elements.
        """
        linear = self.linear_layers().values()
        vectors = sum(self.block()) - sum(layer.inputs * layer.outputs for layer in linear)
        block = sum(layer.inputs + layer.outputs for layer in linear) + vectors
        tables = sum(rows + self.hidden for rows in self.tables)
        return self.layers * block + tables + sum(self.norm)

    @property
    def total(self) -> int:
        """Number of parameters; tied weights count once."""
        return sum(self.parameters())

    def is_matrix(self, numel: int) -> bool:
        """Return whether a parameter of this size is a matrix (weight decay), no bias or norm."""
        return numel > max(3 * self.hidden, self.intermediate, self.query)


def find_architecture(model: str) -> Architecture:
    """Return the architecture of a model that is known by its name, or of a config.json.

    Args:
        model: a model's name, a config.json, or the folder of one. The config.json of any other
            name is read from the cache or from the hub.
    Raises:
        UserError: the file does not exist or is invalid, or the planner does not support its
            family.
    """
    if config := CONFIGS.get(name_on_hub(model)):
        return read_architecture(config, model)
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            export = Path(model) / "hf"
            remedy = f"use {export}" if (export / "config.json").exists() else "use a model folder"
            raise UserError(f"--model {model}: this folder has no config.json: {remedy}.")
    if not path.exists():
        path = Path(download_config(model))
    return read_architecture(_read_config(str(path)), str(path))


def _read_config(path: str) -> dict:
    return read_json("--model", path)


def checked_size(name: str, value: Any, path: str) -> int:
    """Return a size from a config.json.

    Raises:
        UserError: it is not a whole number, or larger than any model's: transformers would build
            thousands of layers, or exhaust memory.
    """
    limit = 10_000 if "layer" in name else 10**8
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise UserError(
            f"--model {path}: {name} is {shown(str(value))}, "
            f"and must be a whole number from 1 to {limit:,}."
        )
    return value


def check_config(path: str) -> None:
    """Check the sizes in a config.json before transformers builds the model.

    Raises:
        UserError: the file cannot be read, is not JSON, or has a size that is invalid.
    """
    config = _read_config(path)
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    for part, name in itertools.product(parts, SIZES):
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
    config, gpt2 = DEFAULTS[family] | given, family == "gpt2"

    def value(name: str, default: Any = None) -> Any:
        return config.get(GPT2_KEYS.get(name, name) if gpt2 else name, default)

    def size(name: str, default: int | None = None) -> int:
        name = GPT2_KEYS.get(name, name) if gpt2 else name
        return checked_size(name, config.get(name, default), path)

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    if heads > hidden:
        raise UserError(f"--model {path}: {heads} attention heads do not fit a width of {hidden}.")
    biases = bool(value("attention_bias", False))
    positions = "max_position_embeddings"
    limit = None if value(positions) is None else size(positions)
    return Architecture(
        family=family if family in ("gpt2", "gpt_neox") else "llama",
        layers=size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads if gpt2 else size("num_key_value_heads", heads),
        head_dim=hidden // heads if gpt2 else size("head_dim", hidden // heads),
        intermediate=size("intermediate_size", 4 * hidden if gpt2 else None),
        vocabulary=size("vocab_size"),
        positions=(limit or 0) if gpt2 else 0,
        limit=limit,
        tied=bool(value("tie_word_embeddings", False)),
        activation=value("hidden_act", "silu"),
        qkv_bias=family == "qwen2" or biases,
        out_bias=family != "qwen2" and biases,
        mlp_bias=bool(value("mlp_bias", False)),
        qk_norm=family == "qwen3",
        parallel=bool(value("use_parallel_residual", False)),
    )
