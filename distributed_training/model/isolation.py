"""Document isolation: attention within a document where a sequence has several documents.

The positions restart at 0 where a document begins. transformers (from 4.53.3) turns them into a
mask that all layers share: for SDPA a dense tensor, [batch, 1, length, length].
"""

import torch
import transformers
from packaging.version import Version
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from distributed_training import patches
from distributed_training.errors import UserError
from distributed_training.model.weights import NOT_WITH_FAKE_TENSORS, from_config

OLDEST_TRANSFORMERS = Version("4.53.3")
# Layers that mix tokens without attention: a mask does not stop them at the end of a document.
MIXERS = (nn.Conv1d, nn.RNNBase)


def check_isolation(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, model: str, packing: bool
) -> None:
    """Check that the model can keep the documents of a sequence apart.

    Args:
        model: --model, for messages.
        packing: the documents are examples, whose ends are known.
    Raises:
        UserError: it cannot, or transformers is too old, or the end of a document is unknown.
    """
    flag = "--packing" if packing else "--isolate_documents"
    if Version(transformers.__version__) < OLDEST_TRANSFORMERS:
        raise UserError(
            f"{flag} needs transformers {OLDEST_TRANSFORMERS} or newer, and "
            f"{transformers.__version__} is installed: pip install --upgrade transformers."
        )
    if not masks_documents(config):
        raise UserError(
            f"{flag}: in transformers {transformers.__version__} the layers of {model} "
            f"({config.model_type}) are not known to use the attention mask that keeps documents "
            "apart: leave the flag out, or try a newer transformers."
        )
    if tokenizer.eos_token_id is None and not packing:
        raise UserError(
            f"--isolate_documents: the tokenizer of {model} has no end-of-text token, which "
            "separates documents: leave the flag out."
        )


def masks_documents(config: PretrainedConfig) -> bool:
    """Return whether each layer's only mixing of tokens is attention with the mask of documents.

    The model runs twice: once with two documents, once with one. If transformers finds two, each
    layer must get a mask, and otherwise none, which means causal attention.
    """
    # Fake tensors have no memory. The grouped matrix multiplication of experts accepts bf16 only.
    with torch.no_grad(), FakeTensorMode(), patches.without_initialization():
        model = from_config(config, torch.bfloat16).eval()  # dropout fails on fake CPU tensors
        try:
            with_two, with_one = _layers_masked(model, two=True), _layers_masked(model, two=False)
        except NOT_WITH_FAKE_TENSORS:  # the forward pass needs values of tensors
            return False
    return (
        with_two.keys() == with_one.keys()
        and len(with_two) >= config.get_text_config().num_hidden_layers
        and all(with_two.values())
        and not any(with_one.values())
        and not any(isinstance(module, MIXERS) for module in model.modules())
    )


def _layers_masked(model: nn.Module, two: bool) -> dict[int, bool]:
    """Run a fake model on one or two documents: {attention layer: whether it got a mask}."""
    from transformers import masking_utils  # not in versions before 4.53

    find, sdpa = masking_utils.find_packed_sequence_indices, ALL_ATTENTION_FUNCTIONS["sdpa"]
    masked: dict[int, bool] = {}

    def attention(module, query, key, value, mask, *args, **options):
        masked[id(module)] = mask is not None
        return sdpa(module, query, key, value, mask, *args, **options)

    positions = torch.zeros(1, 4, dtype=torch.long)
    # Not token ids: some models compare them with the padding token, and need their values.
    embedding = model.get_input_embeddings().weight
    inputs = torch.zeros(1, 4, embedding.shape[1], dtype=embedding.dtype)
    masking_utils.find_packed_sequence_indices = lambda positions: positions if two else None
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    try:
        model(inputs_embeds=inputs, position_ids=positions, use_cache=False)
    finally:
        masking_utils.find_packed_sequence_indices = find
        ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa
    return masked
