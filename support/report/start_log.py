"""What a run reports before its training: lines about model and data, facts, memory by phase."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from support import console
from support.cluster.context import DistContext
from support.data.opening import Datasets
from support.memory.measure import MemoryByPhase
from support.model.spec import ModelSpec
from support.report.run_folder import RunFolder
from support.settings.training import TrainingSettings
from support.units import human_count


@dataclass(frozen=True)
class StartLog:
    """Reports how a run gets ready: on the console, in results.json, and the memory it needs."""

    ctx: DistContext
    folder: RunFolder
    memory: MemoryByPhase  # after each phase of the run
    at_end: Sequence[Callable[[], object]]  # write the files of other tools at the end of the run

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
