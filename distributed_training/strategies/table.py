"""The strategies of --strategy. To add one, add a row; CONTRIBUTING.md shows two examples."""

from distributed_training.strategies.ddp.strategy import DDP
from distributed_training.strategies.deepspeed.strategy import DeepSpeed
from distributed_training.strategies.fsdp.strategy import FSDP
from distributed_training.strategies.strategy import Strategy

OPTIMIZER = frozenset(["optimizer"])
GRADIENTS = OPTIMIZER | {"gradients"}
EVERYTHING = GRADIENTS | {"parameters"}

STRATEGIES: dict[str, Strategy] = {
    "dp": DDP("Data Parallelism"),
    "zero1": DeepSpeed("ZeRO Stage 1", OPTIMIZER, 1, "ds_config_stage1.json"),
    "zero2": DeepSpeed("ZeRO Stage 2", GRADIENTS, 2, "ds_config_stage2.json"),
    "zero3": DeepSpeed("ZeRO Stage 3", EVERYTHING, 3, "ds_config_stage3.json"),
    "offload": DeepSpeed("ZeRO-Offload", GRADIENTS, 2, "ds_config_offload.json", "host"),
    "infinity": DeepSpeed(
        "ZeRO-Infinity", EVERYTHING, 3, "ds_config_infinity.json", "nvme", "nvme"
    ),
    "fsdp": FSDP("Fully Sharded Data Parallelism", EVERYTHING),
}


def _simplicity(name: str) -> tuple[int, int]:
    """Return a key that sorts the simplest strategy first.

    The fewer model states it shards, the simpler it is; PyTorch alone is simpler than a package.
    """
    return len(STRATEGIES[name].sharded), len(STRATEGIES[name].packages)


# The order of recommendation: the first that fits is the simplest and usually the fastest.
ON_DEVICE = sorted((n for n, row in STRATEGIES.items() if not row.offloads), key=_simplicity)
OFFLOADING = sorted((n for n, row in STRATEGIES.items() if row.offloads), key=_simplicity)
PREFERENCE = [*ON_DEVICE, *OFFLOADING]
