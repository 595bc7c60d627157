"""The workload of a run: what its memory depends on, of model, batches, ranks and adapters."""

import math
from dataclasses import dataclass, replace

from distributed_training.errors import UserError
from distributed_training.hardware import AMPERE, HOPPER, cpu_computes_bf16, shares_keys
from distributed_training.loss_chunks import fits_in_graph
from distributed_training.optimizers import OPTIMIZERS
from distributed_training.workload.architectures import Architecture, Linear

# Default targets of adapters, as in peft's TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.
USUAL_TARGETS = {"gpt2": "c_attn", "gpt_neox": "query_key_value", "llama": "q_proj,v_proj"}
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Adapters:
    """LoRA adapters on some linear layers of each transformer block."""

    r: int
    layers: tuple[str, ...]  # the layers, as in Architecture.linear_layers
    # --load_in_4bit: the frozen weights of the blocks' linear layers are in 4 bits (NF4).
    frozen_in_4bit: bool = False
    magnitudes: bool = False  # --lora_dora

    def shapes(self, model: Architecture) -> list[Linear]:
        """Return the shapes of the adapted layers of a transformer block."""
        return [model.linear_layers()[layer] for layer in self.layers]

    def factors(self, model: Architecture) -> list[tuple[int, int]]:
        """Return rows and columns of A and B of each adapted layer of a transformer block."""
        of_layers = (((s.inputs, self.r), (self.r, s.outputs)) for s in self.shapes(model))
        return [factor for a_and_b in of_layers for factor in a_and_b]

    def matrices(self, model: Architecture) -> list[int]:
        """Return the elements of A and B of each adapted layer of a transformer block."""
        return [rows * columns for rows, columns in self.factors(model)]

    def vectors(self, model: Architecture) -> list[int]:
        """Return the elements of DoRA's magnitudes of each adapted layer of a block."""
        return [shape.outputs for shape in self.shapes(model)] if self.magnitudes else []

    def of_block(self, model: Architecture) -> list[int]:
        """Return the elements of the trained parameters of a transformer block."""
        return self.matrices(model) + self.vectors(model)

    def factored(self, model: Architecture) -> int:
        """Return the elements of Adafactor's states, as Architecture.factored."""
        rows_and_columns = sum(map(sum, self.factors(model)))
        return model.layers * (rows_and_columns + sum(self.vectors(model)))


def target_names(targets: str) -> list[str]:
    """Return the suffixes of layers' names that --lora_targets lists."""
    return [name.strip() for name in targets.split(",") if name.strip()]


def is_target(layer: str, name: str) -> bool:
    """Return whether a name of --lora_targets is the end of a layer's path."""
    return f".{layer}".endswith(f".{name}")


def adapters(
    model: Architecture,
    r: int | None,
    targets: str | None,
    in_4bit: bool = False,
    dora: bool = False,
) -> Adapters | None:
    """Return the adapters that --lora_r and --lora_targets request; None without --lora_r.

    Args:
        in_4bit: --load_in_4bit.
        dora: --lora_dora.

    Raises:
        UserError: a target is not one of the linear layers of a transformer block.
    """
    layers = tuple(model.linear_layers())
    if r is None or targets == ALL_LINEAR:
        return Adapters(r, layers, in_4bit, dora) if r else None
    adapted = set()
    for name in target_names(targets or USUAL_TARGETS[model.family]):
        matches = {layer for layer in layers if is_target(layer, name)}
        if not matches:
            raise UserError(
                f"--lora_targets {name}: the memory estimate supports {', '.join(layers)}, "
                f"and {ALL_LINEAR}."
            )
        adapted |= matches
    return Adapters(r, tuple(layer for layer in layers if layer in adapted), in_4bit, dora)


@dataclass(frozen=True)
class Device:
    """The device of a rank."""

    type: str = "cuda"  # or "cpu", where the rules of autocast differ
    capability: tuple[int, int] = HOPPER  # compute capability of the GPU


@dataclass(frozen=True)
class Kernels:
    """The kernels that compute blocks and loss: they save different tensors for backward."""

    fused_gelu: bool = True  # one kernel computes GPT-2's activation
    attention_mask: bool = False  # attention by SDPA with a mask, as for isolated documents
    compiled: bool = False  # with torch.compile
    compiled_loss: bool = False  # chunks of the loss only: --compile_loss
    bf16_blocks: bool = False  # the blocks compute in bf16 where autocast would choose the dtypes
    recorded: bool = False  # --cuda_graph: CUDA graphs of micro-batches, on one GPU


@dataclass(frozen=True)
class Dtypes:
    """What the strategy does to a model's operations, see Strategy."""

    autocast: bool = False  # autocast chooses the dtypes of this precision
    # torch.nn.Linear is replaced by a version that always saves its input.
    replaces_linear: bool = False


@dataclass(frozen=True)
class OwnRank:
    """The rank that is planned."""

    number: int | None = None  # None: the one that needs the most memory
    share: float = 1.0  # its sequences in a micro-batch / batch_size (--rank_shares)


@dataclass(frozen=True)
class Workload:
    """Workload of a run: the model, its batches and the number of ranks."""

    model: Architecture
    world_size: int  # number of ranks, one per GPU
    batch_size: int = 4  # sequences in one micro-batch, of each rank (--rank_shares: on average)
    seq_length: int = 512  # tokens in each
    precision: str = "bf16"  # "fp32", "bf16" or "fp16"
    gradient_checkpointing: bool = False
    accumulation: int = 1  # micro-batches per optimizer step
    device: Device = Device()
    rank: OwnRank = OwnRank()
    lora: Adapters | None = None  # adapters on frozen weights; None: all parameters are trained
    kernels: Kernels = Kernels()
    optimizer: str = "adamw"  # one of OPTIMIZERS
    reduce_dtype: str | None = None  # --reduce_dtype; None: the strategy's own
    dtypes: Dtypes = Dtypes()

    @property
    def trained(self) -> list[int]:
        """Elements of each trained parameter, in the model's order."""
        if self.lora is None:
            return self.model.parameters()
        return self.model.layers * self.lora.of_block(self.model)

    @property
    def frozen(self) -> list[int]:
        """Elements of each parameter that is not trained, in the model's order."""
        return [] if self.lora is None else self.model.parameters()

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter, in the model's order, then of the adapters."""
        return self.frozen + self.trained

    @property
    def packed(self) -> list[int]:
        """Elements of each weight of a transformer block that is in 4 bits."""
        return self.model.matrices if self.in_4bit else []

    def bytes_of(self, elements: int, item: int, blocks: int) -> int:
        """Return the bytes of parameters, without the scales of those in 4 bits.

        Args:
            elements: of all of them, among them the linear layers of `blocks` transformer blocks.
            item: bytes of an element that is not in 4 bits.
        """
        in_4bit = blocks * sum(self.packed)
        return item * (elements - in_4bit) + in_4bit // 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of all weights in 4 bits.

        A scale of 8 bits for each 64 elements, and for each 256 of these one in fp32 (double
        quantization, Dettmers et al., arXiv 2305.14314); two tables of a weight's values.
        """
        of_block = sum(n // 64 + 4 * -(-n // (64 * 256)) + 4 * (16 + 256) for n in self.packed)
        return self.model.layers * of_block

    @property
    def frozen_bytes(self) -> int:
        """Bytes of all frozen weights, in the dtype of computations or in 4 bits."""
        whole = self.bytes_of(sum(self.frozen), self.item, self.model.layers)
        return whole + self.scale_bytes

    @property
    def frozen_shard_bytes(self) -> int:
        """Bytes of one rank's shards of the frozen weights; the scales stay whole."""
        n, layers = self.world_size, self.model.layers
        packed = layers * self.packed
        others = shard_elements(self.frozen, n) - shard_elements(packed, n)
        in_4bit = shard_elements([elements // 2 for elements in packed], n)
        return self.item * others + in_4bit + self.scale_bytes

    @property
    def in_4bit(self) -> bool:
        """Whether the frozen weights of the blocks' linear layers are in 4 bits."""
        return self.lora is not None and self.lora.frozen_in_4bit

    @property
    def dequantized(self) -> int:
        """Bytes of the largest weight that is converted from 4 bits while it is used."""
        return self.item * max(self.model.matrices) if self.in_4bit else 0

    @property
    def matrices_in_blocks(self) -> list[tuple[int, int]]:
        """Rows and columns of each trained matrix of a transformer block: A and B of adapters."""
        if self.lora:
            return self.lora.factors(self.model)
        layers = self.model.linear_layers().values()
        return [(layer.inputs, layer.outputs) for layer in layers]

    @property
    def in_matrices(self) -> int:
        """Elements of these matrices in all blocks."""
        return self.model.layers * sum(rows * columns for rows, columns in self.matrices_in_blocks)

    @property
    def rows_and_columns(self) -> int:
        """Rows and columns of all trained matrices, and elements of the other parameters."""
        return self.lora.factored(self.model) if self.lora else self.model.factored()

    @property
    def on_cpu(self) -> bool:
        """Whether the device is a CPU."""
        return self.device.type == "cpu"

    @property
    def has_bf16(self) -> bool:
        """Whether the device has instructions for bf16; a CPU is that of this machine."""
        return cpu_computes_bf16() if self.on_cpu else self.device.capability >= AMPERE

    def optimizer_states(self, sizes: list[int]) -> int:
        """Return the bytes of the optimizer's states, without the fp32 weights.

        Args:
            sizes: elements of each tensor that the optimizer updates: parameters, or shards.
        """
        return OPTIMIZERS[self.optimizer].state_bytes(sizes, self)

    def groups_of_matrices(self, sizes: list[int]) -> list[list[int]]:
        """Return the sizes of matrices in each parameter group that the optimizer has for them."""
        return OPTIMIZERS[self.optimizer].groups_of_matrices(sizes, self)

    def update_temporaries(self, elements: int) -> int:
        """Return the temporary bytes while the optimizer updates its largest tensor."""
        return OPTIMIZERS[self.optimizer].temporary_bytes(elements, self)

    @property
    def gathered_in_update(self) -> int:
        """The fp32 elements that the ranks gather in an update, if the strategy shards them."""
        return OPTIMIZERS[self.optimizer].gathered_elements(self)

    def with_share(self, share: float) -> "Workload":
        """Return the workload of a rank with this share, see `OwnRank`."""
        return replace(self, rank=replace(self.rank, share=share))

    @property
    def sequences(self) -> int:
        """Sequences of the rank in one micro-batch."""
        exact = self.batch_size * self.rank.share
        # (5 / 3) * 3 may be a little more than 5.
        return round(exact) if math.isclose(exact, round(exact)) else math.ceil(exact)

    @property
    def tokens(self) -> int:
        """Tokens of the rank in one micro-batch."""
        return self.sequences * self.seq_length

    @property
    def loss_in_graph(self) -> bool:
        """Whether all logits are computed at once, in the graph of the compiled output layer."""
        vocabulary = self.model.embedding.vocabulary
        return self.kernels.compiled and fits_in_graph(self.tokens, vocabulary, self.device.type)

    @property
    def has_graphs(self) -> bool:
        """Whether CUDA graphs compute the micro-batches; a run with several ranks refuses them."""
        return self.kernels.recorded and self.world_size == 1 and not self.on_cpu

    @property
    def excludes_checkpointing(self) -> bool:
        """Whether a flag of the run excludes --gradient_checkpointing."""
        return self.has_graphs or self.kernels.bf16_blocks

    @property
    def stored_keys(self) -> int:
        """Width of the keys that attention saves, and of the values.

        It is the queries' width where keys and values are repeated for each query: by transformers
        with a mask (integrations/sdpa_attention.py, use_gqa_in_sdpa), by patches.py for a
        kernel that needs it.
        """
        device, attention = self.device, self.model.attention
        shared = shares_keys(device.type, self.precision, device.capability)
        return attention.key if shared and not self.kernels.attention_mask else attention.query

    @property
    def item(self) -> int:
        """Bytes per element in computations."""
        return 4 if self.precision == "fp32" else 2

    def reduced_item(self, default: int) -> int:
        """Return the bytes per element of gradients in their reduction.

        Args:
            default: bytes under this strategy without --reduce_dtype.
        """
        if self.reduce_dtype is None:
            return default
        return 4 if self.reduce_dtype == "fp32" else 2

    @property
    def has_bf16_blocks(self) -> bool:
        """Whether --bf16_blocks replaces autocast; fsdp, whose fp16 is autocast, ignores it."""
        return self.kernels.bf16_blocks and self.dtypes.autocast and self.precision == "bf16"

    @property
    def in_blocks(self) -> "Workload":
        """The same workload for operations in the blocks: with --bf16_blocks without autocast."""
        if not self.has_bf16_blocks:
            return self
        return replace(self, dtypes=replace(self.dtypes, autocast=False))

    @property
    def casts_weights(self) -> bool:
        """Whether autocast makes 16-bit copies of fp32 weights; frozen ones are 16-bit."""
        return self.dtypes.autocast and self.lora is None

    @property
    def stream(self) -> int:
        """Bytes per element of the residual stream: it has the embedding's dtype."""
        return 4 if self.casts_weights else self.item

    @property
    def layer_norm(self) -> int:
        """Bytes per element of LayerNorm's input: on CUDA, autocast makes it fp32."""
        return 4 if self.dtypes.autocast and self.device.type == "cuda" else self.stream

    @property
    def head_input(self) -> int:
        """Bytes per element of the last norm's output, which autocast computes.

        LayerNorm has the dtype of its input on a CPU, and RMSNorm that of its fp32 weight.
        """
        is_layer_norm = self.model.family != "llama" and self.device.type == "cpu"
        return self.in_blocks.stream if is_layer_norm else self.stream

    def saves(self, layer: str) -> bool:
        """Return whether autograd saves a linear layer's input, for its weights' gradient.

        GPT-2 has no torch.nn.Linear except its output layer.
        """
        own_linear = self.dtypes.replaces_linear and self.model.family != "gpt2"
        return self.lora is None or layer in self.lora.layers or own_linear


def shard_elements(sizes: list[int], n: int) -> int:
    """Return the elements of one rank's shards of parameters, each divided by n and rounded up."""
    return sum(-(-size // n) for size in sizes)
