"""The seconds that a rank computes in its forward passes, without waits for other ranks."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def modules_to_time(model: nn.Module, whole_parameters: bool) -> list[nn.Module]:
    """Return the modules whose forward passes contain no communication.

    Args:
        model: without its wrapper.
        whole_parameters: whether the rank holds the whole model. Its forward pass then waits for no
            other rank. FSDP and ZeRO-3 gather parameters in hooks of the layers; between a layer's
            hooks it only computes.
    """
    if whole_parameters:
        return [model]
    return [module for module in model.modules() if not any(module.children())]


class ForwardTimer:
    """Times the forward passes of modules in some training steps, with hooks that it then removes.

    The backward pass is not timed, because the reduction of the gradients runs in it. It takes
    about twice the time of the forward pass on each device, so the ratios of the ranks are those of
    whole steps.
    """

    def __init__(self, modules: list[nn.Module], device: torch.device) -> None:
        self.modules, self.device = modules, device
        self._handles: list[RemovableHandle] = []
        self._began: Any = None  # of the module in progress: seconds, or a CUDA event
        # Seconds of each pass, on a GPU pairs of events; one list for each step.
        self._steps: list[list[Any]] = []

    def start(self) -> None:
        """Time the steps from now on."""
        self._steps = [[]]
        for module in self.modules:
            # Behind the hooks that gather its parameters, and before those that free them.
            self._handles += [
                module.register_forward_pre_hook(self._begin),
                module.register_forward_hook(self._end, prepend=True),
            ]

    def end_step(self) -> None:
        """End a step."""
        self._steps.append([])

    def stop(self) -> float:
        """Remove the hooks; return the median of the seconds of the steps."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return statistics.median(sum(map(_seconds, passes)) for passes in self._steps if passes)

    def _begin(self, module: nn.Module, inputs: object) -> None:
        self._began = self._now() if module.training else None

    def _end(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if self._began is not None:
            self._steps[-1].append((self._began, self._now()))

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(times: tuple[Any, Any]) -> float:
    begin, end = times
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000
