#!/usr/bin/env python3
"""Make one step with transformers.Trainer, with which --prove compares the steps of this project.

    python scripts/trainer_step.py --config run.yaml

The flags are those of real_model_example.py, and so are the files that are written: a checkpoint
and metrics.jsonl. The model computes its loss and its activation as transformers does.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import startup

if __name__ == "__main__":
    ARGS, LAUNCH = startup.start(sys.argv[1:])

import gc
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments

from support.checkpoints.convert import write_checkpoint
from support.checkpoints.format import step_folder
from support.cli.arguments import Arguments
from support.cluster.context import DistContext
from support.console import Console
from support.data import batches
from support.model import resolve as models
from support.units import IGNORED

# Flags that have the same name and meaning in TrainingArguments.
SAME = (
    *("gradient_accumulation_steps", "max_steps", "weight_decay", "adam_beta1", "adam_beta2"),
    *("adam_epsilon", "max_grad_norm", "gradient_checkpointing", "seed"),
)


def main(args: Arguments, launch) -> None:
    """Load model and data as real_model_example.py does, and make the step."""
    gc.enable()  # which startup.start has disabled for the imports
    with DistContext.alone(launch, Console(True, args.quiet)) as ctx:
        spec = models.find_model(args, ctx)
        spec.chunked_loss = False
        args = args.replace(seq_length=spec.seq_length(args))
        train, _, _ = batches.open_tokenized(args, ctx, spec.tokenizer)
        make_step(args, spec.load(ctx), train)


def make_step(args: Arguments, model: nn.Module, train) -> None:
    """Make a step on the sequences `train`, and write it to --output_dir."""

    def as_batch(indices: list[int]) -> dict[str, torch.Tensor]:
        inputs, labels, positions = train.read(np.array(indices))
        labels[:, 0] = IGNORED  # see note_on
        batch = {"input_ids": inputs, "labels": labels, "position_ids": positions}
        return {name: tensor for name, tensor in batch.items() if tensor is not None}

    assert args.output_dir  # --prove gives it
    folder, on_gpu = Path(args.output_dir), torch.cuda.is_available()
    settings = TrainingArguments(
        str(folder / "trainer"),
        **{name: getattr(args, name) for name in SAME},
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.lr,
        lr_scheduler_type=args.lr_scheduler,
        optim="adamw_torch_fused",
        bf16=False,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data: Any = range(train.num_sequences)
    trainer = Trainer(model, settings, as_batch, data)
    loss = trainer.train().training_loss
    norm = next(log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log)
    note = note_on(trainer, train.read(np.arange(train.num_sequences))[1])
    checkpoint = step_folder(folder / "checkpoints", 1)
    checkpoint.mkdir(parents=True)
    write_checkpoint(state_of(model, trainer.optimizer), checkpoint)
    record = {"step": 1, "loss": loss, "grad_norm": norm, "note": note}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")


def state_of(model: nn.Module, optimizer) -> SimpleNamespace:
    """Return the trained parameters and Adam's moments, in the form that write_checkpoint reads."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    states = {name: optimizer.state[p] for name, p in trained.items() if p in optimizer.state}
    return SimpleNamespace(weights=trained, states=states, adam_step=1, step=1, settings={})


def note_on(trainer: Trainer, labels: torch.Tensor) -> str:
    """Return how Trainer computes the mean loss of this model differently, or ""."""
    if not trainer.model_accepts_loss_kwargs:
        return (
            "Trainer averages the means of the micro-batches, because this model's forward does "
            "not take num_items_in_batch."
        )
    # The first token of a sequence has no loss, and transformers 5.23 leaves its label out of the
    # count for models whose class is named ...ForCausalLM, but not for GPT2LMHeadModel.
    valid = (labels[:, 1:] != IGNORED).sum().item()
    factor = valid / (labels != IGNORED).sum().item()
    if factor < 1 and not getattr(trainer, "_loss_shifts_labels", False):
        return (
            "The labels of first tokens, which have no loss, are -100 for Trainer. Otherwise "
            f"Trainer (transformers {transformers.__version__}) counts them for this model, and "
            f"its loss is {factor:.4f} times this one."
        )
    return ""


if __name__ == "__main__":
    main(ARGS, LAUNCH)
