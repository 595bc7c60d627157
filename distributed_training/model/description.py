"""A model's folder except its weights: configurations and tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import transformers

from distributed_training.errors import redact
from distributed_training.files.atomic import write_text
from distributed_training.model import weights
from distributed_training.model.older_keys import add_older_keys, write_tokenizer
from distributed_training.model.spec import ModelSpec
from distributed_training.model.stopping import generation_after_training


def write_description(
    spec: ModelSpec,
    folder: Path,
    kind: str | None,
    dtype: torch.dtype | None = None,
    whole: bool = False,
) -> None:
    """Write everything of a trained model except its weights.

    Args:
        kind: of the rows that it was trained on, which determines where it stops.
        dtype: the type of the weights, recorded in the configuration; None leaves it unchanged.
        whole: describe the model itself and not its adapters, which have been added to it.
    """
    folder.mkdir(exist_ok=True)
    write_tokenizer(spec.tokenizer, folder)
    if spec.lora and not whole:
        spec.lora.save_config(folder)
        return
    config = copy.deepcopy(spec.config)
    config.name_or_path = redact(config.name_or_path)  # saved by older versions of transformers
    config.use_cache = True  # disabled for training only
    config.get_text_config().update(spec.own_settings)
    config.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    if dtype is not None:
        config.update(weights.as_dtype(dtype))
    if config.model_type == "gpt2":  # llama.cpp's converter reads it; transformers 5 has no default
        config.n_ctx = config.n_positions
    config.save_pretrained(folder)
    add_older_keys(folder, config)
    generation = generation_after_training(spec.tokenizer, spec.generation, kind)
    # save_pretrained of older versions rejects the generation configuration of some models.
    write_text(folder / "generation_config.json", generation.to_json_string())
