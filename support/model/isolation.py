"""Document isolation: attention within a document where a sequence has several documents.

The positions restart at 0 where a document begins. transformers (from 4.53.3) turns them into a
mask that all layers share. For SDPA this is a dense tensor, [batch, 1, length, length]. On CUDA
`choose_block_mask` replaces it by FlexAttention's BlockMask, whose kernel skips the blocks between
documents.
"""

from __future__ import annotations

import torch
import transformers
from packaging.version import Version
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from support.cli.arguments import Arguments
from support.errors import UserError
from support.model.weights import NOT_WITH_FAKE_TENSORS, from_config

OLDEST_TRANSFORMERS = Version("4.53.3")
# transformers 4.56 can register masks; older torch needs a slow compilation of the kernel.
OLDEST_FOR_BLOCK_MASK = {transformers: Version("4.56"), torch: Version("2.7")}
# Layers that mix tokens without attention: a mask does not stop them at the end of a document.
MIXERS = (nn.Conv1d, nn.RNNBase)
BLOCK_MASK = "documents"  # the name that choose_block_mask registers


def check_isolation(config: PretrainedConfig, tokenizer, args: Arguments) -> None:
    """Check that the model can keep the documents of a sequence apart.

    Raises:
        UserError: it cannot, or transformers is too old, or the end of a document is unknown.
    """
    flag = "--packing" if args.packing else "--isolate_documents"
    if Version(transformers.__version__) < OLDEST_TRANSFORMERS:
        raise UserError(
            f"{flag} needs transformers {OLDEST_TRANSFORMERS} or newer, and "
            f"{transformers.__version__} is installed: pip install --upgrade transformers."
        )
    try:
        masked = masks_documents(config)
    except NOT_WITH_FAKE_TENSORS:  # the forward pass needs values of tensors: it cannot be checked
        masked = False
    if not masked:
        raise UserError(
            f"{flag}: in transformers {transformers.__version__} the layers of {args.model} "
            f"({config.model_type}) are not known to use the attention mask that keeps documents "
            "apart: leave the flag out, or try a newer transformers."
        )
    if tokenizer.eos_token_id is None and not args.packing:
        raise UserError(
            f"--isolate_documents: the tokenizer of {args.model} has no end-of-text token, which "
            "separates documents: leave the flag out."
        )


def masks_documents(config: PretrainedConfig) -> bool:
    """Return whether each layer's only mixing of tokens is attention with the mask of documents.

    The model runs twice: once with two documents, once with one. If transformers finds two, each
    layer must get a mask, and otherwise none, which means causal attention.
    """
    # Fake tensors have no memory. The grouped matrix multiplication of experts accepts bf16 only.
    with torch.no_grad(), FakeTensorMode():
        model = from_config(config, torch.bfloat16).eval()  # dropout fails on fake CPU tensors
        with_two, with_one = _attentions(model, two=True), _attentions(model, two=False)
    return (
        with_two.keys() == with_one.keys()
        and len(with_two) >= config.get_text_config().num_hidden_layers
        and all(with_two.values())
        and not any(with_one.values())
        and not any(isinstance(module, MIXERS) for module in model.modules())
    )


def _attentions(model: nn.Module, two: bool) -> dict[int, bool]:
    """Run a fake model on one or two documents: {attention layer: whether it got a mask}."""
    from transformers import masking_utils  # not in versions before 4.53

    find, sdpa = masking_utils.find_packed_sequence_indices, ALL_ATTENTION_FUNCTIONS["sdpa"]
    masked: dict[int, bool] = {}

    def attention(module, query, key, value, attention_mask, *args, **options):
        masked[id(module)] = attention_mask is not None
        return sdpa(module, query, key, value, attention_mask, *args, **options)

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


def choose_block_mask(config: PretrainedConfig, device: torch.device) -> bool:
    """Let a model that passes `masks_documents` use a BlockMask; return whether it does.

    With a dense mask neither FlashAttention nor cuDNN can run. The CPU keeps it, because
    FlexAttention does not train there; so does a model with dropout in its attention.
    """
    text_config = config.get_text_config()
    names = ("attn_pdrop", "attention_dropout", "dropout")
    new_enough = all(
        Version(Version(library.__version__).base_version) >= oldest
        for library, oldest in OLDEST_FOR_BLOCK_MASK.items()
    )
    has_dropout = any(getattr(text_config, name, 0) for name in names)
    if device.type != "cuda" or has_dropout or not new_enough:
        return False
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    # transformers 5.23 refuses the name "flex_attention" for models that its authors have not
    # tested with it, such as GPT-2. `masks_documents` has checked how the functions are called.
    AttentionInterface.register(BLOCK_MASK, ALL_ATTENTION_FUNCTIONS["flex_attention"])
    AttentionMaskInterface.register(BLOCK_MASK, MASKS["flex_attention"])
    config._attn_implementation = BLOCK_MASK
    return True


def use_sdpa(config: PretrainedConfig) -> None:
    """Undo `choose_block_mask` for generation, where FlexAttention would compile each length."""
    if config._attn_implementation == BLOCK_MASK:
        config._attn_implementation = "sdpa"
