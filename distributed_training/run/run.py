"""Run: the objects of a run whose training starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from distributed_training import console
from distributed_training.checkpoints.manager import CheckpointManager
from distributed_training.data.batches import StepBatches
from distributed_training.data.opening import Datasets
from distributed_training.errors import Preempted
from distributed_training.memory.measure import StepMemory
from distributed_training.model.spec import ModelSpec
from distributed_training.rank_shares import AUTO
from distributed_training.ranks import tuning
from distributed_training.ranks.context import DistContext
from distributed_training.records.metrics_file import MetricsFile
from distributed_training.run import results
from distributed_training.run.balancing import Balancer, CreateBalancer, FixedShares
from distributed_training.run.memory_plan import MemoryPlan
from distributed_training.run.run_folder import RunFolder
from distributed_training.run.start_log import StartLog
from distributed_training.run.step_log import LogOptions, StepLog
from distributed_training.run.step_meter import StepMeter, create_meter, loss_bytes
from distributed_training.settings.settings import Settings
from distributed_training.settings.training import TrainingSettings
from distributed_training.strategies.objects import TrainingObjects
from distributed_training.train_state import TrainState

if TYPE_CHECKING:
    from distributed_training.run.prompts import Prompts


class Run(NamedTuple):
    """The objects of a run whose training starts. Each owns one thing."""

    objects: TrainingObjects  # model, optimizer, loss scaler
    datasets: Datasets  # the training and validation sequences
    state: TrainState  # how far training has come
    folder: RunFolder  # <output_dir>: its lock, results.json
    manager: CheckpointManager  # <output_dir>/checkpoints
    log: StepLog  # metrics.jsonl, the console's lines of steps and evaluations, trackers
    meter: StepMeter  # time, memory and traffic of each step
    balance: Balancer  # --rank_shares auto: the sequences of each rank
    prompts: Prompts | None  # of --generate_every_eval

    @classmethod
    def open(
        cls,
        settings: Settings,
        datasets: Datasets,
        start_log: StartLog,
        manager: CheckpointManager,
        state: TrainState,
        create_balancer: CreateBalancer | None,
    ) -> Run:
        """Create the meter and the log of the steps; files of an earlier run stay as they are.

        Args:
            create_balancer: for --rank_shares auto.
        """
        ctx, folder, memory = start_log.ctx, start_log.folder, start_log.memory
        objects, spec = manager.objects, manager.spec
        of_loss = loss_bytes(objects, spec, state, settings.model.compile, ctx)
        detailed = settings.debug.profile_memory or ctx.simulated
        step_memory = StepMemory(objects, memory.peak, detailed, of_loss)
        ctx.monitor.explain_memory_with(step_memory.describe)
        meter = create_meter(ctx, memory, step_memory, state, settings.training.skip_steps)
        log = open_step_log(settings, start_log, state, meter, spec)
        balance: Balancer = FixedShares()
        chooses_shares = settings.training.rank_shares == AUTO and ctx.world_size > 1
        if chooses_shares and create_balancer:
            balance = create_balancer(objects, state, ctx, log.log_shares)
        prompts = None
        if settings.output.generate and settings.training.generate_every_eval:
            from distributed_training.run.prompts import Prompts  # only with the flags

            prompts = Prompts.of(settings.output, settings.training)
        return cls(objects, datasets, state, folder, manager, log, meter, balance, prompts)

    def begin(self, training: TrainingSettings, plan: MemoryPlan, ctx: DistContext) -> None:
        """Change the files of an earlier run, and report steps that hang from now on.

        Call it when all checks have passed. With --auto_micro_batch the ranks start again if memory
        runs out from now on.
        """
        self.manager.take_over(self.state, clean=self.folder.lock is not None)  # checkpoints
        self.folder.record(run_signature=self.manager.identity)
        if step := self.state.step:
            from distributed_training.run.signatures import after_resume  # only of a resumed run

            found = (self.manager.continues_folder and self.folder.found) or {}
            self.folder.record(signatures=after_resume(found, self.manager.identity, step))
        self.folder.begin()  # results.json
        self.log.cut()  # metrics.jsonl
        if ctx.device.type == "cpu":  # keep the memory of a step's tensors for the next step
            sharded = bool(self.objects.strategy.sharded)
            tuning.keep_freed_memory(large=not sharded and plan.leaves_half(ctx))
        # --rank_shares auto may change the sequences of this rank.
        ctx.monitor.advise_with(lambda: plan.at_step(self.state, ctx).ways_to_fit(ctx))
        if not (training.auto_micro_batch and training.batch_size > 1):
            ctx.monitor.training_starts(self.state)
            return
        from distributed_training.ranks import restart  # only with --auto_micro_batch

        values = restart.restart_values(training, self.folder.path, self.folder.facts["automatic"])
        may_help = self._smaller_batch_may_help(self.state.step + 1, bool(training.eval_batch_size))
        ctx.monitor.training_starts(self.state, restart.Restart(values, may_help))
        # A rank may run out of memory while another still starts a tracker or removes files.
        dist.barrier()

    def _smaller_batch_may_help(self, first_step: int, has_eval_batch: bool) -> Callable[[], bool]:
        """Return a function: whether smaller micro-batches may help after memory ran out."""

        def may_help() -> bool:
            own_batch = has_eval_batch and self.meter.memory.doing == "evaluation"
            # Adam's states exist from the first update on, so the second step may need the most
            # memory.
            early = self.state.step <= first_step
            return early and not self.manager.seconds and not own_batch

        return may_help

    def announce(self, ctx: DistContext, eval_only: bool) -> None:
        """Print the strategy and which steps follow."""
        title = f"🚂 Starting Training ({self.objects.strategy.title})"
        title = "⏳ Starting the memory simulation" if ctx.simulated else title
        sequences = self.state.ranks.at(self.state.step + 1)
        if len({*sequences}) > 1:
            shown = " : ".join(map(str, sequences))
            console.print0(f"⚖️  The ranks compute {shown} sequences of a micro-batch")
        done, total = self.state.step, self.state.total_steps
        steps = f"{title}: steps {done + 1} to {total}"
        if done >= total:
            steps = f"No step is left: {done} are done, and the run has {total}"
        console.print0("⏳ Evaluating" if eval_only else steps)
        reduces = ctx.world_size > 1 and not eval_only
        if reduces and self.objects.strategy.reduce_dtype == "fp16" and ctx.precision != "fp16":
            console.warn(
                "--reduce_dtype fp16: small gradients become 0, because only --precision fp16 "
                "scales the loss to the range of fp16. bf16 has the range of fp32."
            )

    def without_skipped(self, skipped: tuple[int, ...], steps: StepBatches) -> StepBatches:
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

    def generate(self, casting: torch.autocast, ctx: DistContext) -> None:
        """With --generate_every_eval, continue each prompt and log the texts; all ranks call it.

        A stop signal ends the run here; it then repeats the evaluation when it is resumed.
        """
        if self.prompts is None:
            return
        dataset = self.folder.facts["dataset"]
        if (stream := self.datasets.stream) is not None:
            # The rows of a stream show the kind, on each rank its own rows.
            dataset = {"kind": ctx.broadcast_from_rank0(stream.state["kind"])}
        generated = self.prompts.continue_all(
            self.objects.model, casting, self.manager.spec, dataset, ctx, may_stop=True
        )
        if len(generated) < len(self.prompts.texts):
            self.stop()
        self.log.log_generated(generated)

    def stop(self) -> NoReturn:
        """Save a checkpoint and end the run, because a rank received a stop signal.

        Raises:
            Preempted: the checkpoint is complete.
            TrainingError: this run saves no checkpoints, or the checkpoint cannot be written.
        """
        state = self.state
        self.log.flush()
        self.manager.save_before_stop(state)
        self.folder.record(**results.progress(state), saves=self.manager.saves)
        self.folder.end("preempted", "stopped by a signal; a checkpoint was saved")
        console.print0(
            f"⏸️  Stopped by a signal after step {state.step} of {state.total_steps}: "
            "resume with --resume"
        )
        self.log.close()
        raise Preempted(self.objects.model)


def open_step_log(
    settings: Settings, start_log: StartLog, state: TrainState, meter: StepMeter, spec: ModelSpec
) -> StepLog:
    """Create the log of the steps, and what --report_to and --profile add to it."""
    ctx, folder, at_end = start_log.ctx, start_log.folder, [*start_log.at_end]
    trackers, trace = None, None
    if settings.output.report_to and ctx.is_main:
        from distributed_training.run.trackers import Trackers  # only with the flag

        flags = {**settings.flags(), "seq_length": spec.seq_length}
        trackers = Trackers(settings.output, flags, folder.path, state.step)
    if settings.debug.profile:
        from distributed_training.run.profiling import start_trace  # only with the flag

        trace, stop = start_trace(settings.debug.profile, ctx)
        at_end.insert(0, stop)
    draw: Callable[[Path], None] | None = None
    if ctx.is_main:
        from distributed_training.records.loss_figure import draw_losses  # other ranks draw none

        draw = draw_losses
    evaluated = folder.facts["dataset"].get("validation") or {}
    return StepLog(
        ctx=ctx,
        state=state,
        meter=meter,
        file=MetricsFile.in_folder(folder.path),
        trackers=trackers,
        trace=trace,
        draw_losses=draw,
        at_end=at_end,
        options=LogOptions(
            settings.output.logging_steps, settings.data.streaming, evaluated.get("targets")
        ),
    )
