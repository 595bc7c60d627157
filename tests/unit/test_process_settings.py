"""Settings of the allocator and of cuBLAS before torch is imported."""

from types import SimpleNamespace

import pytest

from support.cluster import launch, tuning


@pytest.mark.parametrize(
    "given, found",
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "x:1"}, {"PYTORCH_ALLOC_CONF": "x:1"}),
    ],
)
def test_the_allocator_of_a_gpu_grows_its_segments(monkeypatch, given, found):
    """Unless the user has configured it, under any of its names."""
    monkeypatch.setattr(tuning, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(tuning, "return_freed_memory", lambda: None)
    monkeypatch.setattr(launch.os, "environ", {"PATH": "", **given})
    args = SimpleNamespace(deterministic=False, verbose=True, quiet=False)
    tuning.tune_process(args, launch.Launch("python", 0, 0, 1, 1, 0, "127.0.0.1", 29500))
    assert {name: value for name, value in launch.os.environ.items() if "ALLOC" in name} == found
