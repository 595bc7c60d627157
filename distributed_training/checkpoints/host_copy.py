"""The host memory that holds a copy of a rank's model states while a thread writes it.

It is kept between saves: allocating it again would take longer than the copy. On a GPU it is
page-locked if possible, and the copies run on a stream of their own.
"""

from __future__ import annotations

from pathlib import Path

import torch

from distributed_training import console
from distributed_training.checkpoints.saving import PieceWriter, own_part, write_shards
from distributed_training.errors import first_line
from distributed_training.memory.system import free_host_bytes, host_bytes
from distributed_training.ranks.context import DistContext
from distributed_training.strategies.optimizer_shards import ShardedState


class HostCopy:
    """Memory for the files of a rank, and on a GPU the stream of the copies.

    Args:
        elements: fp32 elements of each file, see `elements_of_files`.
        device: of the model states.
    """

    def __init__(self, elements: list[int], device: torch.device):
        on_gpu = device.type == "cuda"
        self._files = page_locked(elements) if on_gpu else list(map(torch.empty, elements))
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._copied = torch.cuda.Event() if on_gpu else None

    def fill(self, folder: Path, state: ShardedState, ctx: DistContext) -> PieceWriter:
        """Copy the weights and moments of this rank; the writer has them as files of `folder`.

        On a GPU the host does not wait: kernels that start later wait for the copies on the GPU,
        and `wait` is for the thread that reads the memory.
        """
        writer = PieceWriter(folder, ctx.rank, self._files.__getitem__)
        if self._stream is None or self._copied is None:
            write_shards(writer, state, ctx.world_size)
            return writer
        current = torch.cuda.current_stream(ctx.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            write_shards(writer, state, ctx.world_size)
            self._copied.record()
        current.wait_stream(self._stream)  # the next update must not change what is copied
        return writer

    def wait(self) -> None:
        """Wait until the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()


def page_locked(elements: list[int]) -> list[torch.Tensor]:
    """Return page-locked memory of these sizes; ordinary memory if the driver refuses it.

    A machine may have memory but not page-locked memory: WSL2 limits it, and containers can.
    """
    try:
        return [torch.empty(number, pin_memory=True) for number in elements]
    except RuntimeError as error:
        console.warn(
            f"Saves copy to memory that is not page-locked, and take longer: {first_line(error)}"
        )
        return list(map(torch.empty, elements))


def elements_of_files(state: ShardedState, ctx: DistContext) -> list[int]:
    """Return the fp32 elements of each file that a rank writes, if all its moments exist."""

    def no_memory(_: int) -> torch.Tensor:
        return torch.empty(1 << 40, device="meta")

    writer = PieceWriter(Path(), ctx.rank, no_memory)
    for shard in state.shards:
        kinds = ("weight", *state.optimizer.moments_of(state.base, shard.key))
        for piece in [] if state.is_copy else shard.pieces:
            begin, end = own_part(state, piece.numel, ctx.rank, ctx.world_size)
            elements = torch.empty(end - begin, device="meta")
            writer.add(piece.name, piece.start + begin, dict.fromkeys(kinds, elements))
    writer.flush()
    return [file.used for file in writer.unwritten]


def room_for_copies(size: int, ctx: DistContext) -> tuple[bool, int]:
    """Return whether the copies of all ranks fit in the free memory of this node, and its size.

    What a step has used at its peak, and returned since, is not free: the next one needs it again.

    Args:
        size: bytes of the copy of this rank.
    """
    now, peak = host_bytes()
    free = max(0, free_host_bytes() - ctx.ranks_per_node * (peak - now))
    return ctx.ranks_per_node * size <= free, free
