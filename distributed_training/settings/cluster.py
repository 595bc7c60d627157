"""How the ranks wait for each other."""

from dataclasses import dataclass
from typing import ClassVar

from distributed_training.settings import flag_types
from distributed_training.settings.fields import COMPUTED, flag


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Launchers and time limits."""

    title: ClassVar[str] = "Cluster"

    local_rank: int | None = flag(
        None, int, "accepted and ignored: some launchers append it", metavar="N", names="local-rank"
    )
    ddp_timeout: int = flag(1800, flag_types.seconds, "seconds until a collective times out")
    hang_seconds: int = flag(
        COMPUTED,
        flag_types.seconds,
        "write all stacks if a step takes longer (default: a tenth of --ddp_timeout)",
        metavar="N",
    )
