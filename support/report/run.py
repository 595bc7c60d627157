"""Run: the objects of a run whose training starts."""

from __future__ import annotations

from typing import NamedTuple

from support.balance.balancer import Balancer
from support.balance.timer import ForwardTimer
from support.checkpoints.manager import CheckpointManager
from support.cluster.context import DistContext
from support.data.batches import StepBatches
from support.memory.measure import StepMemory
from support.rank_shares import AUTO
from support.report.metrics_file import MetricsFile
from support.report.profiling import start_trace
from support.report.prompts import Prompts
from support.report.run_folder import RunFolder
from support.report.start_log import StartLog
from support.report.step_log import LogOptions, StepLog
from support.report.step_meter import StepMeter, create_meter, loss_bytes
from support.report.trackers import Trackers
from support.settings.settings import Settings
from support.strategies.objects import TrainingObjects
from support.train_state import TrainState


class Run(NamedTuple):
    """The objects of a run whose training starts. Each owns one thing."""

    objects: TrainingObjects  # model, optimizer, loss scaler
    state: TrainState  # how far training has come
    folder: RunFolder  # <output_dir>: its lock, results.json
    manager: CheckpointManager  # <output_dir>/checkpoints
    log: StepLog  # metrics.jsonl, the console's lines of steps and evaluations, trackers
    meter: StepMeter  # time, memory and traffic of each step
    balance: Balancer  # --rank_shares auto: the sequences of each rank
    prompts: Prompts  # of --generate

    def without(self, skipped: tuple[int, ...], steps: StepBatches) -> StepBatches:
        """Return the step batches, except those of the steps `skipped`, which are only counted."""
        return self._without(skipped, steps) if skipped else steps

    def _without(self, skipped: tuple[int, ...], steps: StepBatches) -> StepBatches:
        """Yield the step batches; end early if an evaluation is due after a skipped step."""
        for step_batch in steps:
            if self.state.step + 1 not in skipped:
                yield step_batch
                continue
            self.skip_step()
            if self.manager.is_due(self.state):
                self.manager.save(self.state)
                self.meter.pause()
            if self.state.evaluation_is_due or self.state.finished:
                return

    def skip_step(self) -> None:
        """Count a step that is not made, because of --skip_steps."""
        self.state.skip()
        self.balance.skip_step()
        self.log.log_skipped()

    @classmethod
    def open(
        cls,
        settings: Settings,
        ctx: DistContext,
        start_log: StartLog,
        manager: CheckpointManager,
        state: TrainState,
    ) -> Run:
        """Create the meter and the log of the steps; files of an earlier run stay as they are."""
        folder, memory, at_end = start_log.folder, start_log.memory, [*start_log.at_end]
        objects, spec = manager.objects, manager.spec
        of_loss = loss_bytes(objects, spec, state, settings.model.compile, ctx)
        detailed = settings.debug.profile_memory or ctx.simulated
        step_memory = StepMemory(objects, memory.peak, detailed, of_loss)
        ctx.monitor.explain_memory_with(step_memory.describe)
        meter = create_meter(ctx, memory, step_memory, state, settings.training.skip_steps)
        trackers, trace = None, None
        if settings.output.report_to and ctx.is_main:
            flags = {**settings.flags(), "seq_length": spec.seq_length}
            trackers = Trackers(settings.output, flags, folder.path, state.step)
        if settings.debug.profile:
            trace, stop = start_trace(settings.debug.profile, ctx)
            at_end.insert(0, stop)
        evaluated = folder.facts["dataset"].get("validation") or {}
        log = StepLog(
            ctx=ctx,
            state=state,
            meter=meter,
            file=MetricsFile.in_folder(folder.path),
            trackers=trackers,
            trace=trace,
            at_end=at_end,
            options=LogOptions(
                settings.output.logging_steps, settings.data.streaming, evaluated.get("targets")
            ),
        )
        timer = None
        if settings.training.rank_shares == AUTO and ctx.world_size > 1:
            timer = ForwardTimer(objects.module, objects.strategy.gathers, ctx.device)
        balance = Balancer(ctx, state, timer, log.log_shares)
        prompts = Prompts.of(settings.output, settings.training)
        return cls(objects, state, folder, manager, log, meter, balance, prompts)
