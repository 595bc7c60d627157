"""The plan of a run for a program: the memory of a rank, whether it fits, and what it costs."""

from dataclasses import dataclass
from pathlib import Path

from distributed_training import arguments
from distributed_training.cli.resolve import change_settings, resolve_settings
from distributed_training.errors import UserError
from distributed_training.files.json_types import JsonObject
from distributed_training.files.user_files import did_you_mean, shown
from distributed_training.memory.estimate import MemoryEstimate, predict
from distributed_training.memory.find_architecture import find_architecture
from distributed_training.memory.fit import (
    Limits,
    check_is_planned,
    planned_device,
    ranks_of_node,
    workload_of,
)
from distributed_training.rank_shares import AUTO
from distributed_training.settings import flag_types
from distributed_training.settings.data import choose_seq_length
from distributed_training.settings.settings import Settings
from distributed_training.strategies.table import STRATEGIES
from distributed_training.units import GB
from distributed_training.workload.cost import Cost, cost_of_work
from distributed_training.workload.rate import Rate, assumed_rate
from distributed_training.workload.workload import Device, Workload

MOST_RANKS = 2**17
LARGEST_GB = 100_000  # of a GPU or a node; a value in bytes is above it
LARGEST_TOKENS, LARGEST_RATE = 1e16, 1e12
NAMES_OF_GPUS = ("num_gpus", "n_gpus", "world_size", "num_processes")  # elsewhere
KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations", "logits")


@dataclass(frozen=True, repr=False)
class Plan:
    """The memory of one rank of a run, and whether it fits. `plan` returns it.

    All ranks need the same.

    Attributes:
        model, strategy, precision: of the run.
        gpus: number of ranks, one per GPU; or processes on CPUs.
        batch_size: sequences of one rank in a micro-batch.
        seq_length: tokens of a sequence.
        memory: bytes on the device by kind: at the end of the backward pass "parameters",
            "gradients", "optimizer" and "buffers" of the communication; at the end of the forward
            pass "activations" and "logits", what the loss keeps. So they do not sum to the peak.
        peak_bytes: maximum over a step on the device, temporary tensors included.
        total_bytes: what the device must have: the peak, 5 % more for fragmentation, and an
            allowance for the CUDA context and its libraries (about 1 GB).
        host_bytes: in host memory, of one rank; large only with offload and infinity.
        nvme_bytes: on the local disk, of one rank; only with infinity.
        sent_bytes: what one rank sends in an optimizer step.
        fits: whether `total_bytes`, and the node's host memory, are within the limits; None if no
            limit was given.
        largest_batch: the largest `batch_size` that fits; 0 if none does; None without a limit.
        workload: what the estimate was computed from, for `cost`.
    """

    model: str
    strategy: str
    gpus: int
    precision: str
    batch_size: int
    seq_length: int
    memory: dict[str, int]
    peak_bytes: int
    total_bytes: int
    host_bytes: int
    nvme_bytes: int
    sent_bytes: int
    fits: bool | None
    largest_batch: int | None
    workload: Workload

    @classmethod
    def of(cls, model: str, work: Workload, need: MemoryEstimate, limits: Limits) -> "Plan":
        """Return the plan of a workload with this estimate and these limits."""
        has_limit = limits.gpu is not None
        return cls(
            model=model,
            strategy=need.strategy,
            gpus=work.world_size,
            precision=work.precision,
            batch_size=work.batch_size,
            seq_length=work.seq_length,
            memory={kind: getattr(need, kind) for kind in KINDS},
            peak_bytes=need.peak,
            total_bytes=need.total,
            host_bytes=need.host,
            nvme_bytes=need.nvme,
            sent_bytes=need.sent,
            fits=limits.hold(need) if has_limit else None,
            largest_batch=limits.largest_batch(work, need.strategy) if has_limit else None,
            workload=work,
        )

    def cost(
        self,
        tokens: float | None = None,
        max_steps: int | None = None,
        device: str | None = None,
        tokens_per_second: float | None = None,
        mfu: float | None = None,
        price: float | None = None,
    ) -> Cost:
        """Return the hours, GPU-hours and price of a run, for one amount of work and one rate.

        A rate from `device` is the same for all strategies, and does not know of recomputation
        (gradient_checkpointing); a measured `tokens_per_second` includes both.

        Args:
            tokens: number of tokens trained on, over all epochs; or
            max_steps: number of optimizer steps.
            device: a GPU such as "A100", whose peak FLOP/s × `mfu` are assumed; or
            tokens_per_second: of all GPUs together, as in a run's results.json.
            mfu: share of the peak FLOP/s (default: 0.4).
            price: of a GPU-hour, in any currency.
        Returns:
            The `Cost`: hours, gpu_hours, price, tokens, steps, tokens_per_second_per_gpu, and
            `basis`, which says what the rate follows from.
        Raises:
            UserError: the amount of work or the rate is missing, a number is not valid, or the
                device is unknown.
        """
        if (tokens is None) == (max_steps is None):
            raise UserError("The cost needs one amount of work: tokens or max_steps.")
        if (device is None) == (tokens_per_second is None) or (mfu is not None and device is None):
            raise UserError("The cost needs one rate: device (with mfu) or tokens_per_second.")
        if tokens is not None:
            arguments.number("tokens", tokens, 1, LARGEST_TOKENS)
        else:
            arguments.whole("max_steps", max_steps, 1, flag_types.MOST_STEPS)
        if price is not None:
            arguments.number("price", price, 0, LARGEST_RATE)
        if device is not None:
            if not isinstance(device, str):
                raise UserError('device is the name of a GPU, such as "A100".')
            if mfu is not None:
                arguments.number("mfu", mfu, 1e-6, 1, " of the peak FLOP/s")
            rate = assumed_rate(device, mfu, self.workload)
        else:
            given = arguments.number("tokens_per_second", tokens_per_second, 1e-9, LARGEST_RATE)
            rate = Rate(given / self.gpus, "given", "tokens_per_second", "", self.seq_length)
        return cost_of_work(self.workload, rate, tokens, max_steps=max_steps, price=price)

    def as_dict(self) -> JsonObject:
        """Return the plan as a row of a table; the keys of bytes end in _bytes."""
        row = {name: value for name, value in vars(self).items() if name != "workload"}
        sizes = {f"{kind}_bytes": size for kind, size in row.pop("memory").items()}
        return {**row, **sizes}

    def __repr__(self) -> str:
        return (
            f"Plan({self.model!r}, {self.strategy!r}, gpus={self.gpus}, {self.precision}, "
            f"{self.batch_size} x {self.seq_length} tokens: peak {self.peak_bytes / GB:.2f} GB, "
            f"needs {self.total_bytes / GB:.2f} GB, fits={self.fits}, "
            f"largest_batch={self.largest_batch})"
        )


def plan(
    model: str | Path | Settings,
    strategy: str | None = None,
    gpus: int = 1,
    gpu_memory: float | None = None,
    host_memory: float | None = None,
    gpus_per_node: int | None = None,
    **flags: object,
) -> Plan:
    """Estimate the memory of a run before it starts, without PyTorch, weights or a GPU.

    The command plan-memory prints the same estimate; docs/PLAN.md of the project explains it and
    compares it with measurements. By default a rank has 4 sequences of 512 tokens in bf16.

    Args:
        model: a size of GPT-2, tiny-gpt2, Llama-3-8B and others that docs/PLAN.md names, a name on
            the hub, a folder or a config.json; or the settings of a run.
        strategy: one of `STRATEGIES` (default: dp, or that of the settings).
        gpus: number of ranks, one per GPU.
        gpu_memory: GB (2^30 bytes) of one GPU; None: what fits is not computed.
        host_memory: GB of a node, for offload, infinity and `device="cpu"`.
        gpus_per_node: ranks that share a node's host memory (default: `gpus`, at most 8).
        flags: flags of a run by name, such as batch_size=8, seq_length=1024, precision="fp16",
            gradient_checkpointing=True, lora_r=16; docs/FLAGS.md lists them. device="cpu" plans
            processes on CPUs. Without `precision` it is bf16.
    Returns:
        The plan: bytes of one rank, all ranks alike.
    Raises:
        UserError: a flag is unknown or has an invalid value, the strategy does not support the
            run, or the model is of a family that the estimate does not support.
    """
    gpus = arguments.whole("gpus", gpus, 1, MOST_RANKS)
    if gpus_per_node is not None:
        gpus_per_node = arguments.whole("gpus_per_node", gpus_per_node, 1, MOST_RANKS)
    if strategy is not None:
        flags["strategy"] = strategy
    _check_flags(flags)
    if not isinstance(model, Settings):
        model = resolve_settings({"model": arguments.path("model", model)})
    settings = change_settings(model, flags, world_size=gpus)
    on_cpu = settings.training.device == "cpu"
    work = planned_workload(settings, gpus, Device("cpu") if on_cpu else None)
    limits = _limits(work.device, gpu_memory, host_memory, ranks_of_node(gpus, gpus_per_node))
    need = predict(work, settings.parallelism.strategy)
    return Plan.of(settings.model.model, work, need, limits)


def _check_flags(flags: JsonObject) -> None:
    """Refuse flags that a plan has under another name, or answers itself.

    Raises:
        UserError: there is such a flag, or the strategy is not given by its name.
    """
    for name in NAMES_OF_GPUS:
        if name in flags:
            raise UserError(f"{name}: the number of ranks is called gpus.")
    if flags.get("batch_size") == AUTO:
        raise UserError(
            "The plan is for one batch_size, and its `largest_batch` is the largest one that fits: "
            "name a number instead of auto."
        )
    strategy = flags.get("strategy", "dp")
    if not isinstance(strategy, str):
        raise UserError('strategy is a name, such as "zero2": `STRATEGIES` has all.')
    if strategy not in (AUTO, *STRATEGIES):  # AUTO has a message of its own
        guess = did_you_mean(strategy.lower(), STRATEGIES) or f": use {', '.join(STRATEGIES)}."
        raise UserError(f"strategy={shown(repr(strategy))} is not the name of a strategy{guess}")


def _limits(
    device: Device, gpu_memory: float | None, host_memory: float | None, ranks_per_node: int
) -> Limits:
    """Return the available memory; the sizes are those of `plan`.

    Raises:
        UserError: a size is not a number of GB, or it is that of another device.
    """
    for name, size in (("gpu_memory", gpu_memory), ("host_memory", host_memory)):
        if size is not None:
            arguments.number(name, size, 0.001, LARGEST_GB, " GB (2^30 bytes)")
    if device.type == "cuda":
        return Limits.in_gb(gpu_memory, host_memory, None, ranks_per_node)
    if gpu_memory is not None:
        raise UserError('gpu_memory is of GPUs: with device="cpu" give host_memory.')
    return Limits.of_cpu(host_memory, None, ranks_per_node)


def planned_workload(settings: Settings, gpus: int, device: Device | None) -> Workload:
    """Return the workload of a run on equal ranks; --precision auto is bf16.

    Args:
        device: None: a GPU that usually computes in this precision.
    Raises:
        UserError: the estimate does not support it, or the run chooses a part of it on its GPUs.
    """
    chosen, training, data = settings.model, settings.training, settings.data
    if settings.parallelism.to_choose:
        names = " and ".join(settings.parallelism.to_choose)
        raise UserError(f"A run chooses its {names} on its GPUs: name a value instead of auto.")
    if training.rank_shares:
        raise UserError("The plan is for equal ranks: leave rank_shares out.")
    check_is_planned(settings.strategy, training.eval_only)
    model = find_architecture(chosen.model)
    precision = "bf16" if training.precision == "auto" else training.precision
    length = choose_seq_length(data.seq_length, chosen.model, model.limit)
    return workload_of(
        settings, model, gpus, precision, length, device or planned_device(precision)
    )
