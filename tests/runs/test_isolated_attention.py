"""Attention stays within a document, and a model that cannot do so is recognized without weights."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM

from real_model_example import next_token_loss
from support import patches
from support.data.sequences import Padding, micro_batch
from support.errors import UserError
from support.model import isolation, loss, weights
from support.units import IGNORED

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
# Some of them keep documents apart in attention, but not with transformers' mask for SDPA.
REFUSED = ["opt", "bloom", "mamba", "gpt_neo"]
# Two documents in a row; token 0 ends the first.
DOCUMENTS = [[5, 9, 2, 7, 7, 3, 0], [8, 1, 6, 4, 2, 9]]


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


def logits_of(model, tokens, positions=None):
    options = {} if positions is None else {"position_ids": positions}
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False, **options).logits[0]


@pytest.mark.parametrize("name", ISOLATING)
def test_logits_of_a_document_do_not_depend_on_the_document_before(name):
    assert isolation.masks_documents(config_of(name))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name)).eval()
    first, second = DOCUMENTS
    changed = [9, 9, 9, 4, 4, 4, 0]
    _, _, positions = label_text(torch.tensor([first + second]), end_of_text=0)
    together = logits_of(model, first + second, positions)
    after_change = logits_of(model, changed + second, positions)
    assert not torch.equal(together[: len(first)], after_change[: len(first)])
    assert torch.equal(together[len(first) :], after_change[len(first) :])
    alone = logits_of(model, second)
    torch.testing.assert_close(together[len(first) :], alone, rtol=1e-5, atol=1e-5)
    # Without positions that restart, the change does show.
    patches.replace_packed_sequence_check(isolate=False)
    plain = [logits_of(model, document + second)[-1] for document in (first, changed)]
    assert not torch.allclose(*plain, rtol=1e-4)


@pytest.mark.parametrize("name", ISOLATING)
def test_packed_loss_is_the_loss_of_the_documents_alone(name):
    torch.manual_seed(0)
    model = weights.from_config(config_of(name)).eval()
    assert loss.returns_plain_logits(model.config)
    loss.add_loss(model)
    tokens = torch.tensor(sum(len(document) - 1 for document in DOCUMENTS))

    def loss_of(rows):
        inputs, labels, positions = label_text(torch.tensor([rows]), end_of_text=0)
        with torch.no_grad():
            return next_token_loss(model, inputs, labels, tokens, positions).item()

    packed, alone = loss_of(DOCUMENTS[0] + DOCUMENTS[1]), sum(map(loss_of, DOCUMENTS))
    assert packed == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_other_mixing_of_tokens_is_recognized(name):
    assert not isolation.masks_documents(config_of(name))


def label_text(inputs, end_of_text):
    parts = [[(row.numpy(), end_of_text)] for row in inputs]
    return micro_batch(parts, Padding(inputs.shape[1], 1))


def test_what_cannot_be_isolated_is_refused(monkeypatch):
    args = SimpleNamespace(model="the-model", isolate_documents=True, packing=False)
    tokenizer = SimpleNamespace(eos_token_id=0)
    isolation.check_isolation(config_of("gpt2"), tokenizer, args)
    with pytest.raises(UserError, match=r"layers of the-model \(bloom\)"):
        isolation.check_isolation(config_of("bloom"), tokenizer, args)
    tokenizer.eos_token_id = None
    with pytest.raises(UserError, match="no end-of-text token"):
        isolation.check_isolation(config_of("gpt2"), tokenizer, args)


def test_positions_restart_after_an_end_of_text():
    rows = [[5, 0, 7, 7, 0, 0], [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]]
    inputs, labels, positions = label_text(torch.tensor(rows), end_of_text=0)
    assert inputs.tolist() == rows
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    none = IGNORED
    expected = [[none, 0, none, 7, 0, none], [none, none, 2, 3, 4, 5], [none, 2, 3, 4, 5, 0]]
    assert labels.tolist() == expected
