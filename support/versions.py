"""Versions of the libraries that affect the results of a run."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch


def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA and the installed libraries that affect the results."""
    installed = {"python": platform.python_version()}
    for name in ("torch", "deepspeed", "transformers", "datasets", "tokenizers", "peft", "numpy"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        installed["cuda"] = torch.version.cuda
    return installed
