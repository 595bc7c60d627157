"""Find the parts of --model on this machine: configuration, tokenizer, weights."""

from __future__ import annotations

from typing import NamedTuple

import transformers

from distributed_training.cli.checks import is_local_model, scratch_without_hub
from distributed_training.errors import UserError
from distributed_training.known_models import EMBEDDED_MODEL
from distributed_training.model.config import gpt2_config, read_config
from distributed_training.model.tokenizer import embedded_tokenizer, read_tokenizer
from distributed_training.settings.model import ModelSettings


class Located(NamedTuple):
    """The parts of --model on this machine."""

    config: transformers.PretrainedConfig
    tokenizer: str  # its folder
    weights: str | None  # their folder; None: they are drawn from the seed
    notices: list[str]  # for the user


def locate(
    model_settings: ModelSettings, cache_dir: str | None, with_weights: bool, offline: bool
) -> Located:
    """Find the parts of --model on this machine, and download or build those that are missing.

    Args:
        with_weights: also download the weights; not with --from_scratch.
        offline: use no network.
    """
    name, what = model_settings.model, f"--model {model_settings.model}"

    def folder_of_model() -> str:
        """Return the folder of the model, of this machine or of the hub."""
        if is_local_model(name):
            return name
        from distributed_training.model.download import download  # of the hub

        needed = with_weights and not model_settings.from_scratch
        return download(name, model_settings.model_revision, needed, offline, what)

    if name == EMBEDDED_MODEL:
        # Dropout 0, as is usual for pretraining from random weights; --dropout changes it.
        return Located(gpt2_config(name, 0.0, 0), embedded_tokenizer(cache_dir), None, [])
    if is_local_model(name) or not scratch_without_hub(model_settings):
        folder = folder_of_model()
        config = read_config(folder, what)
        if model_settings.from_scratch:  # random weights are not quantized
            vars(config).pop("quantization_config", None)
        return Located(config, folder, None if model_settings.from_scratch else folder, [])
    config = gpt2_config(name, 0.1, 50256)
    try:
        folder = folder_of_model()
        read_tokenizer(folder, what)
        return Located(config, folder, None, [])
    except UserError:
        notice = f"The tokenizer of {name} is not available: using the embedded one."
        return Located(config, embedded_tokenizer(cache_dir), None, [notice])
