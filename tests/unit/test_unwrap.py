"""What a module is, without an import of the library that wraps it."""

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from support.train_state import is_fsdp_module


def test_modules_of_fsdp_are_recognized_by_a_method():
    assert is_fsdp_module(FSDPModule)
    assert not any(is_fsdp_module(kind) for kind in (nn.Module, nn.Linear, DistributedDataParallel))
