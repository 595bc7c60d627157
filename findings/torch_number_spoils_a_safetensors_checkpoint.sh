#!/usr/bin/env bash
# release: torch 2.13.0, safetensors 0.8.0
# finding: torch.distributed.checkpoint's HuggingFaceStorageWriter saves a state dict with a Python number without an error, but the file is then no safetensors file: neither safetensors nor the reader of the same package can read it, tensors included. A number as a tensor is fine.
# guess: Saving a number raises an error.
# matters: A checkpoint with a step or a learning rate next to the weights looks complete, and the run cannot be resumed from it.
# instead: Give the writer tensors only: torch.tensor(step), and the rest in a file of its own.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile torch==2.13.0 safetensors==0.8.0 numpy==2.4.6
cd "$work"
"$work/env/bin/python" - <<'PROGRAM' 2> errors || { cat errors; exit 1; }
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

FILE = "model-00001-of-00001.safetensors"


def outcomes(name, step):
    """What safetensors and torch read after weights and a step were saved."""
    dcp.save(
        {"weight": torch.ones(2, 2), "step": step}, storage_writer=dcp.HuggingFaceStorageWriter(name)
    )
    try:
        plain = sorted(load_file(f"{name}/{FILE}"))
    except SafetensorError as error:
        plain = str(error)
    loaded = {"weight": torch.zeros(2, 2)}
    try:
        dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(name))
        back = loaded["weight"].tolist()
    except CheckpointException as error:
        back = str(error).strip().splitlines()[-1]
    return plain, back


found = {name: outcomes(name, step) for name, step in (("tensor", torch.tensor(3)), ("number", 3))}
for name, (plain, back) in found.items():
    print(f"step as {name}, saved. safetensors: {plain}. torch: {back}")
assert found["tensor"] == (["step", "weight"], [[1.0, 1.0], [1.0, 1.0]]), found
assert all("deserializing header" in each for each in found["number"]), found
PROGRAM
echo "As found: a number among the tensors makes the file unreadable."
