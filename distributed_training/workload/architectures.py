"""Dimensions of a decoder-only transformer that determine memory, read from its config.json.

Needs neither PyTorch nor weights.
"""

from dataclasses import dataclass
from typing import NamedTuple

from distributed_training.errors import UserError
from distributed_training.files.json_types import JsonObject
from distributed_training.files.user_files import shown

# The largest sizes that the planner computes with, far above those of any model.
MOST_ELEMENTS, MOST_LAYERS = 10**12, 100_000

# The supported families, with transformers' defaults for keys that config.json omits.
DEFAULTS: dict[str, JsonObject] = {
    "gpt2": {
        "max_position_embeddings": 1024,
        "vocab_size": 50257,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_new",
    },
    "gpt_neox": {"hidden_act": "gelu", "use_parallel_residual": True, "attention_bias": True},
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
GPT2_KEYS = {  # GPT-2's names of keys that all other families share
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
}
# Name of the embedding in weight files.
EMBEDDINGS = {
    "gpt2": "transformer.wte.weight",
    "gpt_neox": "gpt_neox.embed_in.weight",
    "llama": "model.embed_tokens.weight",
}

# The parts of a config.json that determine memory.
_KEYS = """
    model_type hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads vocab_size max_position_embeddings
    """.split()
_QWEN_HALF = ("qwen2", 896, 4864, 24, 14, 2, 151936, 32768)
# Short name, name on the hub, and the values of these keys.
_ROWS = (
    ("Llama-2-7B", "meta-llama/Llama-2-7b-hf", "llama", 4096, 11008, 32, 32, 32, 32000, 4096),
    ("Llama-2-13B", "meta-llama/Llama-2-13b-hf", "llama", 5120, 13824, 40, 40, 40, 32000, 4096),
    ("Llama-3-8B", "meta-llama/Meta-Llama-3-8B", "llama", 4096, 14336, 32, 32, 8, 128256, 8192),
    ("Qwen2.5-7B", "Qwen/Qwen2.5-7B", "qwen2", 3584, 18944, 28, 28, 4, 152064, 131072),
    ("Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", *_QWEN_HALF),
    ("Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", *_QWEN_HALF),
    ("Mistral-7B", "mistralai/Mistral-7B-v0.1", "mistral", 4096, 14336, 32, 32, 8, 32000, 32768),
)
_TIED = ("Qwen2.5-0.5B", "Qwen2.5-0.5B-Instruct")  # the output layer is the embedding
# Name on the hub -> short name, and these parts of its config.json.
KNOWN_MODELS = {
    name: (short, {**dict(zip(_KEYS, row, strict=True)), "tie_word_embeddings": short in _TIED})
    for short, name, *row in _ROWS
}


class Linear(NamedTuple):
    """Shape of a linear layer."""

    inputs: int
    outputs: int
    bias: bool


@dataclass(frozen=True)
class Attention:
    """Dimensions of the attention of a transformer block."""

    heads: int
    kv_heads: int
    head_dim: int
    # Of Llama and GPT-NeoX: biases on query, key and value; on the output.
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False  # a norm on query and key

    @property
    def query(self) -> int:
        """Width of all queries together; that of the keys is less with grouped-query attention."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class MLP:
    """Dimensions of the MLP of a transformer block."""

    intermediate: int
    activation: str  # by transformers' name
    bias: bool = False  # of Llama


@dataclass(frozen=True)
class Embedding:
    """Tables outside of the blocks: of tokens, learned positions and an output layer."""

    vocabulary: int
    positions: int  # rows of a learned position embedding; 0 for rotary positions
    tied: bool  # the output layer shares the weight of the input embedding
    # Tied by config.json alone: the weights on the hub may have another output layer.
    unconfirmed: bool = False

    @property
    def rows(self) -> list[int]:
        """Rows of the token embedding, of learned positions, and of an untied output layer."""
        positions = [self.positions] if self.positions else []
        return [self.vocabulary, *positions, *([] if self.tied else [self.vocabulary])]


@dataclass(frozen=True)
class Architecture:
    """Dimensions of a decoder-only transformer that determine memory."""

    family: str  # "gpt2", "gpt_neox" or "llama" (also for Mistral and Qwen)
    layers: int
    hidden: int
    limit: int | None  # the longest sequence; None if the configuration does not state it
    attention: Attention
    mlp: MLP
    embedding: Embedding
    parallel: bool = False  # attention and MLP have the same input

    def linear_layers(self) -> dict[str, Linear]:
        """Return the linear layers of a block, in the model's order, by the ends of their names."""
        a, h, f = self.attention, self.hidden, self.mlp.intermediate
        if self.family == "llama":
            return {
                "self_attn.q_proj": Linear(h, a.query, a.qkv_bias),
                "self_attn.k_proj": Linear(h, a.key, a.qkv_bias),
                "self_attn.v_proj": Linear(h, a.key, a.qkv_bias),
                "self_attn.o_proj": Linear(a.query, h, a.out_bias),
                "mlp.gate_proj": Linear(h, f, self.mlp.bias),
                "mlp.up_proj": Linear(h, f, self.mlp.bias),
                "mlp.down_proj": Linear(f, h, self.mlp.bias),
            }
        names, bias = "attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj", True
        if self.family == "gpt_neox":
            names = "attention.query_key_value attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h"
            bias = a.qkv_bias
        layers = Linear(h, 3 * h, bias), Linear(h, h, bias), Linear(h, f, True), Linear(f, h, True)
        return dict(zip(names.split(), layers, strict=True))

    @property
    def matrices(self) -> list[int]:
        """Elements of the weight of each linear layer of a block."""
        return [layer.inputs * layer.outputs for layer in self.linear_layers().values()]

    @property
    def norm(self) -> list[int]:
        """Elements of the parameters of one norm: a weight, and a bias except in RMSNorm."""
        return [self.hidden] * (1 if self.family == "llama" else 2)

    def block(self) -> list[int]:
        """Return the elements of each parameter of one transformer block, in the model's order."""
        attention, mlp = [], []
        for name, (inputs, outputs, bias) in self.linear_layers().items():
            of_part = mlp if name.startswith("mlp.") else attention
            of_part += [inputs * outputs, outputs] if bias else [inputs * outputs]
        if self.family == "gpt2":
            return [*self.norm, *attention, *self.norm, *mlp]
        if self.family == "gpt_neox":
            return [*self.norm, *self.norm, *attention, *mlp]
        of_head = self.attention.head_dim
        head_norms = [of_head, of_head] if self.attention.qk_norm else []
        return [*attention, *head_norms, *mlp, *self.norm, *self.norm]

    def parameters(self) -> list[int]:
        """Return the elements of each parameter, in the model's order."""
        tables = [rows * self.hidden for rows in self.embedding.rows]
        head = [] if self.embedding.tied else [tables.pop()]
        return [*tables, *self.layers * self.block(), *self.norm, *head]

    def factored(self) -> int:
        """Return the elements of Adafactor's states: of a matrix its rows and columns."""
        vectors = sum(self.block()) - sum(self.matrices)
        linear = sum(layer.inputs + layer.outputs for layer in self.linear_layers().values())
        tables = sum(rows + self.hidden for rows in self.embedding.rows)
        return self.layers * (linear + vectors) + tables + sum(self.norm)

    @property
    def total(self) -> int:
        """Number of parameters; tied weights count once."""
        return sum(self.parameters())

    def is_matrix(self, numel: int) -> bool:
        """Return whether a parameter of this size is a matrix (weight decay), no bias or norm."""
        return numel > max(3 * self.hidden, self.mlp.intermediate, self.attention.query)


def read_architecture(config: dict, path: str) -> Architecture:
    """Return the architecture that a config.json describes, with transformers' defaults.

    Raises:
        UserError: the family is not supported, or a size is missing or invalid.
    """
    family, value = _with_defaults(config, path)
    gpt2 = family == "gpt2"

    def size(name: str, default: int | None = None, most: int = MOST_ELEMENTS) -> int:
        found = value.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= most:
            limits = f"a whole number from 1 to {most:,}"
            raise UserError(f"--model {path}: {name} is {shown(found)}, and must be {limits}.")
        return found

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    biases = bool(value.get("attention_bias", False))
    limit = size("max_position_embeddings") if "max_position_embeddings" in value else None
    layers = size("num_hidden_layers", most=MOST_LAYERS)
    attention = Attention(
        heads,
        kv_heads=heads if gpt2 else size("num_key_value_heads", heads),
        head_dim=hidden // heads if gpt2 else size("head_dim", hidden // heads),
        qkv_bias=family == "qwen2" or biases,
        out_bias=family != "qwen2" and biases,
        qk_norm=family == "qwen3",
    )
    mlp = MLP(
        size("intermediate_size", 4 * hidden if gpt2 else None),
        activation=value.get("hidden_act", "silu"),
        bias=bool(value.get("mlp_bias", False)),
    )
    embedding = Embedding(
        size("vocab_size"),
        positions=(limit or 0) if gpt2 else 0,
        tied=bool(value.get("tie_word_embeddings", False)),
    )
    return Architecture(
        family=family if family in ("gpt2", "gpt_neox") else "llama",
        layers=layers,
        hidden=hidden,
        limit=limit,
        attention=attention,
        mlp=mlp,
        embedding=embedding,
        parallel=bool(value.get("use_parallel_residual", False)),
    )


def _with_defaults(config: dict, path: str) -> tuple[str, JsonObject]:
    """Return the family of a config.json, and its values by the names that all families share."""
    family = str(config.get("model_type"))
    if family not in DEFAULTS:
        problem = f"the memory estimate does not support model_type {family}"
        raise UserError(f"--model {path}: {problem}, only {', '.join(DEFAULTS)}.")
    given = {GPT2_KEYS.get(key, key): value for key, value in config.items() if value is not None}
    return family, DEFAULTS[family] | given


def name_on_hub(model: str) -> str:
    """Return the full name of a model that is given by its short name; other names unchanged."""
    for name, (short, _) in KNOWN_MODELS.items():
        if model.lower() in (name.lower(), name.lower().partition("/")[2], short.lower()):
            return name
    return model
