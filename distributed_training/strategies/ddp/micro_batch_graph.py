"""--cuda_graph: the kernels of forward and backward, recorded once and then launched together.

The kernels of a small micro-batch end sooner than the host launches the next ones. A CUDA graph
launches all of them with one call. It repeats kernels with their arguments: it reads and writes the
same memory each time, and runs no Python. So a micro-batch is copied to the tensors that the graph
reads, and its gradients are in tensors that the graphs keep.

Written against PyTorch's documentation (docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs,
"Whole-network capture") and tested on a CPU, with a recording that calls the function again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import nn

from distributed_training import console
from distributed_training.errors import UserError, first_line
from distributed_training.strategies.wrapped import unwrapped

WARM_UP = 3  # steps, and micro-batches of a shape, that are computed eagerly first, as PyTorch asks
MOST_SHAPES = 8  # a graph takes memory
Shape = tuple[torch.Size, bool]  # of the inputs, and whether there are positions
MicroBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # see StepBatch
Mark = Callable[[str], None]  # ends a phase of the step
# forward_and_backward() of the script: micro-batch, valid tokens, factor → the detached loss. It
# adds to the gradients. No part of autograd's graph may outlive the call: its nodes belong to the
# stream that created them, and a capture has another one.
Compute = Callable[[MicroBatch, torch.Tensor, torch.Tensor, Mark], torch.Tensor]


class Recording(Protocol):
    """A CUDA graph, or what takes its place in the tests."""

    def capture(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record the kernels that `compute` launches, without running them; return its result.

        Raises:
            torch.OutOfMemoryError: they need more memory than is free. A later capture may succeed.
            RuntimeError: they cannot be recorded, for example because the host reads a result.
        """

    def replay(self) -> None:
        """Run the kernels, which write to the same tensors as in `capture`."""


class CudaRecording:
    """A CUDA graph. All of them share a memory pool, because they run one after the other."""

    def __init__(self, pool: tuple[int, int]):
        self.graph, self.pool = torch.cuda.CUDAGraph(), pool

    def capture(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """See Recording."""
        # It records on a stream of its own. thread_local: other threads, such as NCCL's watchdog
        # and the one that saves, may call CUDA meanwhile.
        with torch.cuda.graph(self.graph, self.pool, capture_error_mode="thread_local"):
            return compute()

    def replay(self) -> None:
        """See Recording."""
        # Dropout draws what it draws in an eager run. PyTorch's kernels read the seed and the
        # offset from device memory, to which each replay writes the generator's present ones
        # (CUDAGeneratorState::replay_prologue), those of `seed_dropout` before this micro-batch.
        self.graph.replay()


class Inputs(NamedTuple):
    """The tensors of a micro-batch that differ each time; in fp16 also the factor."""

    micro_batch: MicroBatch
    valid_tokens: torch.Tensor
    factor: torch.Tensor

    def clone(self) -> Inputs:
        """Return a copy, which a graph reads."""
        inputs, labels, positions = self.micro_batch
        copied = inputs.clone(), labels.clone(), None if positions is None else positions.clone()
        return Inputs(copied, self.valid_tokens.clone(), self.factor.clone())

    def fill(self, values: Inputs) -> None:
        """Copy the values of a micro-batch of the same shape to these tensors."""
        mine = (*self.micro_batch, self.valid_tokens, self.factor)
        others = (*values.micro_batch, values.valid_tokens, values.factor)
        for tensor, value in zip(mine, others, strict=True):
            if tensor is not None and value is not None:
                tensor.copy_(value)


class Recorded(NamedTuple):
    """A recording, and the tensors that it reads and writes besides the gradients."""

    recording: Recording
    inputs: Inputs
    loss: torch.Tensor


class MicroBatchGraphs:
    """Computes micro-batches with a graph for each shape; other ones eagerly.

    A shape has two graphs: the first micro-batch of a step sets the gradients, later ones add to
    them. All graphs write to the same gradients, those of the first recorded micro-batch. If this
    is the first of its step, its graph creates them, without a kernel that adds. Other graphs of
    first micro-batches set them to 0 and add.

    Args:
        compute: forward_and_backward() of the script.
        model: its trained parameters get the gradients.
        new_recording: returns a Recording.
    """

    eager_steps = WARM_UP

    def __init__(
        self, compute: Compute, model: nn.Module, new_recording: Callable[[], Recording]
    ) -> None:
        self.compute, self.new_recording = compute, new_recording
        self.parameters = [p for p in unwrapped(model).parameters() if p.requires_grad]
        self.recorded: dict[tuple[Shape, bool], Recorded] = {}  # by shape, and whether it is first
        self.gradients: dict[nn.Parameter, torch.Tensor] = {}  # that the graphs write
        self.seen: Counter[Shape] = Counter()
        self.steps = 0
        self.failed = False

    @classmethod
    def on_gpu(cls, compute: Compute, model: nn.Module) -> MicroBatchGraphs:
        """Return one whose recordings are CUDA graphs."""
        pool = torch.cuda.graph_pool_handle()
        return cls(compute, model, lambda: CudaRecording(pool))

    def __call__(
        self, micro_batch: MicroBatch, valid_tokens: torch.Tensor, factor: torch.Tensor, mark: Mark
    ) -> torch.Tensor:
        """Do what `compute` does; a graph cannot mark the end of forward."""
        shape = micro_batch[0].shape, micro_batch[2] is not None
        is_first = all(p.grad is None for p in self.parameters)  # the update has removed them
        self.steps += is_first
        self.seen[shape] += 1

        def run(values: Inputs, mark: Mark) -> torch.Tensor:
            if is_first and self.gradients:
                self._attach()
                torch._foreach_zero_([*self.gradients.values()])
            return self.compute(*values, mark)

        given = Inputs(micro_batch, valid_tokens, factor)
        if self._may_record(shape, is_first):
            self._record((shape, is_first), given, run)
        recorded = None if self.failed else self.recorded.get((shape, is_first))
        if recorded is None:
            return run(given, mark)
        if is_first:
            self._attach()
        recorded.inputs.fill(given)
        recorded.recording.replay()
        mark("backward")
        return recorded.loss.clone()  # the next replay overwrites it

    def _attach(self) -> None:
        """Let the parameters have the gradients that the graphs write."""
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient

    def _may_record(self, shape: Shape, is_first: bool) -> bool:
        shapes = {known for known, _ in self.recorded}
        return (
            not self.failed
            and (shape, is_first) not in self.recorded
            and (shape in shapes or len(shapes) < MOST_SHAPES)
            and min(self.steps, self.seen[shape]) > WARM_UP
        )

    def _record(
        self, key: tuple[Shape, bool], given: Inputs, run: Callable[[Inputs, Mark], torch.Tensor]
    ) -> None:
        """Record a micro-batch; without the memory for it, compute all others eagerly.

        Raises:
            UserError: it cannot be recorded. PyTorch does not undo a capture that has failed: its
                allocator keeps memory and state of it (pytorch/pytorch#180395, #190308).
        """
        before = [p.grad for p in self.parameters]
        recording, inputs = self.new_recording(), given.clone()
        try:
            loss = recording.capture(lambda: run(inputs, lambda phase: None))
        except torch.OutOfMemoryError:
            # Nothing was computed, but backward may have set some of the gradients.
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
            self.failed, self.gradients, self.recorded = True, {}, {}  # also frees their memory
            console.warn(
                "--cuda_graph: the memory is not sufficient to record a micro-batch. The run "
                "continues without CUDA graphs: leave the flag out."
            )
            return
        except RuntimeError as error:
            # The end of the capture raises another error, whose context is the cause.
            reason = first_line(error.__context__ or error)
            raise UserError(
                f"--cuda_graph: a micro-batch could not be recorded ({reason}): leave the flag out."
            ) from error
        trained = {p: p.grad for p in self.parameters if p.grad is not None}
        self.gradients = self.gradients or trained
        if trained.keys() - self.gradients.keys():  # replays would lose their gradients
            raise UserError(
                "--cuda_graph: not all micro-batches train the same parameters: leave the flag out."
            )
        self.recorded[key] = Recorded(recording, inputs, loss)
