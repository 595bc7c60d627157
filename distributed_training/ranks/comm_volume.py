"""Communication volume of a rank, counted at the operators of torch.distributed.

DDP's reducer calls these operators from C++, FSDP and DeepSpeed call them from Python, so the count
includes the collectives of all of them.
"""

import functools
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

import numpy
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from distributed_training import patches

# Operator -> its usual name, and how often one rank of N sends each byte of the message, in units
# of (N − 1) / N (ring algorithms: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). An all-reduce
# is a reduce-scatter and an all-gather. The message is the whole tensor.
COLLECTIVES = {
    "allreduce_": ("all_reduce", 2),
    "allreduce_coalesced_": ("all_reduce", 2),
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 1),
    "reduce_": ("reduce", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "barrier": ("barrier", 0),
}


class Traffic:
    """Counter of the collectives of each step: their number, message bytes and sent bytes.

    Counting costs one Python call per collective, about 15 µs, and does not synchronize with the
    GPU.
    """

    def __init__(self) -> None:
        # Of each closed step: {"collective dtype": [calls, message bytes, bytes that this rank
        # sends]}.
        self.steps: list[dict[str, list[float]]] = []
        self.number = 0  # of the collectives that this process has started, with barriers
        self._traced = False  # --profile: the trace shows what counting costs
        self._aside = False  # gather through buffers that PyTorch does not see (`_gather_aside`)
        self._last = ("none", 0, "")
        self._now: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
        self._library = None

    def start(self) -> None:
        """Count all collectives of this process from now on."""
        counting = {name: self._counting(name, *entry) for name, entry in COLLECTIVES.items()}
        self._library = patches.override_collectives(counting)

    def trace(self) -> None:
        """Show in PyTorch's traces what counting costs."""
        self._traced = True

    def gather_aside(self, aside: bool) -> None:
        """Gather through buffers that PyTorch's profiler does not record, or no longer."""
        self._aside = aside

    def _counting(self, operator: str, name: str, times: int):
        overload = getattr(torch.ops.c10d, operator).default
        types = [str(argument.type) for argument in overload._schema.arguments]
        group = next(i for i, text in enumerate(types) if text.endswith(".ProcessGroup"))
        # A step repeats its collectives: what each sends, by the shapes and dtypes of its tensors.
        known: dict[tuple, tuple[str, int, str]] = {}

        def note(args) -> None:
            if (found := known.get(shapes := _shapes(args))) is None:
                # The whole tensor is the largest argument: the output of a gather, the input of a
                # scatter.
                dtype, message = max(map(_dtype_and_bytes, args), key=lambda found: found[1])
                found = known[shapes] = (name, message, dtype)
            self.number += 1
            self._last = found
            if times:  # a barrier has no message
                ranks = dist.ProcessGroup.unbox(args[group]).size()
                entry = self._now[f"{name} {found[2]}"]
                entry[0] += 1
                entry[1] += found[1]
                entry[2] += times * found[1] * (ranks - 1) / ranks

        def count(keyset, *args, **kwargs):
            if self._traced:
                with torch.profiler.record_function("count a collective"):
                    note(args)
            else:
                note(args)
            call = functools.partial(overload.redispatch, keyset & torch._C._after_autograd_keyset)
            if self._aside and name == "all_gather":
                return _gather_aside(call, args, kwargs)
            return call(*args, **kwargs)

        return count

    @property
    def last(self) -> str:
        """The collective that was started last, such as "all_reduce of 12 bytes float32"."""
        name, message, dtype = self._last
        return f"{name} of {message:,} bytes {dtype}" if message else name

    def discard(self) -> None:
        """Discard the counts since the last step: those of set-up, evaluation or a checkpoint."""
        self._now.clear()

    def end_step(self) -> None:
        """Record the counts since the last call as one optimizer step."""
        self.steps.append(dict(self._now))
        self._now.clear()

    def per_step(self, excluded: int) -> dict[str, dict[str, float]]:
        """Return the median over steps for each collective and dtype, such as "all_reduce float32".

        Returns:
            {name: {"calls", "message_bytes", "sent_bytes"}} of this rank.
        """
        steps, medians = self.steps[excluded:], {}
        for name in sorted({name for step in steps for name in step}):
            columns = zip(*(step.get(name, (0, 0, 0.0)) for step in steps), strict=True)
            keys = ("calls", "message_bytes", "sent_bytes")
            medians[name] = dict(zip(keys, map(median, columns), strict=True))
        return medians


@torch.no_grad()
def _gather_aside(call, args, kwargs):
    """Gather into buffers that numpy allocates, wait, and copy the result to the output.

    Gloo's own thread may be the last to release the buffers of a gather. PyTorch's profiler records
    only what this thread releases, and would count them as activations. It does not record buffers
    of numpy.
    """
    gathered, work = call(*tree_map_only(torch.Tensor, _copy_of_numpy, args), **kwargs)
    dist.Work.unbox(work).wait()
    for output, part in zip(_tensors(args[0]), _tensors(gathered), strict=True):
        output.copy_(part)
    return args[0], work


def _copy_of_numpy(tensor: torch.Tensor) -> torch.Tensor:
    buffer = torch.from_numpy(numpy.empty(tensor.nbytes, numpy.uint8))
    return buffer.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _dtype_and_bytes(arg) -> tuple[str, int]:
    if not (tensors := list(_tensors(arg))):
        return "", 0
    return str(tensors[0].dtype).removeprefix("torch."), sum(t.nbytes for t in tensors)


def _tensors(arg) -> Iterator[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        yield arg
    elif isinstance(arg, list | tuple):
        for item in arg:
            yield from _tensors(item)


def _shapes(arg) -> tuple:
    """Return the shapes and dtypes of the tensors of an argument, which may be in lists."""
    if isinstance(arg, torch.Tensor):
        return arg.shape, arg.dtype
    return tuple([_shapes(item) for item in arg]) if isinstance(arg, list | tuple) else ()
