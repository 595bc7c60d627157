#!/usr/bin/env python3
"""Measure tokenization against the tokenizers library alone, and what training waits for data.

    python -m benchmarks.tokenization --tokenizer FOLDER --text FILE --megabytes 100

The corpus is FILE's paragraphs, drawn at random until it has the size. Two percent of the words are
replaced by new ones, because the library caches words, and a repeated text would have no new ones.
It is read as one text file, and as a .jsonl file with one paragraph a row. Every measurement is a
process of its own; "library" has the text in memory and drops the tokens, while "ours" reads and
hashes the files, tokenizes, and writes the cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

CALL_CHARACTERS = 1 << 20  # in one call of the library
SLICE = 1 << 16  # characters of a text file that are one text in such a call
LIBRARY = ("encode_batch", "encode_batch_fast")


def paragraphs(path: Path, size: float) -> Iterator[str]:
    """Yield paragraphs of a text in random order, until they have `size` bytes."""
    draw = random.Random(0)
    known = [line + "\n" for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    vocabulary = sorted({word for line in known for word in line.split() if len(word) > 4})
    while size > 0:
        words = draw.choice(known).split(" ")
        for place, word in enumerate(words):
            if word.isalpha() and draw.random() < 0.02:
                begin, end = draw.choices(vocabulary, k=2)
                words[place] = begin[: draw.randint(2, 6)] + end[-draw.randint(2, 6) :]
        yield (text := " ".join(words))
        size -= len(text.encode())


def write_corpus(source: Path, folder: Path, megabytes: int) -> list[Path]:
    """Write the corpus as a text file and as a .jsonl file."""
    files = [folder / "corpus.txt", folder / "corpus.jsonl"]
    with open(files[0], "w", encoding="utf-8") as text, open(files[1], "w") as rows:
        for paragraph in paragraphs(source, megabytes * 1e6):
            text.write(paragraph)
            rows.write(json.dumps({"text": paragraph}) + "\n")
    return files


def load_tokenizer(name: str):
    """Load a tokenizer that uses all cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def texts_of(file: Path) -> list[str]:
    """Return the rows of a .jsonl file, or the slices of a text file."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        return [json.loads(line)["text"] for line in text.splitlines()]
    return [text[start : start + SLICE] for start in range(0, len(text), SLICE)]


def library(function: str, file: Path, tokenizer) -> float:
    """Return the seconds that one function of the library takes for the text."""
    encode, texts, calls = getattr(tokenizer.backend_tokenizer, function), texts_of(file), [[]]
    characters = 0
    for text in texts:
        calls[-1].append(text)
        characters += len(text)
        if characters >= CALL_CHARACTERS:
            calls.append([])
            characters = 0
    started = time.perf_counter()
    for call in calls:
        encode(call, add_special_tokens=False)
    return time.perf_counter() - started


def ours(file: Path, tokenizer) -> float:
    """Return the seconds until the token cache of a corpus is written."""
    from support.cli.parse import parse_arguments
    from support.data.formats import RowOptions
    from support.data.rows import open_source
    from support.data.tokenize import tokenize_once
    from support.files.cache import Cache

    flags = parse_arguments([])
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        source = open_source(str(file), flags, RowOptions())
        tokenize_once(source, tokenizer, Cache(Path(folder), [], print), lambda n: None, 0)
        return time.perf_counter() - started


def measure(what: str, file: Path, name: str) -> tuple[float, float]:
    """Return (seconds, peak resident MB of the process)."""
    tokenizer = load_tokenizer(name)
    seconds = ours(file, tokenizer) if what == "ours" else library(what, file, tokenizer)
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def waiting(file: Path, name: str, batch: int, step_seconds: float, steps: int) -> float:
    """Return the share of the time that a consumer of --streaming waits for data.

    The consumer sleeps for `step_seconds` after each batch, as a thread does that waits for a GPU.
    The first step is not counted, because nothing can be read ahead of it.
    """
    import torch

    from support.cli.parse import parse_arguments
    from support.data.streaming import open_stream

    flags = f"--dataset {file} --batch_size {batch} --max_steps {steps} --seq_length 1024"
    arguments = parse_arguments([*flags.split(), "--streaming", "--no_eval", "--seed", "0"])
    silent = SimpleNamespace(**dict.fromkeys(("print", "print0", "warn"), lambda *_: None))
    one_rank = SimpleNamespace(
        is_main=True,
        rank=0,
        device=torch.device("cpu"),
        world_size=1,
        console=silent,
        all_gather=lambda value: [value],
        broadcast_from_rank0=lambda value: value,
    )
    stream, _, _ = open_stream(arguments, one_rank, load_tokenizer(name))
    batches, waited = stream.step_batches(torch.device("cpu")), 0.0
    next(batches)
    begin = time.perf_counter()
    for _ in range(steps - 10):
        time.sleep(step_seconds)
        asked = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - asked
    share = waited / (time.perf_counter() - begin)
    stream._ahead.close()
    return share


def alone(function, *args):
    """Return what a function returns in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as process:
        return process.apply(function, args)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokenizer", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--text", required=True, type=Path, help="a text file to draw from")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[*LIBRARY, "ours"], help="what is measured")
    parser.add_argument(
        "--step_seconds",
        type=float,
        nargs="*",
        default=[0.2],
        help="steps of 32 x 1,024 tokens whose waiting for --streaming is measured",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = write_corpus(args.text, Path(folder), args.megabytes)
        print("| | MB/s of each round | median | peak MB |\n|---|---|---|---|")
        for file in files:
            megabytes = sum(len(text.encode()) for text in texts_of(file)) / 1e6
            rounds = [
                [alone(measure, what, file, args.tokenizer) for what in args.only]
                for _ in range(args.rounds)
            ]
            for what, results in zip(args.only, zip(*rounds, strict=True), strict=True):
                speeds = [megabytes / seconds for seconds, _ in results]
                peak = max(peak for _, peak in results)
                print(
                    f"| {file.suffix}, {what} | {' '.join(f'{speed:.2f}' for speed in speeds)} "
                    f"| {statistics.median(speeds):.2f} | {peak:,.0f} |",
                    flush=True,
                )
        for seconds in args.step_seconds:
            shares = [alone(waiting, file, args.tokenizer, 32, seconds, 110) for file in files]
            print(
                f"waiting for data, steps of {seconds} s: "
                + ", ".join(
                    f"{share:.2%} ({file.suffix})"
                    for share, file in zip(shares, files, strict=True)
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
