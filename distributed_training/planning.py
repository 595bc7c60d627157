"""The plan of a run for a program: the memory of a rank, whether it fits, and what it costs."""

from dataclasses import dataclass

from distributed_training.cli.resolve import change_settings, resolve_settings
from distributed_training.errors import UserError
from distributed_training.files.json_types import JsonObject
from distributed_training.memory.estimate import MemoryEstimate, predict
from distributed_training.memory.find_architecture import find_architecture
from distributed_training.memory.fit import (
    Limits,
    check_is_planned,
    planned_device,
    ranks_of_node,
    workload_of,
)
from distributed_training.settings.data import choose_seq_length
from distributed_training.settings.settings import Settings
from distributed_training.units import GB
from distributed_training.workload.cost import Cost, cost_of_work
from distributed_training.workload.rate import Rate, assumed_rate
from distributed_training.workload.workload import Device, Workload

KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations", "logits")


@dataclass(frozen=True, repr=False)
class Plan:
    """The memory of one rank of a run, in bytes, and whether it fits. See `plan`."""

    model: str
    strategy: str
    gpus: int  # or processes on CPUs
    precision: str
    batch_size: int  # sequences of a rank in a micro-batch
    seq_length: int  # tokens
    # On the device: parameters, gradients, optimizer, buffers (of communication), activations,
    # logits (what the loss keeps of them).
    memory: dict[str, int]
    peak_bytes: int  # the maximum over a step on the device, with temporary tensors
    total_bytes: int  # that the device must have: the peak with allowances for the libraries
    host_bytes: int  # in host memory
    nvme_bytes: int  # on disk
    sent_bytes: int  # that the rank sends per optimizer step
    fits: bool | None  # None: no limit is known
    largest_batch: int | None  # the largest `batch_size` that fits, 0 if none does
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

        Args:
            tokens: that are trained on, over all epochs; or
            max_steps: optimizer steps.
            device: a GPU such as "A100", whose peak FLOP/s × `mfu` are assumed; or
            tokens_per_second: of all GPUs together, as in a run's results.json.
            mfu: share of the peak FLOP/s (default: 0.4).
            price: of a GPU-hour, in any currency.
        Raises:
            UserError: the amount of work or the rate is missing, or the device is unknown.
        """
        if bool(device) == bool(tokens_per_second) or (mfu and not device):
            raise UserError("The cost needs one rate: device (with mfu) or tokens_per_second.")
        if device:
            rate = assumed_rate(device, mfu, self.workload)
        else:
            speed = (tokens_per_second or 0.0) / self.gpus
            rate = Rate(speed, "given", "tokens_per_second", "", self.seq_length)
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
    model: str | Settings,
    strategy: str | None = None,
    gpus: int = 1,
    gpu_memory: float | None = None,
    host_memory: float | None = None,
    gpus_per_node: int | None = None,
    **flags: object,
) -> Plan:
    """Estimate the memory of a run before it starts, without PyTorch, weights or a GPU.

    The estimate is that of scripts/plan_memory.py; docs/PLAN.md explains and measures it.

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
    if gpus < 1 or (gpu_memory is not None and gpu_memory <= 0):
        raise UserError("gpus and gpu_memory must be above 0.")
    settings = model if isinstance(model, Settings) else resolve_settings({"model": model})
    changed = {**flags, **({"strategy": strategy} if strategy else {})}
    settings = change_settings(settings, changed, world_size=gpus)
    work = _workload(settings, gpus)
    per_node, name = ranks_of_node(gpus, gpus_per_node), settings.parallelism.strategy
    if work.device.type == "cuda":
        limits = Limits.in_gb(gpu_memory, host_memory, None, per_node)
    elif gpu_memory is None:
        limits = Limits.of_cpu(host_memory, None, per_node)
    else:
        raise UserError('gpu_memory is of GPUs: with device="cpu" give host_memory.')
    return Plan.of(settings.model.model, work, predict(work, name), limits)


def _workload(settings: Settings, gpus: int) -> Workload:
    """Return the workload of a run on equal ranks.

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
    device = Device("cpu") if training.device == "cpu" else planned_device(precision)
    return workload_of(settings, model, gpus, precision, length, device)
