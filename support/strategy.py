"""The strategies: what each rank keeps of the model states, where, and which library does it.

To add a strategy, add a row to STRATEGIES. For a new library, also change load_model, wrap and, if
it has its own training loop, train_and_evaluate in the script.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Strategy:
    """How the model states are distributed over the ranks.

    A user's DeepSpeed file may keep states in other places than the table, see
    cli.ds_config.configured_strategy.
    """

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
    "dp": Strategy("ddp"),
    "zero1": Strategy("deepspeed", OPTIMIZER, 1, "ds_config_stage1.json"),
    "zero2": Strategy("deepspeed", GRADIENTS, 2, "ds_config_stage2.json"),
    "zero3": Strategy("deepspeed", EVERYTHING, 3, "ds_config_stage3.json"),
    "offload": Strategy("deepspeed", GRADIENTS, 2, "ds_config_offload.json", "host"),
    "infinity": Strategy("deepspeed", EVERYTHING, 3, "ds_config_infinity.json", "nvme", "nvme"),
    "fsdp": Strategy("fsdp", EVERYTHING),
}
