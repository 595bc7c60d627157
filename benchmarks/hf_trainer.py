#!/usr/bin/env python3
"""Measure the throughput of transformers.Trainer on GPT-2 with random weights and random tokens.

    python benchmarks/hf_trainer.py result.json --batch_size 32 --compile

The settings are those of real_model_example.py in benchmarks/gpu_check.py: bf16 autocast, fused
AdamW, gradient clipping to 1, no dropout, no evaluation and no checkpoints. The result is a JSON
object with "tokens_per_second" and "step_seconds", both of the steps after --warmup_steps, and
"peak_bytes", of the whole run (null without a GPU).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Clock(TrainerCallback):
    """A callback that records the time at the end of two steps, when the GPU has finished them.

    Args:
        first, last: numbers of the two steps, from 1.
    Attributes:
        times: step -> time.perf_counter() in seconds, None until then.
    """

    def __init__(self, first: int, last: int):
        self.times = dict.fromkeys((first, last))

    def on_step_end(self, args, state, control, **kwargs):
        """Record the time; the trainer calls it after each optimizer step."""
        if state.global_step in self.times:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times[state.global_step] = time.perf_counter()


def main() -> None:
    """Train and write the result."""
    parser = argparse.ArgumentParser(description="Throughput of transformers.Trainer on GPT-2.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--seq_length", type=int, default=1024)
    parser.add_argument("--max_steps", type=int, default=40)
    parser.add_argument("--warmup_steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_layer=args.layers, use_cache=False, **no_dropout)
    sequences = torch.randint(
        config.vocab_size, (args.max_steps * args.batch_size, args.seq_length)
    )
    clock = Clock(args.warmup_steps, args.max_steps)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=args.batch_size,
            max_steps=args.max_steps,
            bf16=True,
            optim="adamw_torch_fused",  # the default of transformers only with torch 2.8 or later
            report_to=[],
            save_strategy="no",
            logging_steps=10,
            max_grad_norm=1.0,
            weight_decay=0.01,
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            torch_compile=args.compile,
        )
        dataset = [{"input_ids": sequence, "labels": sequence} for sequence in sequences]
        Trainer(GPT2LMHeadModel(config), settings, train_dataset=dataset, callbacks=[clock]).train()
    steps = args.max_steps - args.warmup_steps
    seconds = clock.times[args.max_steps] - clock.times[args.warmup_steps]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    speed = steps * args.batch_size * args.seq_length / seconds
    result = {"tokens_per_second": speed, "peak_bytes": peak, "step_seconds": seconds / steps}
    args.file.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
