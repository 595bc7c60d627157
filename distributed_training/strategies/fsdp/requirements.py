"""What FSDP needs of the installed torch."""

import torch

from distributed_training.errors import MissingRequirement


def check_cpu_support() -> None:
    """Check that torch can train with FSDP2 on this machine.

    Raises:
        MissingRequirement: there is no GPU, and torch is too old for FSDP2 on a CPU.
    """
    # torch's streams for the CPU record no events in 2.6.
    if not torch.cuda.is_available() and not hasattr(torch.cpu.Stream, "record_event"):
        raise MissingRequirement(
            "--strategy fsdp on a CPU needs a newer torch: pip install --upgrade torch, or use "
            "zero3."
        )
