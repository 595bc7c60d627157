"""Records what PyTorch computes in a block of code."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Records the name of every operation, and (type, elements) of every tensor that one returns."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.results: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        self.names.append(operation.name())
        tensors = found if isinstance(found, (list, tuple)) else [found]
        self.results += [(t.dtype, t.numel()) for t in tensors if isinstance(t, torch.Tensor)]
        return found

    def of_type(self, dtype: torch.dtype) -> list[int]:
        """Elements of each tensor of a type."""
        return [size for found, size in self.results if found == dtype]
