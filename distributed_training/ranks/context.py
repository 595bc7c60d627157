"""DistContext: this process among the ranks, its device, and collectives of Python objects."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distributed_training import console
from distributed_training.errors import TrainingError
from distributed_training.ranks.failures import FailureMonitor
from distributed_training.ranks.launch import Launch
from distributed_training.ranks.stop import StopSignal

T = TypeVar("T")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Nodes(NamedTuple):
    """The nodes of a run."""

    number: int
    of_rank: tuple[int, ...]  # the number of the node of each rank


ONE_NODE = Nodes(1, (0,))  # of one rank


@dataclass(frozen=True)
class DistContext:
    """This process among the ranks: its place, its device, and collectives of Python objects."""

    launch: Launch
    device: torch.device  # the GPU of this rank, or the CPU
    # "nccl", "gloo", or "fake" in a simulation: values are meaningless then, memory sizes are valid
    backend: str
    monitor: FailureMonitor  # ends this process together with the other ranks
    store: dist.Store = field(default_factory=dist.HashStore)  # key-value store of the run
    nodes: Nodes = ONE_NODE
    precision: str = "fp32"  # of the computation: "fp32", "bf16" or "fp16"

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.launch.rank

    @property
    def world_size(self) -> int:
        """Number of ranks, also of those that are simulated."""
        return self.launch.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.launch.is_main

    @property
    def stop(self) -> StopSignal:
        """The handler of stop signals; its `requested` is true after one arrived."""
        return self.monitor.stop

    @property
    def simulated(self) -> bool:
        """Whether the other ranks are simulated (--simulate_gpus)."""
        return self.backend == "fake"

    @property
    def real_world_size(self) -> int:
        """Number of processes that exist: 1 in a simulation."""
        return 1 if self.simulated else self.world_size

    @property
    def dtype(self) -> torch.dtype:
        """The data type of `precision`."""
        return DTYPES[self.precision]

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the GPU; (0, 0) on a CPU."""
        on_gpu = self.device.type == "cuda"
        return torch.cuda.get_device_capability(self.device) if on_gpu else (0, 0)

    @property
    def ranks_per_node(self) -> int:
        """Number of the ranks on this node that exist."""
        return 1 if self.simulated else self.launch.local_world_size

    def mesh(self, hybrid: bool) -> DeviceMesh:
        """Return the device mesh of all ranks, for FSDP.

        Args:
            hybrid: with the dimensions "replicate" (nodes) and "shard" (ranks per node).
        """
        if not hybrid:
            return init_device_mesh(self.device.type, (self.world_size,))
        if self.nodes.number == 1:
            console.warn(
                "HYBRID_SHARD on one node is FULL_SHARD: there is no other node to hold a copy."
            )
        shape = (self.nodes.number, self.launch.local_world_size)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def once_per_node(self, what: str, prepare: Callable[[], T]) -> T:
        """Call `prepare` on local rank 0 of each node while all other ranks wait for all nodes.

        They wait in the key-value store and not in a collective, which has a time limit:
        tokenization may take an hour.

        Args:
            what: name of the preparation, unique in the run.
            prepare: returns a small JSON value; the store accepts 8 MB at most.
        Returns:
            The result of the rank's own node.
        """
        if self.real_world_size == 1:
            return prepare()
        store, key = self.store, f"prepared/{what}/{self.launch.node}"
        if self.launch.is_node_leader:
            store.set(key, json.dumps(prepare()))
            store.add(f"prepared/{what}/nodes", 1)
        while store.add(f"prepared/{what}/nodes", 0) < self.nodes.number:
            time.sleep(0.1)  # if local rank 0 of a node fails, FailureMonitor ends this process
        return json.loads(store.get(key))

    def asked_to_stop(self) -> bool:
        """Return whether any rank has received a stop signal; all ranks must call it."""
        requests = torch.tensor(float(self.stop.requested), device=self.device)
        dist.all_reduce(requests)
        return requests.item() > 0

    def broadcast_from_rank0(self, value: T) -> T:
        """Broadcast an object from rank 0; return it on every rank."""
        values = [value]
        if self.real_world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def all_gather(self, value: T) -> list[T]:
        """Return the objects of all ranks in their order; in a simulation only that of this one."""
        return all_gather(value, self.real_world_size)


def all_gather(value: T, ranks: int) -> list[T]:
    """Return the objects of all ranks in their order; `ranks` is their number."""
    values = [value] * ranks
    if ranks > 1:
        dist.all_gather_object(values, value)
    return values


def require_equal_on_all_ranks(values: Sequence[object], what: str) -> None:
    """Check that all ranks have the same value; `values` has one per rank."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise TrainingError(
                f"{what} differs between the ranks: "
                f"rank 0 has {values[0]}, rank {rank} has {value}."
            )
