#!/usr/bin/env python3
"""Compare the losses of this project with those of unmodified transformers, step by step.

    python -m benchmarks.loss_curve --out runs/loss_curve

GPT-2 124M is trained from the same random weights on the same sequences: in fp32 and in bf16 with
the chunked loss, the fused GELU and PyTorch's attention, and in fp32 with transformers' own GELU
and eager attention, and torch's cross entropy of all logits. The result is a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
from pathlib import Path

from benchmarks.bench import PROJECT, SCRIPT

SHOWN = 10  # steps between two rows of the table


def run_plain() -> None:
    """Run the script, given by sys.argv, without this project's changes of a transformers model."""
    from transformers import AutoConfig

    from support.model.loss import OutputLayer

    read_config = AutoConfig.from_pretrained

    def with_eager_attention(*args, **options):
        return read_config(*args, attn_implementation="eager", **options)

    AutoConfig.from_pretrained = with_eager_attention
    OutputLayer.replace_head = lambda model: None
    runpy.run_path(sys.argv[0], run_name="__main__")


def losses(command: list[str], flags: list[str], folder: Path) -> list[float]:
    """Train, and return the loss of each step."""
    flags = [*flags, "--output_dir", str(folder), "--overwrite"]
    subprocess.run([*command, str(SCRIPT), *flags], check=True, cwd=PROJECT)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def main() -> None:
    """Train three times and print the table."""
    parser = argparse.ArgumentParser(description="Losses next to those of plain transformers.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch_size", default="1")
    parser.add_argument("--seq_length", default="128")
    parser.add_argument("--max_steps", default="100")
    args = parser.parse_args()
    flags = "--model gpt2 --from_scratch --dataset pydocs --dropout 0 --lr 5e-5"
    flags += " --warmup_steps 10 --no_eval --no_export --logging_steps 1"
    work = [*flags.split(), "--batch_size", args.batch_size, "--seq_length", args.seq_length]
    work += ["--max_steps", args.max_steps]
    program = "import sys; from benchmarks import loss_curve; del sys.argv[0]"
    plain = [sys.executable, "-c", f"{program}; loss_curve.run_plain()"]
    fp32 = losses([sys.executable], [*work, "--precision", "fp32"], args.out / "fp32")
    bf16 = losses([sys.executable], [*work, "--precision", "bf16"], args.out / "bf16")
    slow = losses(plain, [*work, "--precision", "fp32", "--no_fused_gelu"], args.out / "plain")
    print("| step | plain transformers, fp32 | ours, fp32 | difference | ours, bf16 | difference |")
    print("|---|---|---|---|---|---|")
    for step, (theirs, *ours) in enumerate(zip(slow, fp32, bf16, strict=True), 1):
        if step == 1 or step % SHOWN == 0:
            cells = [f"{loss:.6f} | {abs(loss / theirs - 1):.1e}" for loss in ours]
            print(f"| {step} | {theirs:.6f} | {' | '.join(cells)} |")
    for name, curve in (("fp32", fp32), ("bf16", bf16)):
        largest = max(abs(a / b - 1) for a, b in zip(curve, slow, strict=True))
        print(f"\nLargest relative difference in {name}: {largest:.1e}")


if __name__ == "__main__":
    main()
