#!/usr/bin/env python3
"""Prepare the text of the benchmarks, and its tokens, so that no measured program tokenizes.

    python -m tools.benchmarks.corpus FOLDER --model gpt2 --sequences 1280 --length 1024

The text is that of Python's standard library, so no network is needed. FOLDER then has corpus.txt,
the token cache of real_model_example.py in cache/, and the tokens as it cuts them into sequences in
sequences.npy (int64 [sequences, length]).
"""

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np

from distributed_training import PROJECT

SCRIPT = PROJECT / "real_model_example.py"
# More than a token has on average; a tenth of the text is held out for validation.
CHARACTERS_PER_TOKEN = 6


def flags_of(folder: Path) -> list[str]:
    """Return the flags with which real_model_example.py reads a prepared folder."""
    return ["--dataset", str(folder / "corpus.txt"), "--cache_dir", str(folder / "cache")]


def prepare(folder: Path, model: str, sequences: int, length: int) -> None:
    """Write the files of `folder`, unless it has at least that many sequences of this length.

    Raises:
        subprocess.CalledProcessError: real_model_example.py could not tokenize.
    """
    file = folder / "sequences.npy"
    if file.exists() and np.load(file, mmap_mode="r").shape[0] >= sequences:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text, characters = "", CHARACTERS_PER_TOKEN * sequences * length
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py")):
        if len(text) < characters:
            text += source.read_text(encoding="utf-8", errors="replace")
    (folder / "corpus.txt").write_text(text[:characters], encoding="utf-8")
    work = ["--model", model, "--from_scratch", "--seq_length", str(length), "--prefetch"]
    command = [sys.executable, str(SCRIPT), *work, *flags_of(folder)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, cwd=PROJECT)
    [tokens] = (folder / "cache").glob("*/train.bin")
    facts = json.loads((tokens.parent / "meta.json").read_text())["facts"]
    stream = np.fromfile(tokens, facts["splits"]["train"]["dtype"])[: sequences * length]
    partial = folder / "partial.npy"
    np.save(partial, stream.reshape(sequences, -1).astype(np.int64))
    partial.rename(file)


def main() -> None:
    """Read the command line, and prepare the folder."""
    parser = argparse.ArgumentParser(
        "tools.benchmarks.corpus", description="Write text and tokens."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="gpt2", help="(default: %(default)s)")
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens of a sequence")
    args = parser.parse_args()
    prepare(args.folder, args.model, args.sequences, args.length)


if __name__ == "__main__":
    main()
