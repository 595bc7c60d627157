"""The start of a run, in the order in which the script calls these functions."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from support import console
from support.checkpoints import find
from support.cluster import restart, tuning
from support.cluster.compiler import check_compile
from support.cluster.context import DistContext
from support.data.batches import initial_counts
from support.memory.measure import MemoryByPhase
from support.model.spec import ModelSpec
from support.report.profiling import record_memory
from support.report.run import Run
from support.report.run_folder import RunFolder
from support.report.run_plan import RunPlan, keeps_large_tensors
from support.report.start_log import StartLog
from support.settings.data import DataSettings
from support.settings.output import OutputSettings
from support.settings.settings import Settings
from support.settings.training import TrainingSettings
from support.strategies.strategy import Strategy


def open_folder(settings: Settings, ctx: DistContext) -> RunFolder:
    """Print the "Distributed Setup" lines, and open the output folder.

    Raises:
        UserError: --rank_shares does not fit the ranks; or the folder cannot be used.
    """
    initial_counts(settings.training, ctx)
    say_setup(ctx)
    return RunFolder.open(settings, ctx)


def find_checkpoint(
    output: OutputSettings,
    data: DataSettings,
    training: TrainingSettings,
    ctx: DistContext,
    folder: RunFolder,
) -> find.FoundCheckpoint | None:
    """Find the checkpoint of --resume before model and data are loaded; None without the flag."""
    return find.find_checkpoint(output, data, training, ctx, folder.path)


def plan_memory(settings: Settings, ctx: DistContext, spec: ModelSpec) -> RunPlan:
    """Return the memory estimate of the run, which advises a run whose memory runs out."""
    plan = RunPlan.of(settings, ctx, spec.config.to_dict(), spec.seq_length)
    ctx.monitor.advise_with(partial(plan.ways_to_fit, ctx))
    return plan


def open_log(memory_snapshot: str | None, ctx: DistContext, folder: RunFolder) -> StartLog:
    """Start to record memory; reports of hangs and of memory that ran out use it."""
    memory = MemoryByPhase(ctx.device)
    ctx.monitor.report_hangs(folder.path, lambda: memory.doing)
    ctx.monitor.explain_memory_with(memory.describe)
    at_end = [record_memory(memory_snapshot, ctx)] if memory_snapshot else []
    return StartLog(ctx, folder, memory, at_end)


def check_machine(
    strategy: Strategy, training: TrainingSettings, compiles: bool, device_type: str
) -> None:
    """Check that this machine has what the strategy and --compile need.

    Raises:
        MissingRequirement: it is missing.
    """
    if not (training.eval_only and strategy.whole_parameters):  # else as under dp
        strategy.check_requirements(training.gradient_accumulation_steps)
    if compiles:
        check_compile(device_type)


def keep_freed_memory(plan: RunPlan, ctx: DistContext, strategy: Strategy) -> None:
    """On a CPU, let the process keep the memory of a step's tensors for the next step."""
    if ctx.device.type == "cpu":
        large = keeps_large_tensors(plan, ctx, sharded=bool(strategy.sharded))
        tuning.keep_freed_memory(large=large)


def watch_steps(training: TrainingSettings, ctx: DistContext, run: Run, plan: RunPlan) -> None:
    """Report steps that hang from now on; with --auto_micro_batch restart if memory runs out."""
    state, first_step = run.state, run.state.step + 1
    # --rank_shares auto may have changed the sequences of this rank.
    ctx.monitor.advise_with(lambda: plan.at_step(state, ctx).ways_to_fit(ctx))
    if not (training.auto_micro_batch and training.batch_size > 1):
        ctx.monitor.training_starts(state)
        return

    def smaller_batch_may_help() -> bool:
        """Whether a new start with smaller micro-batches may help after memory ran out."""
        own_batch = training.eval_batch_size and run.meter.memory.doing == "evaluation"
        # Adam's states exist from the first update on, so the second step may need the most memory.
        early = state.step <= first_step
        return early and not run.manager.seconds and not own_batch

    values = restart.restart_values(training, run.folder.path, run.folder.facts["automatic"])
    ctx.monitor.training_starts(state, restart.Restart(values, smaller_batch_may_help))
    # A rank may run out of memory while another still starts a tracker or removes files.
    dist.barrier()


def say_training(ctx: DistContext, run: Run, eval_only: bool) -> None:
    """Print the strategy and which steps follow."""
    title = f"🚂 Starting Training ({run.objects.strategy.title})"
    title = "⏳ Starting the memory simulation" if ctx.simulated else title
    sequences = run.state.ranks.at(run.state.step + 1)
    if len({*sequences}) > 1:
        shown = " : ".join(map(str, sequences))
        console.print0(f"⚖️  The ranks compute {shown} sequences of a micro-batch")
    steps = f"{title}: steps {run.state.step + 1} to {run.state.total_steps}"
    console.print0("⏳ Evaluating" if eval_only else steps)
    reduces = ctx.world_size > 1 and not eval_only
    if reduces and run.objects.strategy.reduce_dtype == "fp16" and ctx.precision != "fp16":
        console.warn(
            "--reduce_dtype fp16: small gradients become 0, because only --precision fp16 scales "
            "the loss to the range of fp16. bf16 has the range of fp32."
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
