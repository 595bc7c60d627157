"""A model's config.json and generation_config.json, and what the flags change of them."""

import contextlib
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from distributed_training import console
from distributed_training.errors import UserError, refused_as
from distributed_training.files.json_types import JsonObject
from distributed_training.known_models import CONFIGS
from distributed_training.model.weights import NO_REMOTE_CODE, from_config
from distributed_training.settings.model import ModelSettings


def read_config(folder: str, what: str) -> PretrainedConfig:
    """Return the configuration in a folder.

    Args:
        what: what the user has given, for messages (--model NAME).
    """
    with refused_as(f"{what}: its config.json cannot be used"):
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, **NO_REMOTE_CODE)
        except Exception:
            from distributed_training.model.unreadable import explain_config  # after an error

            explain_config(folder, what)
            raise
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{what} is a {config.model_type}, which is not a causal language model.")
    text = config.get_text_config()
    padding, rows = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    is_outside = isinstance(padding, int) and isinstance(rows, int) and padding >= rows
    if is_outside and not _can_be_built(config):
        raise UserError(
            f"{what}: the pad_token_id in its config.json, {padding}, is no row of the embedding, "
            f"which has {rows} (vocab_size): set it to null, or to the id of another token."
        )
    return config


def _can_be_built(config: PretrainedConfig) -> bool:
    """Return whether the embedding accepts the pad_token_id; that of GPT-2 does not have one."""
    with torch.device("meta"), contextlib.suppress(AssertionError):
        return from_config(config) is not None
    return False


def read_generation_config(folder: str, config: PretrainedConfig) -> GenerationConfig:
    """Return the settings of generation; older models have them in their config.json, or none."""
    file = Path(folder, "generation_config.json")
    if not file.exists():
        return GenerationConfig.from_model_config(config)
    with refused_as(f"{file} cannot be used; correct or remove it"):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)


def gpt2_config(name: str, dropout: float, end_of_text: int) -> transformers.GPT2Config:
    """Return the configuration of a GPT-2 architecture in distributed_training/known_models.py."""
    settings = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
    settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    settings |= dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text)
    return transformers.GPT2Config(**settings, architectures=["GPT2LMHeadModel"])


def apply_flags(config: PretrainedConfig, model_settings: ModelSettings) -> JsonObject:
    """Change the configuration as the flags request; return its own values of what they replace."""
    config.use_cache = False
    own_settings = fuse_gelu(config) if model_settings.fused_gelu else {}
    if model_settings.dropout is not None:
        set_dropout(config, model_settings.dropout)
    return own_settings


def fuse_gelu(config: PretrainedConfig) -> JsonObject:
    """Replace GPT-2's activation by the same function in one kernel; return the original settings.

    transformers' gelu_new computes the tanh approximation of GELU (Hendrycks and Gimpel, arXiv
    1606.08415) in eight operations; gelu_pytorch_tanh is PyTorch's own implementation.
    """
    text_config = config.get_text_config()
    replaced = {name: value for name, value in text_config.to_dict().items() if value == "gelu_new"}
    text_config.update(dict.fromkeys(replaced, "gelu_pytorch_tanh"))
    return replaced


def set_dropout(config: PretrainedConfig, probability: float) -> None:
    """Set every dropout probability of an architecture, whatever its name is."""
    text_config = config.get_text_config()
    names = [
        name
        for name, value in text_config.to_dict().items()
        if "drop" in name
        and type(value) in (float, int)
        and not name.startswith(("summary", "classifier"))
    ]
    text_config.update(dict.fromkeys(names, probability))
    if not names and probability:
        console.warn("--dropout: this architecture has no dropout.")


def max_positions(config: PretrainedConfig) -> int | None:
    """Return the longest sequence that the model supports; None if it has no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)
