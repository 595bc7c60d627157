"""Measurements and details that help to find a fault."""

from dataclasses import dataclass
from typing import ClassVar

from distributed_training.settings import flag_types
from distributed_training.settings.fields import NEED_EVALUATIONS, flag, switch


@dataclass(frozen=True, kw_only=True)
class DebugSettings:
    """Measurements, traces and tracebacks."""

    title: ClassVar[str] = "Debugging"

    profile_memory: bool = switch(False, "show memory after each phase and by kind of state")
    # A simulation trains no model.
    simulate_gpus: int | None = flag(
        None,
        flag_types.ranks,
        "measure the memory of rank 0 of N in one process, in 3 steps without losses",
        metavar="N",
        excludes=(
            "resume save_every save_epochs eval_only eval_first generate "
            f"export_hf merge_lora push_to_hub {NEED_EVALUATIONS}"
        ),
    )
    memory_snapshot: str | None = flag(
        None,
        flag_types.place,
        "write PyTorch's snapshot of the GPU's memory, for pytorch.org/memory_viz",
        metavar="FILE",
    )
    profile: str | None = flag(
        None,
        flag_types.place,
        "write a trace of 3 steps, for ui.perfetto.dev",
        metavar="DIR",
        excludes="profile_memory simulate_gpus",
    )
    verbose: bool = switch(False, "show third-party messages and tracebacks")
