"""The end of a run, in the order in which the script calls these functions."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NoReturn

import torch

from support import console, units
from support.checkpoints.manager import CheckpointManager
from support.cluster.context import DTYPES, DistContext
from support.data.chat import prompt_for
from support.errors import Preempted
from support.files.json_types import JsonObject
from support.model import export, push
from support.model.spec import ModelSpec
from support.report import results
from support.report.prompts import Prompts
from support.report.run import Run
from support.report.run_folder import RESULTS, RunFolder
from support.report.run_plan import RunPlan
from support.settings.output import OutputSettings
from support.settings.settings import Settings


def find_target(
    output: OutputSettings, merge_lora: bool, ctx: DistContext, folder: RunFolder
) -> export.Target:
    """Return where the trained model goes: a folder, and with --push_to_hub a new repository.

    Before the training, so that a missing permission does not fail the run after it.
    """
    target = export.target_of(output, merge_lora, folder.path, folder.found)
    if not output.push_to_hub:
        return target
    return target._replace(repository=push.open_repository(output, folder.path, ctx))


def check_prompts(
    texts: tuple[str, ...], spec: ModelSpec, dataset: JsonObject, eval_only: bool
) -> None:
    """Check that the prompts of --generate can be used, before the training.

    Args:
        dataset: its entry in results.json.
    Raises:
        UserError: one cannot be rendered, or has no token.
    """
    for text in texts:
        prompt_for(text, spec.tokenizer, dataset, eval_only)


def generate_at_evaluation(run: Run, casting: torch.autocast) -> None:
    """With --generate_every_eval, continue each prompt and log the texts; all ranks call it.

    After a stop signal no further text is generated: the run stops after the next step.
    """
    if not run.prompts.at_evaluations:
        return
    contents, ctx = run.manager.contents, run.manager.ctx
    dataset = run.folder.facts["dataset"]
    if contents.stream is not None:  # its rows show the kind, on each rank its own rows
        dataset = {"kind": ctx.broadcast_from_rank0(contents.stream.state["kind"])}
    model = run.objects.model
    generated = run.prompts.continue_all(model, casting, contents.spec, dataset, ctx, may_stop=True)
    if generated:
        run.log.log_generated(generated)


def stop(run: Run) -> NoReturn:
    """Save a checkpoint and end the run, because a rank received a stop signal.

    Raises:
        Preempted: the checkpoint is complete.
        TrainingError: this run saves no checkpoints, or the checkpoint cannot be written.
    """
    state = run.state
    run.log.flush()
    run.manager.save_before_stop(state)
    run.folder.record(**results.progress(state))
    run.folder.end("preempted", "stopped by a signal; a checkpoint was saved")
    console.print0(
        f"⏸️  Stopped by a signal after step {state.step} of {state.total_steps}: "
        "resume with --resume"
    )
    run.log.close()
    raise Preempted(run.objects.model)


def end_training(ctx: DistContext, run: Run) -> None:
    """Record the memory and the data that the training has used; no step is expected any more."""
    run.meter.memory.note("trained")
    ctx.monitor.training_ends()
    if (stream := run.manager.contents.stream) is not None:
        run.folder.record(dataset=stream.summary())


def load_best(run: Run, load_best_at_end: bool) -> None:
    """If requested, load the weights of the best evaluation."""
    if load_best_at_end and run.state.best:
        run.manager.load_best(run.state.best["step"], run.state.step)
    elif load_best_at_end:
        console.warn("--load_best_at_end: no evaluation gave a finite loss: last weights.")


def summarize(
    run: Run, ctx: DistContext, plan: RunPlan, eval_loss: float | None, profile_memory: bool
) -> None:
    """Record and print the results of the training.

    Args:
        plan: the memory estimate, which is recorded next to the measured memory.
        eval_loss: of the last evaluation; None if there was none.
        profile_memory: also print the memory of each phase, and by kind of state.
    """
    run.log.flush()
    state, spec = run.state, run.manager.spec
    best = state.best or {}
    run.folder.record(
        checkpoint_seconds=run.manager.seconds,
        **results.progress(state),
        eval_loss=eval_loss,
        perplexity=None if eval_loss is None else units.perplexity_of(eval_loss),
        bits_per_byte=None if eval_loss is None else run.log.bits_per_byte(eval_loss),
        best_eval_loss=best.get("loss"),
        best_step=best.get("step"),
        stopped_early=state.patience if state.stopped_early else None,
        **results.measured(ctx, spec, run.meter, run.log.work, plan),
    )
    say_results(ctx, run.folder.facts, profile_memory)


def restore(
    folder: RunFolder, manager: CheckpointManager, step: int, load_best_at_end: bool
) -> export.TrainedModel:
    """Take over the results of a run that was already complete; return its last or best weights."""
    console.print0("✅ The run was already complete.")
    folder.record(**(folder.earlier or {}))
    if load_best_at_end and folder.facts.get("best_step"):
        manager.load_best(folder.facts["best_step"], step)
    return manager.trained_model(None)


def publish(
    settings: Settings,
    folder: RunFolder,
    target: export.Target,
    trained: export.TrainedModel,
    casting: torch.autocast,
) -> None:
    """Export the model, continue the prompts, push: what the flags request and is missing.

    Raises:
        TrainingError: one of them failed; the message says where the trained weights are.
    """
    exported = None
    if not (settings.output.no_export or settings.training.eval_only):
        merges = settings.model.merge_lora
        exported = export_if_missing(settings.output, merges, folder, target, trained)
    prompts = Prompts.of(settings.output, settings.training)
    if prompts.texts:
        dataset, model = folder.facts.get("dataset") or {}, trained.objects.model
        generated = prompts.continue_all(model, casting, trained.spec, dataset, trained.ctx)
        folder.record(sample=generated[0]["text"], generated=generated)
    if exported and settings.output.push_to_hub:
        folder.record(push=push.push(target.repository, exported, trained.ctx))


def complete(ctx: DistContext, folder: RunFolder) -> None:
    """Write the status "completed"; from then on a stop signal changes nothing."""
    ctx.stop.ignore()
    folder.end("completed")


def export_if_missing(
    output: OutputSettings,
    merges: bool,
    folder: RunFolder,
    target: export.Target,
    trained: export.TrainedModel,
) -> Path:
    """Export the trained model unless a complete run has exported it; return its folder.

    Args:
        merges: LoRA adapters are merged into the weights (--merge_lora).
    """
    is_exported = folder.was_complete and not output.export_hf and target.folder.exists()
    if trained.ctx.broadcast_from_rank0(is_exported):
        return target.folder
    dtype = DTYPES[output.export_dtype]
    entry = export.export_model(trained, target, folder.facts, merges, dtype)
    folder.record(export=entry)
    return Path(entry["folder"])


def close(ctx: DistContext, run: Run) -> None:
    """Close the logs, and print where the results are and the command that shows them."""
    run.log.close()
    folder = run.folder
    console.print0(f"📁 {folder.path / RESULTS}")
    if not ctx.simulated:
        page = f"python scripts/report.py {shlex.quote(str(folder.path))}"
        console.print0(f"📊 A page with its curves: {page}")


def say_results(ctx: DistContext, facts: dict, profile_memory: bool) -> None:
    """Print the results at the end of a run, from the content of results.json."""
    print0, used, on_gpu = console.print0, facts["memory"], ctx.device.type == "cuda"
    if profile_memory or ctx.simulated:
        from support.report.memory_profile import lines_of

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
