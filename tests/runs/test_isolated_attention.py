"""Attention stays within a document, and a model that cannot do so is recognized without weights."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig

from distributed_training import patches
from distributed_training.data.sequences import Padding, micro_batch
from distributed_training.errors import UserError
from distributed_training.model import isolation, loss, weights
from real_model_example import next_token_loss

# Older versions do not know some of these models, and isolate documents in fewer of them.
pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5"), reason="needs the models of transformers 5"
)
SIZES = {
    **dict.fromkeys(("vocab_size", "intermediate_size", "max_position_embeddings"), 64),
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
OTHERS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "mixtral": {"num_local_experts": 2},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mamba": {"state_size": 4},
}
ISOLATING = ["gpt2", "llama", "qwen3", "gpt_neox", "mixtral"]
# Three documents in a row; token 0 ends the first two.
DOCUMENTS = [[5, 9, 2, 7, 7, 3, 0], [0], [8, 1, 6, 4, 2, 9]]
DROPOUT = (
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout"),
    *("dropout", "activation_dropout", "resid_dropout", "embed_dropout"),
)


def config_of(name: str):
    """With dropout, as many models of the hub have it."""
    sizes = {**SIZES, **OTHERS.get(name, {}), **dict.fromkeys(DROPOUT, 0.1)}
    return AutoConfig.for_model(name, **sizes)


@pytest.fixture(autouse=True)
def check_replaced():
    patches.replace_packed_sequence_check(isolate=True)
    yield
    patches.replace_packed_sequence_check(isolate=False)


@pytest.mark.parametrize("name", ISOLATING)
def test_loss_of_a_sequence_is_the_loss_of_its_documents_alone(name):
    assert isolation.masks_documents(config_of(name))
    torch.manual_seed(0)
    model = weights.from_config(config_of(name)).eval()
    assert loss.returns_plain_logits(model.config)
    loss.add_loss(model)

    def loss_of(*documents, positions_restart=True):
        part = [(np.concatenate(documents), 0)]
        inputs, labels, positions = micro_batch([part], Padding(len(part[0][0]), 1))
        restarting = positions if positions_restart else None
        with torch.no_grad():
            return next_token_loss(model, inputs, labels, torch.tensor(11), restarting).item()

    alone = sum(map(loss_of, DOCUMENTS))
    assert loss_of(*DOCUMENTS) == pytest.approx(alone, rel=1e-6)
    assert loss_of(*DOCUMENTS, positions_restart=False) != pytest.approx(alone, rel=1e-6)


# Some of them keep documents apart in attention, but not with transformers' mask for SDPA.
@pytest.mark.parametrize("name", ["opt", "bloom", "mamba", "gpt_neo"])
def test_what_cannot_be_isolated_is_refused(name):
    tokenizer = SimpleNamespace(eos_token_id=0)

    def check(config):
        isolation.check_isolation(config, tokenizer, "the-model", packing=False)

    check(config_of("gpt2"))
    with pytest.raises(UserError, match=rf"layers of the-model \({name}\)"):
        check(config_of(name))
    tokenizer.eos_token_id = None
    with pytest.raises(UserError, match="no end-of-text token"):
        check(config_of("gpt2"))
