#!/usr/bin/env python3
"""Train GPT-2 124M for an epoch with this project and with transformers.Trainer, and plot both.

    python -m benchmarks.real_model --model FOLDER --dataset TRAIN --validation_file VALID --out DIR

FOLDER has GPT-2's configuration and tokenizer. Both programs begin with the same random weights and
read the same sequences in the same order, with AdamW, bf16 autocast, no dropout, clipping to 1 and
a constant learning rate. Trainer has its own loss, GELU and loop. A program whose folder in DIR
has a metrics.jsonl is not run again. With --write the figure goes to docs/real_model.png.

Trainer counts the first token of each sequence, which has no loss, so its losses are multiplied by
256 / 255. Clipping and AdamW cancel this factor in the update.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from math import exp
from pathlib import Path
from statistics import mean, median

from benchmarks.bench import PROJECT, SCRIPT

FIGURE = PROJECT / "docs" / "real_model.png"
WORK = "--strategy dp --from_scratch --seq_length 256 --batch_size 4 --epochs 1 --precision bf16"
WORK += " --dropout 0 --lr 3e-4 --lr_scheduler constant --eval_samples 100 --logging_steps 1"
WORK += " --no_export"
SMOOTHED = 10  # steps of which the figure shows the mean


def train_with_trainer(flags: list[str]) -> None:
    """Train as the flags of real_model_example.py say, and write metrics.jsonl as it does."""
    from support import startup

    args, launch = startup.start(flags)
    startup.end_of_imports()

    import numpy as np
    import torch
    from transformers import Trainer, TrainingArguments

    from support.cluster.context import DistContext
    from support.console import Console
    from support.data import batches
    from support.model import resolve as models

    ctx = DistContext.create(launch, torch.device("cpu"), "fake", Console(True, True))
    spec = models.find_model(args, ctx)
    spec.chunked_loss = False
    train, validation, _ = batches.open_tokenized(args, ctx, spec.tokenizer)

    class Dataset(torch.utils.data.Dataset):
        def __init__(self, sequences, order):
            self.sequences, self.order = sequences, order

        def __len__(self):
            return len(self.order)

        def __getitem__(self, place):
            [inputs] = self.sequences.read(np.array([self.order[place]]))[0]
            return {"input_ids": inputs, "labels": inputs}

    order = batches.epoch_order(train.num_sequences, args.seed, epoch=1)
    folder = Path(args.output_dir)
    settings = TrainingArguments(
        str(folder),
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        num_train_epochs=1,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
        optim="adamw_torch_fused",
        bf16=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
        prediction_loss_only=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(spec.load(ctx), settings, train_dataset=Dataset(train, order))
    trainer.train()
    results = trainer.evaluate(Dataset(validation, range(args.eval_samples)))
    counted = args.seq_length / (args.seq_length - 1)  # see the docstring of this file
    logged = [log for log in trainer.state.log_history if "loss" in log]
    lines = [{"step": log["step"], "loss": log["loss"] * counted} for log in logged]
    evaluation = results["eval_loss"] * counted
    lines.append({"step": trainer.state.global_step, "eval_loss": evaluation})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ctx.temporary.clean_up()


def losses(folder: Path) -> tuple[list[float], float]:
    """Return the losses of the steps, and that of the evaluation."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    [evaluation] = [line["eval_loss"] for line in lines if "eval_loss" in line]
    return [line["loss"] for line in lines if "loss" in line], evaluation


def draw(ours: list[float], theirs: list[float]) -> None:
    """Plot both curves, and their difference."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    curves, differences = figure.subplots(1, 2)
    for name, values, style in (
        ("this project", ours, "-"),
        ("transformers.Trainer", theirs, "--"),
    ):
        smooth = [mean(values[max(0, n - SMOOTHED) : n]) for n in range(1, len(values) + 1)]
        curves.plot(range(1, len(values) + 1), smooth, style, label=name)
    curves.set(xlabel="step", ylabel=f"training loss, mean of {SMOOTHED} steps")
    curves.legend()
    apart = [abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]
    differences.semilogy(range(1, len(apart) + 1), apart)
    differences.set(xlabel="step", ylabel="relative difference of the losses")
    figure.savefig(FIGURE, dpi=110)


def main() -> None:
    """Train twice, and print the results."""
    parser = argparse.ArgumentParser(description="A real model next to transformers.Trainer.")
    for name in ("--model", "--dataset", "--validation_file", "--out"):
        parser.add_argument(name, required=True, type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {FIGURE.name} to docs/")
    args = parser.parse_args()
    files = ["--model", args.model, "--dataset", args.dataset]
    files += ["--validation_file", args.validation_file]
    flags = [*WORK.split(), *map(str, files), "--output_dir"]
    program = (
        "import sys; from benchmarks import real_model as m; m.train_with_trainer(sys.argv[1:])"
    )
    ways = {
        "this project": [sys.executable, str(SCRIPT), *flags, str(args.out / "ours")],
        "transformers.Trainer": [
            *(sys.executable, "-c", program, *flags, str(args.out / "trainer"), "--no_fused_gelu")
        ],
    }
    found = {}
    for (name, command), folder in zip(ways.items(), ("ours", "trainer"), strict=True):
        if not (args.out / folder / "metrics.jsonl").exists():
            start = time.perf_counter()
            subprocess.run(command, check=True, cwd=PROJECT)
            print(f"{name}: {(time.perf_counter() - start) / 60:.1f} minutes", flush=True)
        found[name], evaluation = losses(args.out / folder)
        print(
            f"{name}: {len(found[name])} steps, loss {found[name][0]:.4f} to "
            f"{mean(found[name][-SMOOTHED:]):.4f} (mean of {SMOOTHED} steps), validation loss "
            f"{evaluation:.4f}, perplexity {exp(evaluation):.1f}",
            flush=True,
        )
    ours, theirs = found.values()
    apart = [abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]
    print(f"Relative differences of a step: at most {max(apart):.1e}, median {median(apart):.1e}")
    if args.write:
        draw(ours, theirs)


if __name__ == "__main__":
    main()
