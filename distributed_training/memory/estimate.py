"""Memory estimate of a run before it starts: bytes on each GPU, in host memory and on NVMe.

It is a list of terms (name, bytes, phases) for each strategy, computed from a model's config.json
without PyTorch. The strategy knows the terms of its model states; activations and loss are the same
for all. The peak is the largest sum of the terms of one phase. Tests compare it with live tensors
in real and simulated runs.

Sources. Model states: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 3, with the dtypes that
PyTorch and DeepSpeed 0.19 use.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from distributed_training.hardware import HOPPER
from distributed_training.optimizers import OPTIMIZERS
from distributed_training.strategies.strategy import Strategy
from distributed_training.strategies.table import STRATEGIES
from distributed_training.units import GB, KB, MB
from distributed_training.workload import activations
from distributed_training.workload.activations import BACKWARD, LOSS, SAVING, STEP, UPDATE, Term
from distributed_training.workload.workload import Dtypes, Workload

# Allowances for the CUDA context, cuBLAS and NCCL, and for fragmentation. docs/PLAN.md compares
# them with what an H200 had in use.
CUDA_CONTEXT, GPU_SLACK = 1 * GB, 1.05
# On a CPU: resident memory of Python and the libraries, and the ratio of glibc's heap, which keeps
# freed memory, to the live tensors. Measured with torch 2.13, see docs/PLAN.md.
CPU_LIBRARIES, CPU_SLACK = 410 * MB, 1.2


# Of an estimate, in results.json and in the planner's JSON.
SIZES = """parameters gradients optimizer buffers activations logits peak host nvme saving
    sent""".split()


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory estimate of one strategy, in bytes of one rank."""

    strategy: str
    # Model states on the GPU at the end of backward.
    parameters: int
    gradients: int
    optimizer: int
    buffers: int  # persistent communication buckets and staging buffers
    # Held at the end of forward; `logits` is what the loss keeps.
    activations: int
    logits: int
    peak: int  # the maximum over a step, temporary tensors included
    host: int  # in host memory, for this rank
    nvme: int  # on disk, for this rank
    saving: int  # in host memory, for this rank: what saves need besides `host`, or else wait
    sent: int  # bytes that this rank sends per step
    library: int  # of the engine's library in a process on a CPU
    device: str  # "cuda" or "cpu"
    terms: tuple[Term, ...]  # of which the peak, `host`, `nvme` and `saving` are sums

    @property
    def total(self) -> int:
        """Bytes that must fit the memory of the device; on a CPU they include `host`."""
        if self.device == "cuda":
            return int(GPU_SLACK * self.peak) + CUDA_CONTEXT
        return int(CPU_SLACK * (self.peak + self.host)) + CPU_LIBRARIES + self.library

    def sizes(self) -> dict[str, int]:
        """Return the bytes by kind."""
        return {name: getattr(self, name) for name in SIZES}

    def at(self, phase: str) -> int:
        """Return the sum of the terms of a phase."""
        return sum_of(self.terms, phase)

    def phase_of_peak(self) -> str:
        """Return the phase of STEP that has the peak."""
        return max(STEP, key=self.at)


def sum_of(terms: Iterable[Term], phase: str) -> int:
    """Return the sum of the terms of a phase."""
    return sum(term.size for term in terms if phase in term.phases)


def predict(work: Workload, strategy: str) -> MemoryEstimate:
    """Return the memory estimate of one of STRATEGIES."""
    row = STRATEGIES[strategy].on_ranks(work.world_size)
    dtypes = Dtypes(work.precision in row.autocast_precisions, row.replaces_linear)
    work = replace(work, dtypes=dtypes, reduce_dtype=work.reduce_dtype or row.reduce_dtype)
    states, sent = row.memory_terms(work)
    saved = activations.activation_terms(work)
    libraries = Term("cuBLAS workspaces", _cublas(work), STEP)
    dequantized = Term("weight converted from 4 bits", work.dequantized, (BACKWARD,))
    temporary = [*activations.loss_terms(work), *activations.dora_terms(work), dequantized]
    terms = [*states, *saved, *temporary, libraries, _copy_for_saves(work, row)]
    if work.has_graphs:
        terms.append(_pool_of_graphs(terms))
    on_device = {term.name: term.size for term in states if set(term.phases) & set(STEP)}
    return MemoryEstimate(
        strategy=strategy,
        parameters=on_device["parameters"],
        gradients=on_device.get("gradients", 0),
        optimizer=on_device.get("optimizer states", 0),
        buffers=on_device.get("communication buffers", 0),
        activations=sum_of(saved, LOSS),
        logits=activations.kept_by_loss(work),
        peak=max(sum_of(terms, phase) for phase in STEP),
        host=sum_of(terms, "host"),
        nvme=sum_of(terms, "nvme"),
        saving=sum_of(terms, "saving"),
        sent=sent * (work.world_size - 1) // work.world_size,
        library=row.library_bytes,
        device=work.device.type,
        terms=tuple(term for term in terms if term.size),
    )


def predict_all(work: Workload) -> list[MemoryEstimate]:
    """Return the memory estimates of all strategies that support the workload."""
    return [predict(work, strategy) for strategy in supporting(work)]


def supporting(work: Workload) -> list[str]:
    """Return the strategies that support a workload."""
    optimizer = OPTIMIZERS[work.optimizer]
    return [
        name
        for name, strategy in STRATEGIES.items()
        if not strategy.why_not(optimizer)
        and (strategy.supports_4bit or not work.in_4bit)
        and (strategy.supports_cuda_graph or not work.has_graphs)
        and not (work.lora and work.lora.magnitudes and not strategy.supports_dora(work.in_4bit))
    ]


def _copy_for_saves(work: Workload, row: Strategy) -> Term:
    """Return the copy of the states that a thread writes to a checkpoint, each rank its part."""
    size = -(-OPTIMIZERS[work.optimizer].saved_bytes(work.trained, work) // work.world_size)
    return Term("copy for saves", 0 if row.updates_on == "nvme" else size, SAVING)


def _pool_of_graphs(terms: list[Term]) -> Term:
    """Return the memory that CUDA graphs do not leave to the update; not measured.

    A replay uses the addresses of the capture, so the allocator reserves the largest size that the
    captures needed in a pool of their own ("Note [Interaction with CUDA graph capture]" in
    PyTorch's CUDACachingAllocator.cpp). All graphs share it (micro_batch_graph.py). Assumed: no
    fragmentation, and no other length that is still computed eagerly, next to the pool.
    """
    captured = [term for term in terms if UPDATE not in term.phases]
    size = max(sum_of(captured, phase) for phase in STEP)
    return Term("memory pool of the CUDA graphs", size, (UPDATE,))


def _cublas(work: Workload) -> int:
    """Return the bytes of cuBLAS's workspaces, which PyTorch's allocator holds.

    One for each handle and stream: of the main thread, and of autograd's thread
    (ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize). Captures have their own stream.
    """
    if work.device.type != "cuda":
        return 0
    workspaces = 4 if work.has_graphs else 2
    return workspaces * (32 * MB if work.device.capability >= HOPPER else 8 * MB + 128 * KB)
