#!/usr/bin/env python3
"""Train GPT-2 with transformers.Trainer or with accelerate, for peers.py to measure.

    python tools/benchmarks/drivers.py trainer --config config.json --data sequences.npy
    torchrun --nproc_per_node=2 tools/benchmarks/drivers.py accelerate --fsdp --config … --data …

The programs are the shortest that their documentation suggests, with the settings of
real_model_example.py: AdamW (fused, no decay of biases and norms), clipping, linear schedule. They
print "step N loss X" after each --logging_steps steps, and at the end "peak_bytes N": of the GPU's
allocator, or without a GPU of the resident memory of all ranks.
"""

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)


class Sequences(Dataset):
    """The first `count` sequences of an .npy file: token ids, int64 [number, length]."""

    def __init__(self, file: Path, count: int):
        self.sequences = np.load(file, mmap_mode="r")[:count]

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        sequence = torch.from_numpy(self.sequences[index].copy())
        return {"input_ids": sequence, "labels": sequence}


class PrintSteps(TrainerCallback):
    """A callback that prints the step where the Trainer has read its loss."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Print the step; the last call, with the summary of the run, has no "loss"."""
        if state.is_world_process_zero and "loss" in (logs or {}):
            print(f"step {state.global_step} loss {logs['loss']}", flush=True)


def train_with_trainer(args: argparse.Namespace, model: GPT2LMHeadModel, data: Sequences) -> None:
    """Train with transformers.Trainer; on several ranks it wraps the model with DDP."""
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=args.batch_size,
            max_steps=args.max_steps,
            learning_rate=args.lr,
            weight_decay=args.weight_decay,
            max_grad_norm=args.max_grad_norm,
            bf16=args.precision == "bf16",
            optim="adamw_torch_fused",  # the default of transformers only with torch 2.8 or later
            torch_compile=args.compile,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            logging_steps=args.logging_steps,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(model, settings, train_dataset=data, callbacks=[PrintSteps()]).train()


def train_with_accelerate(args: argparse.Namespace, model: GPT2LMHeadModel, data: Sequences):
    """Train with a plain loop and accelerate; several ranks use DDP, or FSDP2 with --fsdp."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = None
    if args.fsdp:
        allow_fsdp_on_cpu()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["GPT2Block"],
        )
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if args.precision == "bf16" else "no",
        dynamo_backend="inductor" if args.compile else "no",
        fsdp_plugin=plugin,
    )
    pin = torch.cuda.is_available()
    loader = DataLoader(data, args.batch_size, shuffle=True, drop_last=True, pin_memory=pin)
    decay = {p: args.weight_decay if p.ndim > 1 else 0.0 for p in model.parameters()}
    groups = [
        {"params": [p for p in decay if decay[p] == value], "weight_decay": value}
        for value in dict.fromkeys(decay.values())
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=True)
    steps = args.max_steps * accelerator.num_processes  # accelerate steps it once per rank
    schedule = get_linear_schedule_with_warmup(optimizer, 0, steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    for step, batch in enumerate(loader, 1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % args.logging_steps == 0:
            mean = accelerator.reduce(loss.detach(), "mean").item()
            accelerator.print(f"step {step} loss {mean}", flush=True)
        if step == args.max_steps:
            break


def allow_fsdp_on_cpu() -> None:
    """Make accelerate, which has FSDP for accelerators only, shard over CPU processes too."""
    from accelerate.state import DistributedType, PartialState

    if not torch.cuda.is_available():
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def peak_bytes() -> int:
    """Return the peak memory of the GPU's allocator, or the resident memory of all ranks."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    [peak] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    total = torch.tensor(1024 * int(peak))
    if dist.is_initialized():
        dist.all_reduce(total)
    return int(total)


PEERS = {"trainer": train_with_trainer, "accelerate": train_with_accelerate}


def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(description="Train GPT-2 with a library, for a benchmark.")
    add = parser.add_argument
    add("peer", choices=PEERS)
    add("--config", required=True, help="configuration of the model, for random weights")
    add("--data", type=Path, required=True, help=".npy file of token ids [sequences, length]")
    for name in ("batch_size", "max_steps", "logging_steps"):
        add(f"--{name}", type=int, required=True)
    for name in ("lr", "weight_decay", "max_grad_norm"):
        add(f"--{name}", type=float, required=True)
    add("--precision", choices=["fp32", "bf16"], required=True)
    add("--compile", action="store_true")
    add("--fsdp", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config.from_json_file(args.config))
    count = args.max_steps * args.batch_size * int(os.environ.get("WORLD_SIZE", "1"))
    PEERS[args.peer](args, model, Sequences(args.data, count))
    if (peak := peak_bytes()) and os.environ.get("RANK", "0") == "0":
        print(f"peak_bytes {peak}", flush=True)
    # Nothing is measured after the last step, and the destruction of gloo's process group has hung.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
