"""Safetensors files that are written one tensor at a time."""

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file

from support.files import safetensors_writer as writer

# The library has an entry None for a type that this version of PyTorch lacks.
TYPES = [d for d in safetensors.torch._SIZE if d is not None and "float4" not in str(d)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_is_written_as_the_library_writes_it(tmp_path, dtype):
    tensor = (torch.arange(6) % 2).to(torch.float32).view(2, 3).to(dtype)
    writer.save_file({"x": tensor}, tmp_path / "ours.safetensors")
    save_file({"x": tensor}, tmp_path / "library.safetensors")
    ours, library = (
        load_file(tmp_path / f"{name}.safetensors")["x"] for name in ("ours", "library")
    )
    assert ours.dtype == library.dtype == dtype and ours.shape == (2, 3)
    assert ours.view(torch.uint8).equal(library.view(torch.uint8))


def test_a_type_that_the_format_lacks_is_named(tmp_path):
    with pytest.raises(TypeError, match=r"x: .*complex128"):
        writer.save_file({"x": torch.zeros(1, dtype=torch.complex128)}, tmp_path / "file")


def test_weights_are_converted_and_buffers_keep_their_types(tmp_path):
    buffers = {"counts": torch.tensor([1, -2, 3], dtype=torch.int8)}
    files = writer.WeightFiles(tmp_path, {"weight": (2, 2)}, torch.bfloat16, buffers)
    files.write("weight", torch.ones(2, 2))
    files.finish()
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["weight"].equal(torch.ones(2, 2, dtype=torch.bfloat16))
    assert tensors["counts"].equal(buffers["counts"])


def test_a_missing_weight_is_an_error(tmp_path):
    files = writer.WeightFiles(tmp_path, {"a": (1,), "b": (1,)}, torch.float32, {})
    files.write("a", torch.zeros(1))
    with pytest.raises(ValueError, match="1 weights are missing, b"):
        files.finish()
