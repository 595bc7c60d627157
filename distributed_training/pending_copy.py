"""PendingCopy: a tensor's copy in host memory, for which the host waits only when it reads it."""

import torch


class PendingCopy:
    """A copy of a GPU's tensor in host memory; the tensor of a CPU is not copied."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy, self._complete = tensor, None
        if tensor.is_cuda:  # the host would wait for a copy to memory that is not pinned
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._complete = torch.cuda.current_stream().record_event()

    def read(self) -> torch.Tensor:
        """Wait until the copy is complete, and return it."""
        if self._complete is not None:
            self._complete.synchronize()
        return self._copy
