"""The end of a run: its best weights, results, exported model and generated texts."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from distributed_training import console, units
from distributed_training.about import command_of
from distributed_training.checkpoints.manager import CheckpointManager
from distributed_training.files.json_types import JsonObject
from distributed_training.model.spec import ModelSpec
from distributed_training.model.trained_model import TrainedModel
from distributed_training.ranks.context import DTYPES, DistContext
from distributed_training.run import results
from distributed_training.run.memory_plan import MemoryPlan
from distributed_training.run.run import Run
from distributed_training.run.run_folder import RESULTS, RunFolder
from distributed_training.settings.settings import Settings

if TYPE_CHECKING:
    from distributed_training.model.export import Target


@dataclass(frozen=True)
class RunEnd:
    """What the flags ask for at the end of a run. All ranks call the methods."""

    settings: Settings
    ctx: DistContext
    folder: RunFolder
    target: Target | None  # where the trained model goes; None: it is not exported

    @classmethod
    def plan(cls, settings: Settings, ctx: DistContext, folder: RunFolder) -> RunEnd:
        """Find where the trained model goes: a folder, and with --push_to_hub a new repository.

        Before the training, so that a missing permission does not fail the run after it.
        """
        output = settings.output
        if output.no_export or settings.training.eval_only:
            return cls(settings, ctx, folder, None)
        from distributed_training.model.export import target_of  # not with --no_export

        target = target_of(output, settings.model.merge_lora, folder.path, folder.found)
        if output.push_to_hub:
            from distributed_training.model import push  # only with the flag

            target = target._replace(repository=push.open_repository(output, folder.path, ctx))
        return cls(settings, ctx, folder, target)

    def check_prompts(self, spec: ModelSpec, dataset: JsonObject) -> None:
        """Check that the prompts of --generate can be used, before the training.

        Args:
            dataset: its entry in results.json.
        Raises:
            UserError: one cannot be rendered, or has no token.
        """
        if self.settings.output.generate:
            from distributed_training.run.prompts import Prompts  # only with the flag

            Prompts.of(self.settings.output, self.settings.training).check(spec, dataset)

    def finish(
        self, run: Run, plan: MemoryPlan, eval_loss: float | None, casting: torch.autocast
    ) -> None:
        """Finish a run that has trained: results.json, the exported model, generated texts.

        Args:
            plan: the memory plan, which is recorded next to the measured memory.
            eval_loss: of the last evaluation; None if there was none.
            casting: the context manager that training uses for the forward pass.
        Raises:
            TrainingError: the export or the push failed; the message says where the trained weights
                are.
        """
        run.meter.memory.note("trained")
        self.ctx.monitor.training_ends()  # no step is expected any more
        run.manager.finish_saving()
        if (stream := run.datasets.stream) is not None:
            self.folder.record(dataset=stream.summary())
        if self.settings.training.load_best_at_end:
            load_best(run)
        self._summarize(run, plan, eval_loss)
        self._publish(run.manager.trained_model(run.state), casting)
        self._complete()
        run.log.close()
        console.print0(f"📁 {self.folder.path / RESULTS}")
        if not self.ctx.simulated:
            page = f"{command_of('scripts/report.py')} {shlex.quote(str(self.folder.path))}"
            console.print0(f"📊 A page with its curves: {page}")

    def repeat(self, manager: CheckpointManager, step: int, casting: torch.autocast) -> None:
        """Finish a run again that was already complete: export what is missing.

        Args:
            step: the last one, whose weights are loaded.
        """
        console.print0("✅ The run was already complete.")
        self.folder.record(**(self.folder.earlier or {}))
        best = self.folder.facts.get("best_step")
        if self.settings.training.load_best_at_end and best:
            manager.load_best(best, step)
        self._publish(manager.trained_model(None), casting)
        self._complete()

    def _summarize(self, run: Run, plan: MemoryPlan, eval_loss: float | None) -> None:
        """Record and print the results of the training."""
        run.log.flush()
        state, spec, optim = run.state, run.manager.spec, self.settings.training.optim
        best = state.best or {}
        self.folder.record(
            checkpoint_seconds=run.manager.seconds,
            saves=run.manager.saves,
            **results.progress(state),
            eval_loss=eval_loss,
            perplexity=None if eval_loss is None else units.perplexity_of(eval_loss),
            bits_per_byte=None if eval_loss is None else run.log.bits_per_byte(eval_loss),
            best_eval_loss=best.get("loss"),
            best_step=best.get("step"),
            stopped_early=state.patience if state.stopped_early else None,
            **results.measured(self.ctx, spec, run.meter, run.log.work, optim, plan),
        )
        say_results(self.ctx, self.folder.facts, self.settings.debug.profile_memory)

    def _publish(self, trained: TrainedModel, casting: torch.autocast) -> None:
        """Export the model, continue the prompts, push: what the flags ask for and is missing."""
        output, training, exported = self.settings.output, self.settings.training, None
        if self.target is not None:
            exported = self._export_if_missing(trained, self.target)
        if output.generate:
            from distributed_training.run.prompts import Prompts  # only with the flag

            prompts = Prompts.of(output, training)
            dataset, model = self.folder.facts.get("dataset") or {}, trained.objects.model
            generated = prompts.continue_all(model, casting, trained.spec, dataset, self.ctx)
            self.folder.record(sample=generated[0]["text"], generated=generated)
        if exported and self.target and output.push_to_hub:
            from distributed_training.model import push  # only with the flag

            self.folder.record(push=push.push(self.target.repository, exported, self.ctx))

    def _export_if_missing(self, trained: TrainedModel, target: Target) -> Path:
        """Export the trained model unless a complete run has exported it; return its folder."""
        from distributed_training.model.export import export_model  # not with --no_export

        output = self.settings.output
        was_complete = self.folder.was_complete
        is_exported = was_complete and not output.export_hf and target.folder.exists()
        if self.ctx.broadcast_from_rank0(is_exported):
            return target.folder
        merges, dtype = self.settings.model.merge_lora, DTYPES[output.export_dtype]
        entry = export_model(trained, target, self.folder.facts, merges, dtype)
        self.folder.record(export=entry)
        return Path(entry["folder"])

    def _complete(self) -> None:
        """Write the status "completed"; from then on a stop signal changes nothing."""
        self.ctx.stop.ignore()
        self.folder.end("completed")


def load_best(run: Run) -> None:
    """Load the weights of the best evaluation; with a notice if no loss was finite."""
    if run.state.best:
        run.manager.load_best(run.state.best["step"], run.state.step)
    else:
        console.warn("--load_best_at_end: no evaluation gave a finite loss: last weights.")


def say_results(ctx: DistContext, facts: dict, profile_memory: bool) -> None:
    """Print the results at the end of a run, from the content of results.json."""
    print0, used, on_gpu = console.print0, facts["memory"], ctx.device.type == "cuda"
    if profile_memory or ctx.simulated:
        from distributed_training.run.memory_profile import lines_of

        print0("\n".join(lines_of(used, on_gpu)))
    if ctx.simulated:
        print0(f"✅ Memory simulation complete: rank 0 of {ctx.world_size}. Nothing was trained.")
        return
    print0(console.RULE)
    print0("✅ Evaluation Complete!" if facts["steps"] == 0 else "✅ Training Complete!")
    names = {"allocated": "resident", "peak": "peak"}
    if on_gpu:
        names = {kind: kind for kind in ("allocated", "reserved", "peak")}
    sizes = [
        f"{max(used[f'{kind}_bytes']) / units.GB:.2f} GB {name}" for kind, name in names.items()
    ]
    print0(f"{'GPU' if on_gpu else 'Process'} Memory: {' | '.join(sizes)}")
    if facts["samples_per_second"]:
        mfu = "N/A" if facts["mfu"] is None else f"{100 * facts['mfu']:.1f}%"
        print0(
            f"Throughput: {facts['samples_per_second']:,.1f} samples/sec | "
            f"{facts['tokens_per_second']:,.0f} tokens/sec | "
            f"{facts['tokens_per_second_per_gpu']:,.0f} tokens/sec/"
            + (f"GPU | MFU {mfu} " if on_gpu else "process ")
            + f"(first {facts['warmup_steps_excluded']} of {facts['steps']} steps left out)"
        )
