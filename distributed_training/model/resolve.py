"""Resolve --model to local folders with its weights and its tokenizer, on every node.

Every kind of --model results in a local folder, which each strategy loads in its own way. Ranks
that share random weights find them there; one process alone draws them when it loads the model.
"""

from __future__ import annotations

import os
from typing import TypedDict

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from distributed_training import console
from distributed_training.cli.checks import names_on_hub
from distributed_training.data.special_tokens import number_of_ids
from distributed_training.files.json_types import JsonObject
from distributed_training.model import weights
from distributed_training.model.config import max_positions
from distributed_training.model.locate import Located, locate
from distributed_training.model.tokenizer import read_tokenizer
from distributed_training.ranks.context import DistContext
from distributed_training.settings.data import DataSettings
from distributed_training.settings.model import ModelSettings
from distributed_training.settings.settings import Settings
from distributed_training.settings.training import TrainingSettings
from distributed_training.strategies.strategy import Strategy


class Prepared(TypedDict):
    """The parts of a model that every rank of the node can load, as JSON."""

    weights: str  # folder
    tokenizer: str  # folder
    notices: list[str]  # for the user
    random: bool  # see WeightSource
    new_rows: int  # see WeightSource
    own_head: bool  # see `weights.check_folder`
    frozen: JsonObject  # see WeightSource


def find_folders(
    model_settings: ModelSettings,
    data: DataSettings,
    training: TrainingSettings,
    strategy: Strategy,
    offline: bool,
    ctx: DistContext,
) -> Prepared:
    """Find the parts of --model; a node downloads weights, or draws shared ones, once.

    Args:
        offline: use no network.
    """
    name, whole = model_settings.model, strategy.whole_parameters
    # Ranks share a file of random weights; shards and weights under adapters are read from it.
    shared = ctx.real_world_size > 1 or not whole or model_settings.lora_r is not None
    console.print0("📥 Loading model and tokenizer...")
    if not offline and names_on_hub(name, data.dataset)[0]:
        console.print0(f"⏳ Downloading {name}, unless it is in the cache")

    def prepare() -> Prepared:
        parts = locate(model_settings, data.cache_dir, True, offline)
        found = getattr(parts.config, "quantization_config", None)
        if parts.weights and found and not (training.eval_only and whole):
            from distributed_training.model import quantized

            raise quantized.refusal(f"--model {name}", found)
        prepared = _prepare_folders(parts, name, training.seed, shared)
        if model_settings.lora_r is not None:
            from distributed_training.model.frozen import identity_of  # only with the flag

            prepared["frozen"] = identity_of(parts.config, parts.weights, prepared["weights"])
        return prepared

    return ctx.once_per_node("model", prepare)


def find_tokenizer(
    settings: Settings, ctx: DistContext
) -> tuple[PreTrainedTokenizerBase, int | None]:
    """Download the parts of --model; return its tokenizer and its limit of positions, or None."""

    def parts() -> dict:
        needed, offline = not settings.command.show_sample, settings.hub.offline
        found = locate(settings.model, settings.data.cache_dir, needed, offline)
        return {"tokenizer": found.tokenizer, "positions": max_positions(found.config)}

    be_quiet(settings.debug.verbose)
    found = ctx.once_per_node("tokenizer", parts)
    what, template = f"--model {settings.model.model}", settings.data.chat_template
    return read_tokenizer(found["tokenizer"], what, template), found["positions"]


def be_quiet(verbose: bool) -> None:
    """Hide the messages of transformers, unless they are requested."""
    if not verbose:
        if os.environ.get("TRANSFORMERS_VERBOSITY", "error") == "error":  # else it is the user's
            transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()


def _prepare_folders(located: Located, name: str, seed: int, shared: bool) -> Prepared:
    """Prepare folders with weights and tokenizer that every rank of the node can load.

    Args:
        name: --model.
        shared: save random weights, too; otherwise `ModelSpec.load` draws them.
    """
    from distributed_training.model.tokenizer_file import disagreements  # once per node

    config, tokenizer, folder, notices = located
    if getattr(config.get_text_config(), "output_router_logits", False):
        from distributed_training.model.experts import WITHOUT_BALANCING

        notices.append(WITHOUT_BALANCING)
    what = f"--model {name}"
    read = read_tokenizer(tokenizer, what)
    rows, notices = number_of_ids(read), notices + disagreements(tokenizer, read)
    added = max(0, rows - config.get_text_config().vocab_size)
    enlarged, model = added > 0, None
    random, new_rows = enlarged or folder is None, added if folder else 0
    own_head = folder is not None and weights.check_folder(folder, config, what)
    if own_head:
        weights.untie(config)
        notices.append(
            "The output layer differs from the embedding in the weight files, although config.json "
            "ties them (tie_word_embeddings): the weight in the files is used, and trained alone."
        )
    torch.manual_seed(seed)
    if folder is None and (shared or enlarged):
        model = weights.from_config(config)
    elif folder and enlarged:
        model, info = weights.from_folder(folder, config)
        weights.report_differences(folder, model, info)
    if model and enlarged:
        torch.manual_seed(seed)
        model.resize_token_embeddings(rows)
        config = model.config
        notices.append(f"The embedding was enlarged to {rows:,} rows, for the tokenizer's ids.")
    if folder is None or enlarged:
        folder = weights.save_temporarily(config, model)
    return {
        "weights": folder,
        "tokenizer": tokenizer,
        "notices": notices,
        "random": random,
        "new_rows": new_rows,
        "own_head": own_head,
        "frozen": {},
    }
