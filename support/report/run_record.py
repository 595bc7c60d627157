"""The record of a run: its output folder and results.json, from the start to the exported model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from support.checkpoints.manager import CheckpointManager, TrainingObjects, saves_due
from support.cluster.context import DistContext
from support.cluster.restart import Restart, restart_values
from support.data.batches import total_steps
from support.data.chat import Prompt, prompt_of
from support.memory.measure import MemoryByPhase
from support.model import export, push
from support.model.generate import generate
from support.model.resolve import ModelSpec
from support.report import console_lines, output_dir, profiling
from support.report import results as reporting
from support.report.metrics_log import MetricsLogger, step_memory_of
from support.report.summary import summarize
from support.train_state import TrainState
from support.units import human_count


@dataclass(frozen=True)
class RunRecord:
    """Output folder, results.json and measurements of a run; all ranks call the methods."""

    ctx: DistContext
    folder: Path  # the output folder
    results: reporting.Results
    target: export.Target  # where the model is exported to
    memory: MemoryByPhase  # memory after each phase of the run
    at_end: list[Callable[[], None]]  # functions that finish files for other tools

    @classmethod
    def open(cls, args, ctx: DistContext) -> RunRecord:
        """Create and lock the output folder, write results.json, start to record memory."""
        console_lines.say_setup(ctx)
        folder = output_dir.new_output_dir(args, ctx)
        results = reporting.open_results(args, ctx, folder)
        target = export.target_of(args, folder, results.before)
        target.repository = push.open_repository(args, folder, ctx)
        memory = MemoryByPhase(ctx.device)
        ctx.hang.folder, ctx.hang.doing = folder, lambda: memory.doing
        ctx.failures.memory_facts.append(memory.describe)
        snapshot = args.memory_snapshot
        at_end = [profiling.record_memory(snapshot, ctx)] if snapshot else []
        return cls(ctx, folder, results, target, memory, at_end)

    def announce_model(self, args, spec: ModelSpec) -> None:
        """Print what is trained, before the data is read."""
        verb = "Evaluating" if args.eval_only else "Fine-tuning"
        verb = "Simulating the memory of" if self.ctx.simulated else verb
        base = spec.parameters - (spec.trainable if spec.lora else 0)
        print0 = self.ctx.console.print0
        print0(f"🚀 {verb} {args.model} ({human_count(base)} parameters)")
        print0(f"📋 Strategy: {args.strategy.upper()}")
        if spec.own_settings:
            same = "the same function in one kernel (--no_fused_gelu keeps it)"
            print0(f"🔧 gelu_new is computed as gelu_pytorch_tanh, {same}")
        if not spec.chunked_loss:
            print0(
                "🔧 All logits of a batch are computed at once: this model changes them, or has "
                "adapters on its output layer"
            )

    def model_loaded(self, args, spec: ModelSpec, dataset: dict, train_data) -> None:
        """Print and record the sizes of the model and of the data.

        Args:
            dataset: the dataset's entry in results.json.
        """
        self.memory.note("model_loaded")
        if args.generate:  # fails on an unusable prompt before the training
            self._prompt(args, spec, dataset)
        print0 = self.ctx.console.print0
        print0(f"✅ Model loaded: {spec.parameters:,} parameters ({spec.parameters / 1e6:.1f}M)")
        if spec.lora:
            trained = f"{spec.trainable:,} of {spec.parameters:,} parameters are trained"
            print0(f"🔧 LoRA: {trained} ({spec.trainable / spec.parameters:.2%})")
            if spec.random and not (args.merge_lora or args.no_export):
                self.ctx.console.warn(
                    "The frozen weights are random, and the adapters cannot be used without them: "
                    "--merge_lora exports both."
                )
        count = "a stream" if args.streaming else f"{train_data.num_sequences:,} samples"
        print0(f"✅ Dataset ready: {count}")
        self.results.update(
            parameters=spec.parameters,
            trainable_parameters=spec.trainable,
            seq_length=args.seq_length,
            dataset=dataset,
        )

    def was_complete_before(self, args, state: TrainState) -> bool:
        """Whether a resumed run has no step left to train."""
        steps = total_steps(args, self.ctx.world_size, state.num_sequences)
        nothing_left = self.results.nothing_left_to_do(steps, args)
        return nothing_left or (self.results.was_complete and state.finished)

    def start_training(
        self, args, objects: TrainingObjects, manager: CheckpointManager, state: TrainState
    ) -> MetricsLogger:
        """Check the disks, then replace the files of an earlier run, and start the metrics."""
        ctx, spec = self.ctx, manager.spec
        saves = saves_due(args, state.counters(), state.total_steps, state.num_sequences)
        export.check_room(args, ctx, self.target, self.folder, spec, saves)
        step_memory = step_memory_of(args, ctx, objects, spec, self.memory)
        metrics = MetricsLogger(args, ctx, self.folder, state, self.memory, step_memory)
        metrics.at_end += self.at_end
        manager.before_save.append(metrics.flush)  # losses and times that are still on the device
        manager.after_save.append(metrics.restart_clock)  # a save is not part of the next step
        # All checks have passed: only now may files of an earlier run be changed.
        manager.take_over(state.best)
        self.results.update(run_signature=manager.identity)
        self.results.begin()
        metrics.start_file()
        ctx.hang.state = state
        # Adam's states exist from the first update on, so the second step may need the most memory.
        if values := restart_values(args, self.folder):
            useful = partial(self._smaller_batch_may_help, args, manager, state)
            ctx.failures.restart = Restart(ctx.launch, values, useful, ctx.stop)
            # A rank may run out of memory while another still starts a tracker or removes files.
            dist.barrier()
        training = f"Training: steps {state.step + 1} to {state.total_steps}"
        ctx.console.print0(f"⏳ {'Evaluating' if args.eval_only else training}")
        return metrics

    def _smaller_batch_may_help(self, args, manager: CheckpointManager, state: TrainState) -> bool:
        """Whether a new start with smaller micro-batches may help after memory ran out."""
        own_batch = args.eval_batch_size and self.memory.doing == "evaluation"
        return state.step < state.first_step + 2 and not manager.seconds and not own_batch

    def preempted(self, metrics: MetricsLogger) -> None:
        """Record that a stop signal ended the run after a checkpoint was saved."""
        state = metrics.state
        self.results.preempted(state.counters())
        self.ctx.console.print0(
            f"⏸️  Stopped by a signal after step {state.step} of {state.total_steps}: "
            "resume with --resume"
        )
        metrics.close()

    def finish(
        self, args, manager: CheckpointManager, metrics: MetricsLogger, eval_loss, casting
    ) -> None:
        """Summarize the run, export the model, and print a sample of its text.

        Raises:
            TrainingError: the export failed; the message says where the trained weights are.
        """
        self.memory.note("trained")
        self.ctx.hang.state = self.ctx.failures.restart = None
        state, results = metrics.state, self.results
        if manager.objects.stream is not None:
            results.update(dataset=manager.objects.stream.summary())
        if args.load_best_at_end and state.best:
            manager.load_best(state.best["step"], state.step)
        elif args.load_best_at_end:
            self.ctx.console.warn(
                "--load_best_at_end: no evaluation gave a finite loss, so these are the last "
                "weights."
            )
        results.update(checkpoint_seconds=manager.seconds)
        results.update(**summarize(self.ctx, metrics, self.memory, eval_loss, args, manager.spec))
        console_lines.say_results(self.ctx, results.facts, args)
        self._export(args, manager, state, casting)
        metrics.close(results.facts.get("sample"))
        self.ctx.console.print0(f"📁 {console_lines.place_of(results.path, self.ctx)}")

    def finish_completed_run(
        self, args, manager: CheckpointManager, state: TrainState, casting
    ) -> None:
        """Finish a resumed run that was already complete: export and generate what is missing."""
        results = self.results
        self.ctx.console.print0("✅ The run was already complete.")
        results.update(**(results.before or {}))
        if args.load_best_at_end and results.facts.get("best_step"):
            manager.load_best(results.facts["best_step"], state.step)
        elif state.step < results.facts["steps"]:
            self.ctx.console.warn(
                "The last weights are in no checkpoint: nothing is exported, generated or pushed."
            )
            return
        self._export(args, manager, None, casting)

    def _export(self, args, manager: CheckpointManager, state: TrainState | None, casting) -> None:
        """Export and generate if requested and missing; `state` is None if nothing was trained."""
        folder = export.finish(manager, self.results, self.target, args, state)
        if args.generate:
            prompt = self._prompt(args, manager.spec, self.results.facts.get("dataset") or {})
            sample = generate(manager.model, casting, manager.spec, prompt, args.seed, self.ctx)
            self.results.update(sample=sample)
        if folder and args.push_to_hub:
            self.results.update(push=push.push(self.target.repository, folder, self.ctx))
        self.ctx.stop.ignore()  # the run is complete
        self.results.complete()

    def _prompt(self, args, spec: ModelSpec, dataset: dict) -> Prompt:
        """Return the prompt of --generate: in the chat template if conversations were trained.

        Base models have a chat template, too, so an evaluation only is the other case that uses it.
        """
        kind = dataset.get("kind")  # None before a stream's first row
        as_chat = kind == "chat" or (args.eval_only and kind != "pair")
        return prompt_of(args.generate, spec.tokenizer, as_chat)
