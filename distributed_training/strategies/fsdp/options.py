"""FSDP's options; read_options.py reads them from --fsdp and --fsdp_config."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class FsdpOptions:
    """FSDP's options, from --fsdp and --fsdp_config."""

    # True frees a layer's all-gathered parameters after forward (FULL_SHARD); False keeps them
    # until backward (SHARD_GRAD_OP), as ZeRO 2 does.
    reshard_after_forward: bool = True
    hybrid: bool = False  # shard within a node and replicate across nodes (HYBRID_SHARD)
    no_shard: bool = False  # NO_SHARD, which is --strategy dp
    layers: tuple[str, ...] = ()  # class names of the layers to shard; empty: the model's blocks
    wrap_layers: bool = True  # False shards the whole model as one unit (NO_WRAP)
    precision: str | None = None  # fsdp_mixed_precision, in the terms of --precision
    reduce_dtype: str | None = None  # fsdp_reduce_dtype, in the terms of --reduce_dtype
    offload: bool = False  # keep parameters, gradients and optimizer states in host memory
    forward_prefetch: bool = False  # all-gather the next layer while forward computes one
    ignored: tuple[str, ...] = field(default=(), compare=False)  # keys of the file without effect
