"""The seconds that a rank computes in its forward passes, without waits for other ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def modules_to_time(model: nn.Module, gathers: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """Return the largest modules whose forward passes wait for no other rank.

    With whole parameters it is the model, with FSDP its blocks, with ZeRO-3 its layers: their hooks
    gather parameters before a pass. (ZeRO-3's attention between its layers is not timed.)

    Args:
        model: without its wrapper.
        gathers: whether the hooks of a module gather parameters.
    """
    if not any(gathers(module) for module in model.modules() if module is not model):
        return [model]
    return [timed for child in model.children() for timed in modules_to_time(child, gathers)]


class ForwardTimer:
    """Times the forward passes of modules in some training steps, with hooks that it then removes.

    The backward pass is not timed, because the reduction of the gradients runs in it. It takes
    about twice the time of the forward pass on each device, so the ratios of the ranks are those of
    whole steps.
    """

    def __init__(
        self, model: nn.Module, gathers: Callable[[nn.Module], bool], device: torch.device
    ) -> None:
        self.modules, self.device = modules_to_time(model, gathers), device
        self._embedding = model.get_input_embeddings()
        self._handles: list[RemovableHandle] = []
        self._began: Any = None  # of the module in progress: seconds, or a CUDA event
        # Of each step, (begin, end) of each pass: seconds, or CUDA events.
        self._steps: list[list[tuple[Any, Any]]] = []
        self._tokens: list[int] = []  # of each step, with padding

    def start(self) -> None:
        """Time the steps from now on."""
        self._steps, self._tokens = [[]], [0]
        # Micro-batches have different lengths, so the tokens are counted, too.
        self._handles.append(self._embedding.register_forward_pre_hook(self._count))
        for module in self.modules:
            # Behind the hooks that gather its parameters, and before those that free them.
            self._handles += [
                module.register_forward_pre_hook(self._begin),
                module.register_forward_hook(self._end, prepend=True),
            ]

    def end_step(self) -> None:
        """End a step."""
        self._steps.append([])
        self._tokens.append(0)

    def stop(self) -> float:
        """Remove the hooks; return the seconds of a token, as the median of the steps."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        steps = zip(self._steps, self._tokens, strict=True)
        return statistics.median(sum(map(_seconds, passes)) / n for passes, n in steps if n)

    def _count(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if module.training:
            self._tokens[-1] += inputs[0].numel()

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
