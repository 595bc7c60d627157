#!/usr/bin/env python3
"""Measure the seconds and the peak host memory of scripts/convert_checkpoint.py for one checkpoint.

    python benchmarks/conversion_memory.py RUN_OR_CHECKPOINT

"Anonymous" memory is filled by the process and counts against a memory limit; "resident" memory
adds mapped pages of files. Both include the memory of importing torch and transformers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "convert_checkpoint.py"


def watch(*args) -> tuple[float, int, int]:
    """Run the converter and sample its memory every 10 ms; exit if the converter fails.

    Returns:
        (seconds, peak of anonymous bytes, peak of resident bytes)
    """
    started, anonymous, resident = time.monotonic(), 0, 0
    process = psutil.Popen([sys.executable, SCRIPT, *map(str, args)], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            memory = process.memory_info()
            anonymous, resident = (
                max(anonymous, memory.rss - memory.shared),
                max(resident, memory.rss),
            )
        except psutil.NoSuchProcess:
            break
        time.sleep(0.01)
    if process.wait():
        sys.exit("❌ the converter failed")
    return time.monotonic() - started, anonymous, resident


def main() -> None:
    """Print the table for --inspect and for each target format."""
    source = sys.argv[1]
    print("| | seconds | peak MB: anonymous / resident |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, args in {
            "--inspect": ["--inspect"],
            **{
                f"--to {to}": ["--to", to, Path(folder) / to]
                for to in ("hf", "torch", "deepspeed-universal")
            },
        }.items():
            seconds, anonymous, resident = watch(source, *args)
            print(
                f"| {name} | {seconds:.1f} | {anonymous / 2**20:,.0f} / {resident / 2**20:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
