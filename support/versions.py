"""Versions of the libraries that affect the results of a run, and the digest of its code."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from support import PROJECT


def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA, ROCm and the libraries that affect the results."""
    installed = {"python": platform.python_version()}
    for name in ("torch", "deepspeed", "transformers", "datasets", "tokenizers", "peft", "numpy"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        installed["cuda"] = torch.version.cuda
    if torch.version.hip:
        installed["rocm"] = torch.version.hip
    return installed


def code_digest() -> str:
    """Return the first 12 hex digits of the SHA-256 digest of this project's code."""
    digest = hashlib.sha256()
    for path in [PROJECT / "real_model_example.py", *sorted((PROJECT / "support").rglob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
