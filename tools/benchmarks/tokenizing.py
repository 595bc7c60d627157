#!/usr/bin/env python3
"""Measure --prefetch next to the tokenizers library and transformers, on a text file.

    python -m tools.benchmarks.tokenizing TEXT --model FOLDER --rounds 3

The programs take turns; each is a process of its own and uses all cores:

- ours: real_model_example.py --prefetch with an empty cache.
- tokenizers: `encode_batch_fast`, the fastest call of the library that transformers uses.
- transformers: the tokenizer called with a batch of texts.

The latter two read the whole file, cut it after a line break every 65,536 characters, tokenize 32
pieces in each call, and write the ids to a file. Unlike --prefetch they compute no digests, and do
not check that the cuts leave the ids unchanged. The time of tokenizing begins when the tokenizer is
loaded and ends with the last file; this process notes when the lines that say so arrive. The table
has the median of the rounds (smallest–largest); a ratio is formed within each round. The CPU time
shows whether other processes used the cores: it hardly changes, and the seconds do.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import NamedTuple

import numpy as np

from distributed_training.hardware import cpu_fact
from distributed_training.ranks.tuning import available_cores
from distributed_training.units import GB
from tools.benchmarks.runner import PROJECT, SCRIPT

PROGRAMS = ("ours", "tokenizers", "transformers")
REFERENCE = "tokenizers"  # whose speed is 1
PIECE_CHARACTERS, BATCH_PIECES = 1 << 16, 32
LOADED, DONE = re.compile("Loading dataset|^loaded"), re.compile("Prefetched|^done")


class Measured(NamedTuple):
    """A run of a program."""

    tokenizing: float  # seconds
    whole: float  # seconds of the process
    cpu: float  # seconds of CPU time of the process, on all cores
    memory: float  # its peak of resident memory in GB
    tokens: int


# ------------------------------------------------------------------------------ the other programs


def pieces_of(text: str) -> Iterator[str]:
    """Cut a text after line breaks."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE_CHARACTERS) + 1 or len(text)
        yield text[start:end]
        start = end


def tokenize(program: str, model: str, text: Path, out: Path) -> None:
    """Write the token ids of a text file, uint32, with the call of a program."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    backend = tokenizer.backend_tokenizer
    print("loaded", flush=True)
    pieces = list(pieces_of(text.read_text(encoding="utf-8")))
    with open(out, "wb") as file:
        for first in range(0, len(pieces), BATCH_PIECES):
            batch = pieces[first : first + BATCH_PIECES]
            if program == "tokenizers":
                found = backend.encode_batch_fast(batch, add_special_tokens=False)
                ids = (encoding.ids for encoding in found)
            else:
                ids = iter(tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"])
            for piece in ids:
                file.write(np.array(piece, np.uint32).tobytes())
    print("done", flush=True)


# ------------------------------------------------------------------------------------- measurements


def command_of(program: str, model: str, text: Path, folder: Path) -> list[str]:
    """Return the command of a program, which writes into an empty folder."""
    words = ["-m", "tools.benchmarks.tokenizing", str(text), "--program", program]
    words += ["--out", str(folder / "ids.bin")]
    if program == "ours":
        words = [str(SCRIPT), "--dataset", str(text), "--cache_dir", str(folder), "--prefetch"]
    return [sys.executable, "-u", *words, "--model", model]


def measure(program: str, model: str, text: Path) -> Measured:
    """Run a program in a process of its own.

    Raises:
        RuntimeError: it failed; its output is in the message.
    """
    # Without it, transformers may use one core only.
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "true"}
    loaded = done = 0.0
    with tempfile.TemporaryDirectory() as folder:
        command, output = command_of(program, model, text, Path(folder)), ""
        begin = time.monotonic()
        with subprocess.Popen(
            command, env=env, cwd=PROJECT, stdout=PIPE, stderr=STDOUT, text=True
        ) as process:
            for line in process.stdout or ():
                output += line
                loaded = time.monotonic() if LOADED.search(line) else loaded
                done = time.monotonic() if DONE.search(line) else done
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        whole = time.monotonic() - begin
        if process.returncode or not (loaded and done):
            raise RuntimeError(f"{program} failed:\n{output}")
        tokens = tokens_in(Path(folder))
    cpu = usage.ru_utime + usage.ru_stime
    return Measured(done - loaded, whole, cpu, usage.ru_maxrss * 1024 / GB, tokens)


def tokens_in(folder: Path) -> int:
    """Return the number of tokens that a program has written."""
    for facts in folder.glob("*/meta.json"):
        return json.loads(facts.read_text(encoding="utf-8"))["facts"]["splits"]["train"]["tokens"]
    return (folder / "ids.bin").stat().st_size // np.dtype(np.uint32).itemsize


# -------------------------------------------------------------------------------------------- table


def spread(values: Iterable[float], digits: int) -> str:
    """Return the median and, in parentheses, the smallest and the largest value."""
    known = list(values)
    low, high = min(known), max(known)
    return f"{statistics.median(known):.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def table(rounds: list[dict[str, Measured]]) -> list[str]:
    """Return the lines of a Markdown table; the speed of tokenizing is relative to REFERENCE."""
    heads = ["program", "tokenizing, s", "relative speed", "whole process, s", "its CPU time, s"]
    heads += ["peak memory, GB", "tokens"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for program in rounds[0]:
        runs = [runs[program] for runs in rounds]
        ratios = [runs[REFERENCE].tokenizing / runs[program].tokenizing for runs in rounds]
        cells = [
            program,
            spread((run.tokenizing for run in runs), 1),
            spread(ratios, 2),
            spread((run.whole for run in runs), 1),
            spread((run.cpu for run in runs), 1),
            spread((run.memory for run in runs), 2),
            f"{runs[0].tokens:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def provenance(argv: list[str], text: Path) -> str:
    """Return a line with the command, the hardware, the versions and the date."""
    names = "transformers", "tokenizers", "numpy"
    libraries = ", ".join(f"{name} {version(name)}" for name in names)
    return (
        f"`python -m tools.benchmarks.tokenizing {' '.join(argv)}`, {date.today()}; "
        f"{text.stat().st_size:,} bytes; CPU cores: {available_cores()}, {cpu_fact('model name')}; "
        f"python {platform.python_version()}, {libraries}"
    )


def main(argv: list[str]) -> int:
    """Measure all programs, and print a line about each run and the table."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tokenizing", description=__doc__, formatter_class=raw)
    parser.add_argument("text", type=Path, help="a text file, UTF-8")
    parser.add_argument("--model", default="gpt2", help="name or folder (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--program", choices=PROGRAMS[1:], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    text = args.text.resolve()
    if args.program:
        tokenize(args.program, args.model, text, args.out)
        return 0
    rounds = list[dict[str, Measured]]()
    for number in range(args.rounds):
        runs = {}
        for program in PROGRAMS:
            runs[program] = run = measure(program, args.model, text)
            print(
                f"round {number + 1}, {program}: {run.tokenizing:.1f} s of {run.whole:.1f} s, "
                f"CPU time {run.cpu:.1f} s, peak {run.memory:.2f} GB",
                flush=True,
            )
        rounds.append(runs)
    print("\n".join([provenance(argv, text), "", *table(rounds)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
