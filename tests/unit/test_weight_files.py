"""The weight files of an export."""

import json

import torch
from safetensors.torch import load_file

from support.files import safetensors_writer as writer


def test_files_of_limited_size_have_an_index(tmp_path):
    shapes = dict.fromkeys("abc", (256,))
    files = writer.WeightFiles(tmp_path, shapes, torch.float32, {}, file_bytes="2KB")
    for number, name in enumerate(shapes):
        files.write(name, torch.full((256,), float(number)))
    files.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == 3
    for number, name in enumerate(shapes):
        assert load_file(tmp_path / index[name])[name].eq(number).all()


def test_weights_are_converted_and_buffers_keep_their_types(tmp_path):
    buffers = {"counts": torch.tensor([1, -2, 3], dtype=torch.int8)}
    files = writer.WeightFiles(tmp_path, {"weight": (2, 2)}, torch.bfloat16, buffers)
    files.write("weight", torch.ones(2, 2))
    files.finish()
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["weight"].equal(torch.ones(2, 2, dtype=torch.bfloat16))
    assert tensors["counts"].equal(buffers["counts"])
