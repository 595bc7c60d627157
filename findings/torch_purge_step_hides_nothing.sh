#!/usr/bin/env bash
# release: torch 2.13.0, tensorboard 2.21.0
# finding: SummaryWriter(purge_step=N) of the first resume hides nothing in TensorBoard: it shows the points from step N on of every tag that the resumed run has not logged yet. TensorBoard's default loader ignores the mark. With --load_fast=false it needs a mark in the first run's file as well (purge_step=0), and then also hides the points of other tags.
# guess: purge_step hides the points of the earlier file from step N on at once, as its documentation says, in each loader.
# matters: After going back to an earlier checkpoint, evaluations of the discarded steps look like those of the resumed run.
# instead: Log each tag's last valid point again after a resume, because in the default loader a point removes the later ones of its tag. Or use purge_step=0 in the first run, like the example in tensorflow/tensorboard#1272, and --load_fast=false.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile torch==2.13.0 tensorboard==2.21.0
cd "$work"
"$work/env/bin/python" - <<'PROGRAM' 2> errors || { cat errors; exit 1; }
import json
import socket
import subprocess
import sys
import time
import urllib.request

from torch.utils.tensorboard import SummaryWriter

RUNS = {"no mark": {}, "marked": {"purge_step": 0}}  # of the first writer


def write(name, points, options):
    """An event file with points of train and eval."""
    with SummaryWriter(f"logs/{name}", **options) as writer:
        for tag, steps in points.items():
            for step in steps:
                writer.add_scalar(tag, float(step), step)


def shown(load_fast):
    """The steps that TensorBoard shows: by run and tag."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "logs", "--port", str(port)]
    server = subprocess.Popen([*command, "--load_fast", load_fast], stderr=subprocess.DEVNULL)
    found = {}
    try:
        for _ in range(60):
            time.sleep(0.5)
            try:
                for run in RUNS:
                    for tag in ("train", "eval"):
                        at = f"http://localhost:{port}/data/plugin/scalars/scalars"
                        query = f"run={run.replace(' ', '%20')}&tag={tag}"
                        with urllib.request.urlopen(f"{at}?{query}") as answer:
                            points = json.load(answer)
                        found[run, tag] = [step for _, step, _ in points]
            except OSError:  # not started, or not loaded
                continue
            if all(found[run, "train"][-1] == 4 for run in RUNS):  # the second file is read
                return found
        raise TimeoutError(f"TensorBoard has shown only {found}")
    finally:
        server.terminate()
        server.wait()


for run, options in RUNS.items():
    write(run, {"train": range(1, 7), "eval": (2, 4, 6)}, options)
time.sleep(1.1)  # event files are read in the order of the second in their names
for run in RUNS:
    write(run, {"train": (3, 4)}, {"purge_step": 3})  # resumed from step 2
default, slow = shown("auto"), shown("false")
for run in RUNS:
    for tag in ("train", "eval"):
        print(f"{run}, {tag}: default {default[run, tag]}, --load_fast=false {slow[run, tag]}")
for run in RUNS:
    assert (default[run, "train"], default[run, "eval"]) == ([1, 2, 3, 4], [2, 4, 6]), default
assert slow["no mark", "train"] == [1, 2, 3, 4, 5, 6, 3, 4], slow
assert slow["no mark", "eval"] == [2, 4, 6], slow
assert (slow["marked", "train"], slow["marked", "eval"]) == ([1, 2, 3, 4], [2]), slow
PROGRAM
echo "As found: purge_step leaves the evaluations of the discarded steps."
