"""What a run reports before its training: lines about model and data, facts, memory by phase."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from distributed_training import console
from distributed_training.data.batches import initial_counts
from distributed_training.data.opening import Datasets
from distributed_training.hardware import computes_bf16, cpu_fact
from distributed_training.memory.measure import MemoryByPhase
from distributed_training.model.spec import ModelSpec
from distributed_training.optimizers import OPTIMIZERS
from distributed_training.ranks.context import DistContext
from distributed_training.run.memory_plan import MemoryPlan, PlanRun
from distributed_training.run.run_folder import RunFolder
from distributed_training.settings.model import ModelSettings
from distributed_training.settings.settings import Settings
from distributed_training.settings.training import TrainingSettings
from distributed_training.strategies.strategy import Strategy
from distributed_training.strategies.table import STRATEGIES
from distributed_training.strategies.wrapped import base_optimizer
from distributed_training.units import human_count


@dataclass(frozen=True)
class StartLog:
    """Reports how a run gets ready: on the console, in results.json, and the memory it needs."""

    ctx: DistContext
    folder: RunFolder
    memory: MemoryByPhase  # after each phase of the run
    at_end: Sequence[Callable[[], object]]  # write the files of other tools at the end of the run

    @classmethod
    def open(cls, settings: Settings, ctx: DistContext) -> StartLog:
        """Open the output folder, check the machine, and start to record memory.

        Reports of hangs and of memory that ran out use what is recorded.

        Raises:
            UserError: --rank_shares does not fit the ranks, the folder cannot be used, or this
                machine lacks what the strategy, --compile or --memory_snapshot needs.
        """
        counts = initial_counts(settings.training, ctx)
        say_setup(ctx)
        if settings.training.rank_shares:
            from distributed_training.run import rounded_shares  # only with the flag

            rounded_shares.report(settings.training, counts, ctx.nodes.of_rank)
        folder = RunFolder.open(settings, ctx)
        check_machine(settings.strategy, settings.training, settings.model, ctx.device.type)
        memory = MemoryByPhase(ctx.device)
        ctx.monitor.report_hangs(folder.path, lambda: memory.doing)
        ctx.monitor.explain_memory_with(memory.describe)
        at_end = []
        if settings.debug.memory_snapshot:
            from distributed_training.run.profiling import record_memory  # only with the flag

            at_end.append(record_memory(settings.debug.memory_snapshot, ctx))
        return cls(ctx, folder, memory, at_end)

    def plan_memory(
        self, settings: Settings, spec: ModelSpec, plan_run: PlanRun | None
    ) -> MemoryPlan:
        """Return the memory plan of the run, which advises a run whose memory runs out."""
        if plan_run is None:
            return MemoryPlan()
        plan = plan_run(settings, self.ctx, spec.config.to_dict(), spec.seq_length)
        self.ctx.monitor.advise_with(partial(plan.ways_to_fit, self.ctx))
        return plan

    def model_found(
        self, name: str, spec: ModelSpec, strategy: str, training: TrainingSettings
    ) -> None:
        """Print what is trained, and how."""
        verb = "Evaluating" if training.eval_only else "Fine-tuning"
        verb = "Simulating the memory of" if self.ctx.simulated else verb
        base = spec.counts.total - (spec.counts.trainable if spec.lora else 0)
        console.print0(
            f"{console.RULE}\n"
            f"🚀 {verb} {name} ({human_count(base)} parameters)\n"
            f"📋 Strategy: {strategy.upper()}"
        )
        say_settings(training, self.ctx)
        console.print0(console.RULE)

    def strategy_chosen(self, requested: Strategy, trains: Strategy) -> None:
        """Say so if the run trains as under another strategy than --strategy, see `on_ranks`."""
        if trains is not requested:
            rows = STRATEGIES.items()
            name = next(name for name, row in rows if row.sharded == trains.sharded)
            console.print0(f"📋 One rank has nothing to shard: the run trains as under {name}")

    def dataset_ready(self, datasets: Datasets, training: TrainingSettings) -> None:
        """Print and record the size of the data."""
        if training.eval and self.ctx.is_main and datasets.validation.num_sequences:
            datasets.facts["validation"]["targets"] = datasets.validation.targets()
        self.folder.record(dataset=datasets.facts)
        count = "a stream" if datasets.stream else f"{datasets.train.num_sequences:,} samples"
        if training.eval_only:
            blocks = datasets.facts["validation"].get("blocks", 0)
            count = f"{blocks:,} validation samples"
        ready = count if datasets.train.num_sequences else "validation data only"
        console.print0(f"✅ Dataset ready: {ready}")

    def wrapped(self, optim: str, optimizer: object) -> None:
        """Print what --optim updates; `optimizer` is None if nothing is trained."""
        self.memory.note("wrapped")
        if optimizer is None:
            return
        if line := OPTIMIZERS[optim].summary(base_optimizer(optimizer)):
            console.print0(f"✅ {line}")

    def model_loaded(self, spec: ModelSpec) -> None:
        """Print and record the size of the model."""
        self.memory.note("model_loaded")
        whole = spec.counts.total
        console.print0(f"✅ Model loaded: {whole:,} parameters ({whole / 1e6:.1f}M)")
        if spec.lora:
            flags = self.folder.facts["flags"]
            say_adapters(
                spec, exports_adapters=not (flags.get("merge_lora") or flags.get("no_export"))
            )
        self.folder.record(
            parameters=whole, trainable_parameters=spec.counts.trainable, seq_length=spec.seq_length
        )


def say_setup(ctx: DistContext) -> None:
    """Print the "Distributed Setup" lines, once, if the run has several ranks."""
    if ctx.world_size > 1:
        gpu = torch.cuda.get_device_name(ctx.device) if ctx.device.type == "cuda" else "none (CPU)"
        console.print0(
            "=== Distributed Setup ===\n"
            f"Rank: {ctx.rank}/{ctx.world_size}\n"
            f"Local Rank: {ctx.launch.local_rank}\n"
            f"World Size: {ctx.world_size}\n"
            f"Backend: {ctx.backend.upper()}\nGPU: {gpu}\n========================="
        )


def check_machine(
    strategy: Strategy, training: TrainingSettings, model: ModelSettings, device_type: str
) -> None:
    """Check that this machine has what the strategy and --compile or --compile_loss need.

    Raises:
        MissingRequirement: it is missing.
    """
    if not (training.eval_only and strategy.whole_parameters):  # else as under dp
        strategy.check_requirements(training.gradient_accumulation_steps)
    if model.compiler_flag:
        from distributed_training.ranks.compiler import check_compile  # only with these flags

        check_compile(device_type, model.compiler_flag)


def say_adapters(spec: ModelSpec, exports_adapters: bool) -> None:
    """Print what LoRA trains, and notices about random weights that it does not train.

    Args:
        exports_adapters: the adapters are exported, without the frozen weights.
    """
    trained = f"{spec.counts.trainable:,} of {spec.counts.total:,} parameters are trained"
    console.print0(f"🔧 LoRA: {trained} ({spec.counts.trainable / spec.counts.total:.2%})")
    rows = f"The {spec.weights.new_rows} new rows of the embedding" if spec.weights.new_rows else ""
    if rows:
        console.warn(
            f"{rows} are random, and LoRA freezes them: the new tokens are not learned. "
            "A run without --lora_r trains all weights."
        )
    if spec.weights.random and exports_adapters:
        console.warn(
            f"{rows or 'The frozen weights'} are random, and the adapters, which do not "
            "contain them, cannot be used without them: --merge_lora exports both."
        )


def say_settings(training: TrainingSettings, ctx: DistContext) -> None:
    """Print where the run trains, and the settings that decide how long it takes."""
    on_gpu, assigned = ctx.device.type == "cuda", os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if not on_gpu and training.device == "auto" and assigned not in ("", "0"):
        console.warn(f"Slurm assigned GPUs to this node ({assigned}), and none is visible here.")
    if ctx.precision == "bf16" and not computes_bf16(ctx.device) and cpu_fact("flags"):
        console.warn(
            "This CPU has no instructions for bf16, which PyTorch emulates: this run is several "
            "times slower than with --precision fp32."
        )
    details = f"threads: {torch.get_num_threads()}"
    if on_gpu:
        details = torch.cuda.get_device_name(ctx.device)
    parts = [f"Batch size: {training.batch_size}"]
    if not training.eval_only:
        until = (
            [f"Epochs: {training.epochs or 1}"] if training.epochs or not training.max_steps else []
        )
        until += [f"Steps: {training.max_steps}"] if training.max_steps else []
        parts = [*until, *parts, f"LR: {training.lr:g}"]
    if (
        whole := training.global_batch(ctx.world_size)
    ) > training.batch_size and not training.eval_only:
        factors = f"{training.batch_size} × {ctx.world_size} ranks"
        factors += f" × {training.gradient_accumulation_steps} micro-batches"
        parts.append(f"Global batch: {factors} = {whole}")
    console.print0(
        f"Device: {ctx.device} ({details}), Precision: {ctx.precision}\n{', '.join(parts)}"
    )
