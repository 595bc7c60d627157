"""DistContext: this process among the ranks, its device, and collectives of Python objects."""

import json
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distributed_training import console
from distributed_training.errors import TrainingError
from distributed_training.ranks.failures import FailureMonitor
from distributed_training.ranks.launch import Launch

T = TypeVar("T")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DistContext:
    """This process among the ranks: its place, its device, and collectives of Python objects.

    Attributes:
        device: the GPU of this rank, or the CPU.
        backend: "nccl", "gloo", or "fake" in a simulation.
        monitor: ends this process together with the other ranks.
        stop: the handler of stop signals; its `requested` is true after one arrived.
        store: the key-value store of the run.
        simulated: True with --simulate_gpus: values are meaningless, memory sizes are valid.
        precision: of the computation: "fp32", "bf16" or "fp16".
        nodes: number of nodes.
        node_of_rank: the number of the node of each rank.
        shares_output: whether all nodes see the output folder; otherwise only rank 0 writes to it.
    """

    def __init__(
        self,
        launch: Launch,
        device: torch.device,
        backend: str,
        monitor: FailureMonitor,
        store: dist.Store | None = None,
    ):
        self.launch, self.device, self.backend = launch, device, backend
        self.rank, self.world_size, self.is_main = launch.rank, launch.world_size, launch.is_main
        self.simulated = backend == "fake"
        self.monitor, self.stop, self.store = monitor, monitor.stop, store or dist.HashStore()
        self.precision, self.nodes, self.shares_output = "fp32", 1, True
        self.node_of_rank = [0] * self.world_size

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
        if self.nodes == 1:
            console.warn(
                "HYBRID_SHARD on one node is FULL_SHARD: there is no other node to hold a copy."
            )
        shape = (self.nodes, self.launch.local_world_size)
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
        while store.add(f"prepared/{what}/nodes", 0) < self.nodes:
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
        values = [value] * self.real_world_size
        if self.real_world_size > 1:
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
