"""The strategies, the optimizers, and the GPT-2 models, whose shape is known without a file.

To add a strategy, add a row to STRATEGIES. For a new library, also change load_model, wrap and, if
it has its own training loop, train_and_evaluate in the script. To add an optimizer, add a row to
OPTIMIZERS, its constructor to create_optimizer in the script, and the reading and writing of its
states to strategies/optimizer_shards.py.
"""

from dataclasses import dataclass, field

# ------------------------------------------------------------------------------------- strategies


@dataclass(frozen=True)
class Strategy:
    """How the model states are distributed over the ranks.

    A user's DeepSpeed file may keep states in other places than the table, see
    cli.arguments.configured_strategy.
    """

    title: str  # its full name
    engine: str  # "ddp", "fsdp" or "deepspeed"
    # The model states of which each rank keeps a part, of "parameters", "gradients" and
    # "optimizer".
    sharded: frozenset[str] = frozenset()
    stage: int = 0  # DeepSpeed's ZeRO stage; 0 for a strategy of PyTorch itself
    config_file: str | None = None  # DeepSpeed's configuration, in the project's folder
    # Where these states are kept: "device", "host" or "nvme".
    optimizer_on: str = "device"
    parameters_on: str = "device"

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed's engine trains, and not a loop of plain PyTorch."""
        return self.engine == "deepspeed"

    @property
    def shards_parameters(self) -> bool:
        """Whether no rank holds the whole model."""
        return "parameters" in self.sharded

    @property
    def offloads(self) -> bool:
        """Whether the optimizer states are kept outside the device."""
        return self.optimizer_on != "device"

    @property
    def uses_nvme(self) -> bool:
        """Whether model states are kept on NVMe."""
        return "nvme" in (self.optimizer_on, self.parameters_on)


OPTIMIZER = frozenset(["optimizer"])
GRADIENTS = OPTIMIZER | {"gradients"}
EVERYTHING = GRADIENTS | {"parameters"}

STRATEGIES = {
    "dp": Strategy("Data Parallelism", "ddp"),
    "zero1": Strategy("ZeRO Stage 1", "deepspeed", OPTIMIZER, 1, "ds_config_stage1.json"),
    "zero2": Strategy("ZeRO Stage 2", "deepspeed", GRADIENTS, 2, "ds_config_stage2.json"),
    "zero3": Strategy("ZeRO Stage 3", "deepspeed", EVERYTHING, 3, "ds_config_stage3.json"),
    "offload": Strategy(
        "ZeRO-Offload", "deepspeed", GRADIENTS, 2, "ds_config_offload.json", "host"
    ),
    "infinity": Strategy(
        "ZeRO-Infinity", "deepspeed", EVERYTHING, 3, "ds_config_infinity.json", "nvme", "nvme"
    ),
    "fsdp": Strategy("Fully Sharded Data Parallelism", "fsdp", EVERYTHING),
}

# ------------------------------------------------------------------------------------- optimizers

# Loss scaling in fp16, the same for torch's GradScaler and DeepSpeed: an overflow skips the update
# and halves the scale; GROWTH_INTERVAL steps without an overflow double it.
INITIAL_SCALE_POWER, GROWTH_INTERVAL = 16, 2000


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, whose states are in addition to the fp32 weight."""

    # Bytes of its states per trained parameter; the memory estimate also counts small parameters
    # and blocks (memory/workload.py).
    state_bytes: float
    family: str  # optimizers of one family can resume each other's checkpoints
    package: str | None = None  # the Python package that it needs, besides the required ones
    lr: float | None = None  # default learning rate; None: the default of --lr
    # An engine, or a place of the optimizer's states (see Strategy), and why the optimizer does not
    # support it.
    unsupported: dict[str, str] = field(default_factory=dict)

    def problem(self, strategy: Strategy) -> str | None:
        """Return why a strategy does not support the optimizer, or None if it does."""
        of_place = self.unsupported.get(strategy.optimizer_on)
        return self.unsupported.get(strategy.engine, of_place)


CPU_ADAM = "the states are updated on the CPU, where DeepSpeed has its own AdamW"
OPTIMIZERS = {
    # Two fp32 moments (Loshchilov and Hutter, arXiv 1711.05101).
    "adamw": Optimizer(8, "adamw"),
    # The same moments in 8 bits, with an fp32 scale for each block of 256 (Dettmers et al., arXiv
    # 2110.02861).
    "adamw_8bit": Optimizer(
        2 + 2 * 4 / 256,
        "adamw",
        package="bitsandbytes",
        unsupported={
            "fsdp": "bitsandbytes does not support FSDP2's sharded tensors",
            "host": CPU_ADAM,
            "nvme": CPU_ADAM,
        },
    ),
    # The mean squares of the rows and columns of each matrix (Shazeer and Stern, arXiv 1804.04235).
    "adafactor": Optimizer(
        0,
        "adafactor",
        unsupported={
            "deepspeed": "DeepSpeed flattens the weights, and Adafactor needs rows and columns",
            "fsdp": "FSDP shards the rows, and Adafactor needs whole columns",
        },
    ),
    # Without momentum.
    "sgd": Optimizer(
        0, "sgd", lr=0.1, unsupported={"nvme": "DeepSpeed reads Adam's moments from NVMe"}
    ),
}

# ----------------------------------------------------------------------------------------- models

EMBEDDED_MODEL = "tiny-gpt2"
# Layers, heads, hidden size.
EMBEDDED_SHAPE, EMBEDDED_VOCABULARY = (4, 4, 256), 4096
# Radford et al. 2019, table 2; the smallest model as released, with 124M parameters.
GPT2_SHAPES = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}


def gpt2_config(
    layers: int, heads: int, hidden: int, vocabulary: int = 50257, positions: int = 1024
) -> dict:
    """Return the parts of a GPT-2's config.json that determine memory."""
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_head": heads,
        "n_embd": hidden,
        "vocab_size": vocabulary,
        "n_positions": positions,
    }


# The name of each model above, and the parts of its config.json that determine memory.
CONFIGS = {
    EMBEDDED_MODEL: gpt2_config(*EMBEDDED_SHAPE, EMBEDDED_VOCABULARY, 512),
    **{name: gpt2_config(*shape) for name, shape in GPT2_SHAPES.items()},
}
