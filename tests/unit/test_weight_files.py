"""The weight files of a model folder: which are read, and what their tensors are."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from distributed_training.errors import UserError
from distributed_training.files.weight_files import has_own_head, tensors_in, weight_files
from distributed_training.memory.find_architecture import find_architecture

SECOND = "model-00002-of-00002.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LLAMA = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "vocab_size": 40}
LLAMA |= {"num_hidden_layers": 1, "num_attention_heads": 2, "tie_word_embeddings": True}


@pytest.fixture
def sharded(tmp_path):
    """A model folder with two files of weights and an index."""
    folder = tmp_path / "model"
    folder.mkdir()
    table = np.arange(320, dtype=np.float32).reshape(40, 8)
    save_file({EMBEDDING: table}, folder / "model-00001-of-00002.safetensors")
    save_file({HEAD: table}, folder / SECOND)
    write_index(folder, SECOND)
    return folder


def write_index(folder, second):
    listed = {EMBEDDING: "model-00001-of-00002.safetensors", HEAD: second}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def test_an_index_may_name_links_as_in_the_cache_of_the_hub(sharded):
    (sharded / SECOND).rename(sharded.parent / "blob")
    (sharded / SECOND).symlink_to("../blob")
    tensors = tensors_in(weight_files(sharded))
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        EMBEDDING: (40, 8),
        HEAD: (40, 8),
    }


@pytest.mark.parametrize("name", ["../outside.safetensors", "ABSOLUTE", "a/../../b", "", 7, None])
def test_an_index_that_names_a_file_elsewhere_is_refused(sharded, name):
    outside = sharded.parent / "outside.safetensors"
    (sharded / SECOND).rename(outside)
    write_index(sharded, str(outside) if name == "ABSOLUTE" else name)
    with pytest.raises(UserError, match=r"index\.json names the file"):
        weight_files(sharded)


DAMAGES = {
    "empty": lambda folder: (folder / SECOND).write_bytes(b""),
    "no header": lambda folder: (folder / SECOND).write_bytes(b"version https://git-lfs"),
    "truncated": lambda folder: os.truncate(folder / SECOND, 500),
    "missing": lambda folder: (folder / SECOND).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named(sharded, damage):
    damage(sharded)
    with pytest.raises(UserError, match=f"{SECOND}.*download"):
        tensors_in(weight_files(sharded))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_damaged_index_is_named(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=r"index\.json"):
        weight_files(sharded)


def test_an_output_layer_is_compared_with_the_embedding(sharded):
    """Files of tied models may have both, with equal elements."""
    (sharded / "config.json").write_text(json.dumps(LLAMA))
    assert not has_own_head(tensors_in(weight_files(sharded)), [EMBEDDING])
    tied = find_architecture(str(sharded))
    other = np.zeros((40, 8), dtype=np.float32)
    other[-1, -1] = 1
    for head in (other, other.astype(np.float16), other[:30]):
        save_file({HEAD: head}, sharded / SECOND)
        assert has_own_head(tensors_in(weight_files(sharded)), [EMBEDDING])
        assert find_architecture(str(sharded)).total == tied.total + 40 * 8


def test_a_damaged_file_does_not_change_the_plan(sharded):
    (sharded / "config.json").write_text(json.dumps(LLAMA))
    tied = find_architecture(str(sharded))
    DAMAGES["truncated"](sharded)
    assert find_architecture(str(sharded)) == tied
