#!/usr/bin/env python3
"""Train GPT-2 under FSDP2 and save with torch.distributed.checkpoint, for saves.py to measure.

    torchrun --nproc_per_node=2 tools/benchmarks/dcp_driver.py --config config.json --folder out …

It needs torch 2.9 or later. The program is the shortest that torch's tutorial suggests: AdamW,
random tokens, `async_save` into a staging memory that is kept, with a group of its own for the
collectives of its thread. The next save waits for the one before. It prints a line of JSON: the
seconds that training waited for each save, those of each step, and the peaks of resident memory.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

from distributed_training.memory.system import host_bytes


def main() -> None:
    """Train, and save every --save_every steps."""
    args = read_arguments()
    dist.init_process_group("gloo")
    saving_group = dist.new_group(backend="gloo")
    model, optimizer = build(args)
    writer = dcp.FileSystemWriter(args.folder)
    pinned = torch.cuda.is_available()
    stager = DefaultStager(StagingOptions(pinned, False, False, pinned))  # keeps its memory
    pending, pauses, steps = None, [], []
    for step in range(1, args.max_steps + 1):
        started = time.monotonic()
        tokens = torch.randint(model.config.vocab_size, (args.batch_size, args.seq_length))
        model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()  # as the sum of the losses
        steps.append(time.monotonic() - started)
        if step % args.save_every == 0:
            started = time.monotonic()
            if pending is not None:
                pending.result()
            weights, states = get_state_dict(model, optimizer)
            pending = dcp.async_save(
                {"model": weights, "optimizer": states},
                storage_writer=writer,
                checkpoint_id=f"{args.folder}/step-{step}",
                process_group=saving_group,
                async_stager=stager,
            )
            pauses.append(time.monotonic() - started)
    started = time.monotonic()
    if pending is not None:
        pending.result()
    last_wait = time.monotonic() - started
    peaks = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, host_bytes()[1])
    if dist.get_rank() == 0:
        found = {"pauses": pauses, "steps": steps, "last_wait": last_wait, "peaks": peaks}
        print(json.dumps(found))
    dist.destroy_process_group()


def build(args: argparse.Namespace) -> tuple[GPT2LMHeadModel, torch.optim.Optimizer]:
    """Return the model with random weights, sharded by block, and its optimizer."""
    torch.manual_seed(0)
    config = GPT2Config.from_json_file(args.config)
    config.use_cache = False
    model = GPT2LMHeadModel(config)
    bf16 = MixedPrecisionPolicy(torch.bfloat16) if args.precision == "bf16" else None
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = {"mp_policy": bf16} if bf16 else {}
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)
    return model, torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Save with torch.distributed.checkpoint.")
    for name in ("seq_length", "batch_size", "max_steps", "save_every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
