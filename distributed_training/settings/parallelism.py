"""How the model states are distributed over the ranks."""

from dataclasses import dataclass
from typing import ClassVar

from distributed_training.files.json_types import JsonObject
from distributed_training.rank_shares import AUTO
from distributed_training.settings import flag_types
from distributed_training.settings.fields import REPORTED, ROUNDING, UPDATES, flag
from distributed_training.strategies.strategy import Strategy
from distributed_training.strategies.table import STRATEGIES


@dataclass(frozen=True, kw_only=True)
class ParallelismSettings:
    """The strategy that distributes the model states over the ranks."""

    title: ClassVar[str] = "Strategy"

    strategy: str = flag(
        "dp",
        flag_types.choice,
        "offload: optimizer on the CPU. infinity: optimizer and parameters on NVMe. auto: the "
        "simplest that fits",
        choices=(*STRATEGIES, AUTO),
        effect=ROUNDING,
        at_resume=REPORTED,
    )
    ds_config: str | None = flag(
        None,
        flag_types.place,
        "DeepSpeed JSON instead of ds_config_*.json",
        metavar="FILE",
        names="deepspeed_config",
        effect=UPDATES,
        used_by="the DeepSpeed strategies",
    )
    fsdp_config: str | None = flag(
        None,
        flag_types.place,
        "FSDP's options in JSON, as accelerate writes them",
        metavar="FILE",
        effect=UPDATES,
        used_by="fsdp",
    )
    reduce_dtype: str | None = flag(
        None,
        flag_types.reduce_dtype,
        "of the gradients that the ranks reduce; bf16 and fp16 halve the bytes of fp32 (default: "
        "fp32 under dp and fsdp, as --precision under DeepSpeed)",
        choices=flag_types.REDUCE_DTYPES,
        effect=ROUNDING,
        planned=True,
    )
    nvme_path: str | None = flag(
        None,
        flag_types.place,
        "where infinity keeps its files (default: the temporary folder)",
        metavar="DIR",
        used_by="infinity",
    )
    # Not a flag: the row of --strategy in the table of strategies, with the options of its file.
    strategy_with_options: Strategy
    # Not flags either: those that are auto, and have provisional values until the ranks have met;
    # and what was chosen then.
    to_choose: tuple[str, ...] = ()
    choice: JsonObject | None = None
