#!/usr/bin/env python3
"""Make one step with transformers.Trainer, with which --prove compares the steps of this project.

    python tools/prove/trainer_step.py --config run.yaml

The flags are those of real_model_example.py, and so are the files that are written: a checkpoint
and metrics.jsonl. The model computes its loss and its activation as transformers does.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from distributed_training import entry
from distributed_training.hooks import Hooks

if __name__ == "__main__":
    SETTINGS, LAUNCH = entry.prepare_process(sys.argv[1:], Hooks())

import gc
import json
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from distributed_training.checkpoints.convert import write_checkpoint
from distributed_training.checkpoints.format import step_folder
from distributed_training.data.opening import open_tokenized
from distributed_training.data.sequences import Padding, Sequences
from distributed_training.loss_chunks import IGNORED
from distributed_training.model.experts import BALANCING
from distributed_training.model.spec import ModelSpec
from distributed_training.ranks.launch import Launch
from distributed_training.ranks.process_group import single_process
from distributed_training.settings.settings import Settings
from distributed_training.settings.training import TrainingSettings

# Flags of training that have the same name and meaning in TrainingArguments.
SAME = """
    gradient_accumulation_steps max_steps weight_decay adam_beta1 adam_beta2 adam_epsilon
    max_grad_norm seed
    """.split()


def main(settings: Settings, launch: Launch) -> None:
    """Load model and data as real_model_example.py does, and make the step."""
    gc.enable()  # which prepare_process has disabled for the imports
    data, training, chosen = settings.data, settings.training, settings.model
    assert settings.output.output_dir  # --prove gives it
    with single_process(launch) as ctx:
        spec = ModelSpec.find(settings, ctx)
        spec.chunked_loss = False
        padding = Padding.of(spec.seq_length, False, ctx.device.type, bool(chosen.compiler_flag))
        train = open_tokenized(data, training, ctx, spec.tokenizer, padding).train
        assert isinstance(train, Sequences)  # --prove excludes --streaming
        folder = Path(settings.output.output_dir)
        make_step(spec.load(ctx), train, training, chosen.gradient_checkpointing, folder)


def make_step(
    model: nn.Module,
    train: Sequences,
    training: TrainingSettings,
    gradient_checkpointing: bool,
    folder: Path,
) -> None:
    """Make a step on the sequences `train`, and write it to the folder of a run."""

    def as_batch(indices: list[int]) -> dict[str, torch.Tensor]:
        inputs, labels, positions = train.read(np.array(indices))
        # The first token of a sequence has no loss, and transformers 5.23 leaves its label out of
        # the count for models whose class is named ...ForCausalLM, but not for GPT2LMHeadModel.
        labels[:, 0] = IGNORED
        batch = {"input_ids": inputs, "labels": labels, "position_ids": positions}
        return {name: tensor for name, tensor in batch.items() if tensor is not None}

    arguments = TrainingArguments(
        str(folder / "trainer"),
        **{name: getattr(training, name) for name in SAME},
        gradient_checkpointing=gradient_checkpointing,
        per_device_train_batch_size=training.batch_size,
        learning_rate=training.lr,
        lr_scheduler_type="constant",  # every schedule begins with --lr
        optim="adamw_torch_fused",
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    indices = range(train.num_sequences)
    trainer = Trainer(model, arguments, as_batch, train_dataset=indices)
    loss = trainer.train().training_loss
    norm = next(log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log)
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    states = {name: trainer.optimizer.state[p] for name, p in weights.items()}
    checkpoint = step_folder(folder / "checkpoints", 1)
    checkpoint.mkdir(parents=True)
    source = SimpleNamespace(weights=weights, states=states, adam_step=1, step=1, settings={})
    write_checkpoint(source, checkpoint)
    record = {"step": 1, "loss": loss, "grad_norm": norm}
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        record["adds"] = BALANCING
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(SETTINGS, LAUNCH)
