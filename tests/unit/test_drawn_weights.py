"""Random weights that stay in memory are those that are saved for other ranks and strategies."""

from types import SimpleNamespace

import torch

from support.model.resolve import gpt2_config
from support.model.weights import draw_weights, from_folder, from_tensors


def test_weights_in_memory_and_on_disk_make_the_same_model_and_are_not_copied():
    config = gpt2_config((2, 2, 16), 64, positions=8, dropout=0.1, end_of_text=0)
    ctx = SimpleNamespace(temporary=[])
    folder, _ = draw_weights(config, 3, ctx, on_disk=True)
    _, tensors = draw_weights(config, 3, ctx, on_disk=False)
    saved, _ = from_folder(folder, config)
    kept, info = from_tensors(tensors, config)
    for (name, expected), (kept_name, weight) in zip(
        saved.named_parameters(), kept.named_parameters(), strict=True
    ):
        assert name == kept_name and weight.requires_grad and torch.equal(weight, expected)
        assert weight.data_ptr() == tensors[name].data_ptr()
    assert kept.get_output_embeddings().weight is kept.get_input_embeddings().weight
    assert not info["missing_keys"]
