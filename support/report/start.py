"""The start of a run, in the order in which the script calls these functions."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from support import console
from support.checkpoints.manager import CheckpointManager
from support.cluster import restart, tuning
from support.cluster.compiler import check_compile
from support.cluster.context import DistContext
from support.memory.measure import StepMemory
from support.model.spec import ModelSpec
from support.report.metrics_file import FILE, MetricsFile
from support.report.profiling import start_trace
from support.report.run_folder import RunFolder
from support.report.run_plan import RunPlan, keeps_large_tensors
from support.report.start_log import StartLog
from support.report.step_log import StepLog
from support.report.step_meter import StepMeter, create_meter, loss_bytes
from support.report.trackers import Trackers
from support.settings.settings import Settings
from support.settings.training import TrainingSettings
from support.strategies.objects import TrainingObjects
from support.strategies.strategy import Strategy
from support.train_state import TrainState


class Run(NamedTuple):
    """The objects of a run whose training starts. Each owns one thing."""

    objects: TrainingObjects  # model, optimizer, loss scaler
    state: TrainState  # how far training has come
    folder: RunFolder  # <output_dir>: its lock, results.json
    manager: CheckpointManager  # <output_dir>/checkpoints
    log: StepLog  # metrics.jsonl, the console's lines of steps and evaluations, trackers
    meter: StepMeter  # time, memory and traffic of each step


def open_folder(settings: Settings, ctx: DistContext) -> RunFolder:
    """Print the "Distributed Setup" lines, and open the output folder."""
    say_setup(ctx)
    return RunFolder.open(settings, ctx)


def plan_memory(settings: Settings, ctx: DistContext, spec: ModelSpec) -> RunPlan:
    """Return the memory estimate of the run, which advises a run whose memory runs out."""
    plan = RunPlan.of(settings, ctx, spec.config.to_dict(), spec.seq_length)
    ctx.monitor.advise_with(partial(plan.ways_to_fit, ctx))
    return plan


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


def open_run(
    settings: Settings,
    ctx: DistContext,
    start_log: StartLog,
    manager: CheckpointManager,
    state: TrainState,
) -> Run:
    """Create the meter and the log of the steps; files of an earlier run stay as they are."""
    folder, memory, at_end = start_log.folder, start_log.memory, [*start_log.at_end]
    objects, spec = manager.objects, manager.spec
    of_loss = loss_bytes(objects, spec, settings.training.batch_size, settings.model.compile, ctx)
    detailed = settings.debug.profile_memory or ctx.simulated
    step_memory = StepMemory(objects, memory.peak, detailed, of_loss)
    meter = create_meter(ctx, memory, step_memory, state)
    trackers, trace = None, None
    if settings.output.report_to and ctx.is_main:
        flags = {**settings.flags(), "seq_length": spec.seq_length}
        trackers = Trackers(settings.output, flags, folder.path, state.step)
    if settings.debug.profile:
        trace, stop = start_trace(settings.debug.profile, ctx)
        at_end.insert(0, stop)
    log = StepLog(
        ctx=ctx,
        state=state,
        meter=meter,
        file=MetricsFile(folder.path / FILE),
        trackers=trackers,
        trace=trace,
        at_end=at_end,
        logging_steps=settings.output.logging_steps,
        streaming=settings.data.streaming,
    )
    return Run(objects, state, folder, manager, log, meter)


def keep_freed_memory(plan: RunPlan, ctx: DistContext, strategy: Strategy) -> None:
    """On a CPU, let the process keep the memory of a step's tensors for the next step."""
    if ctx.device.type == "cpu":
        large = keeps_large_tensors(plan, ctx, sharded=bool(strategy.sharded))
        tuning.keep_freed_memory(large=large)


def watch_steps(training: TrainingSettings, ctx: DistContext, run: Run) -> None:
    """Report steps that hang from now on; with --auto_micro_batch restart if memory runs out."""
    state = run.state
    if not (training.auto_micro_batch and training.batch_size > 1):
        ctx.monitor.training_starts(state)
        return

    def smaller_batch_may_help() -> bool:
        """Whether a new start with smaller micro-batches may help after memory ran out."""
        own_batch = training.eval_batch_size and run.meter.memory.doing == "evaluation"
        # Adam's states exist from the first update on, so the second step may need the most memory.
        early = state.step < state.first_step + 2
        return early and not run.manager.seconds and not own_batch

    values = restart.restart_values(training, run.folder.path)
    ctx.monitor.training_starts(state, restart.Restart(values, smaller_batch_may_help))
    # A rank may run out of memory while another still starts a tracker or removes files.
    dist.barrier()


def say_training(ctx: DistContext, run: Run, eval_only: bool) -> None:
    """Print the strategy and which steps follow."""
    title = f"🚂 Starting Training ({run.objects.strategy.title})"
    title = "⏳ Starting the memory simulation" if ctx.simulated else title
    steps = f"{title}: steps {run.state.step + 1} to {run.state.total_steps}"
    console.print0("⏳ Evaluating" if eval_only else steps)


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
