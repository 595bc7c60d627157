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


def check_integer_shards() -> None:
    """Check that FSDP2 shards integers, such as packed weights in 4 bits.

    Raises:
        MissingRequirement: torch is older; it would convert them to the dtype of the computations.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    if "is_floating_point" not in FSDPParam.init_dtype_attrs.__code__.co_names:
        raise MissingRequirement(
            "--load_in_4bit under fsdp needs a torch that shards integers (2.12): pip install "
            "--upgrade torch, or use dp, zero1, zero2 or offload."
        )
