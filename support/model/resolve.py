"""Resolve --model to a ModelSpec: an architecture, a tokenizer, a local folder with the weights.

Every kind of --model results in a local folder, which each strategy loads in its own way. Ranks
that share random weights find them there; one process alone draws them when it loads the model.
"""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from support import console, patches
from support.cli.checks import names_on_hub
from support.cluster.context import DistContext
from support.errors import refused_as
from support.gpu_generations import shares_keys
from support.model import weights
from support.model.isolation import check_isolation
from support.model.locate import Located, locate, read_config
from support.model.lora import Lora
from support.model.loss import computes_loss
from support.model.spec import ModelSpec
from support.model.tokenizer import read_tokenizer
from support.settings.data import choose_seq_length
from support.settings.model import ModelSettings
from support.settings.settings import Settings
from support.strategies.wrapped import full_shape

# ------------------------------------------------------------------- settings of an architecture


def fuse_gelu(config: transformers.PretrainedConfig) -> dict[str, str]:
    """Replace GPT-2's activation by the same function in one kernel; return the original settings.

    transformers' gelu_new computes the tanh approximation of GELU (Hendrycks and Gimpel, arXiv
    1606.08415) in eight operations; gelu_pytorch_tanh is PyTorch's own implementation.
    """
    text_config = config.get_text_config()
    replaced = {name: value for name, value in text_config.to_dict().items() if value == "gelu_new"}
    text_config.update(dict.fromkeys(replaced, "gelu_pytorch_tanh"))
    return replaced


def set_dropout(config: transformers.PretrainedConfig, probability: float) -> None:
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


def max_positions(config: transformers.PretrainedConfig) -> int | None:
    """Return the longest sequence that the model supports; None if it has no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


# -------------------------------------------------------------------------------- resolving --model


class Prepared(TypedDict):
    """The parts of a model that every rank of the node can load, as JSON."""

    weights: str  # folder
    tokenizer: str  # folder
    notices: list[str]  # for the user
    random: bool  # see ModelSpec
    new_rows: int  # see ModelSpec
    own_head: bool  # see `weights.check_folder`


def find_model(settings: Settings, ctx: DistContext) -> ModelSpec:
    """Resolve --model to a `ModelSpec`; a node downloads weights, or draws shared ones, once.

    Raises:
        UserError: the model cannot be found or downloaded, is no causal language model, has less
            than --seq_length positions, or cannot isolate documents.
    """
    model_settings, data, offline = settings.model, settings.data, settings.hub.offline
    name, seed = model_settings.model, settings.training.seed
    adapters, strategy = model_settings.lora_r is not None, settings.parallelism.configured
    _be_quiet(settings.debug.verbose)
    console.print0("📥 Loading model and tokenizer...")
    if not offline and names_on_hub(name, data.dataset)[0]:
        console.print0(f"⏳ Downloading {name}, unless it is in the cache")
    # Ranks share a file of random weights. Shards and weights under adapters are read from it, too.
    shared = ctx.real_world_size > 1 or not strategy.whole_parameters or adapters
    parts = partial(locate, model_settings, data.cache_dir, True, offline)
    found: Prepared = ctx.once_per_node(
        "model", lambda: _prepare_folders(parts(), name, seed, shared)
    )
    config = read_config(found["weights"], name)
    tokenizer = read_tokenizer(found["tokenizer"], name, data.chat_template)
    for notice in found["notices"]:
        console.warn(notice)
    if found["own_head"]:
        weights.untie(config)
    own_settings = _apply_flags(config, model_settings)
    generation = _read_generation_config(found["weights"], config)
    with refused_as(weights.NOT_BUILT.format(f"--model {name}")):
        spec = ModelSpec(
            config,
            tokenizer,
            generation,
            found["weights"],
            seed,
            choose_seq_length(data.seq_length, name, max_positions(config)),
            random=found["random"],
            new_rows=found["new_rows"],
            lora=Lora.of(model_settings, seed),
            dtype=weights.weights_dtype(strategy, adapters, ctx),
            load_in_4bit=model_settings.load_in_4bit,
            own_settings=own_settings,
        )
    if data.isolates_documents:
        check_isolation(config, tokenizer, name, data.packing)
    return spec


def _apply_flags(
    config: transformers.PretrainedConfig, model_settings: ModelSettings
) -> dict[str, str]:
    """Change the configuration as the flags request; return original values, see ModelSpec."""
    config.use_cache = False
    own_settings = fuse_gelu(config) if model_settings.fused_gelu else {}
    if model_settings.dropout is not None:
        set_dropout(config, model_settings.dropout)
    return own_settings


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of `_no_split_modules`, or else those of the largest ModuleList.

    The model may be sharded: FSDP2 replaces a module's class by a subclass with another name, and
    ZeRO-3 empties parameters.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())

    def is_block(module: nn.Module) -> bool:
        return any(cls.__name__ in names for cls in type(module).__mro__)

    def size(layers: nn.ModuleList) -> int:
        return sum(math.prod(full_shape(parameter)) for parameter in layers.parameters())

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = [module for module in model.modules() if is_block(module)]
    return blocks or list(max(lists, key=size, default=[]))


def prepare_forward(model: nn.Module, model_settings: ModelSettings, spec: ModelSpec) -> None:
    """Apply --gradient_checkpointing and --compile, then remove random weights from the disk."""
    if model_settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if model_settings.compile:
        layers = transformer_blocks(model)  # identical ones share a graph
        if computes_loss(model):
            layers.append(model.get_output_embeddings())
        for layer in layers:
            layer.compile()
    dist.barrier()  # all ranks have read the weights
    if not model_settings.merge_lora:  # --merge_lora reads the weights again at the end
        spec.remove_drawn_weights()  # the temporary folder of weights that were drawn from --seed


def copy_to_device(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device; on a CPU, copy the weights that are trained from their mapped file.

    Otherwise the first update copies them on several threads, and for each page the kernel
    interrupts the cores of the others (benchmarks/RESULTS.md).
    """
    model.to(device)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_cpu:
            # Writes each page; PyTorch uses one thread for less than 2^15 elements.
            for part in parameter.detach().flatten().split(2**14):
                part.mul_(1)


def find_tokenizer(
    settings: Settings, ctx: DistContext
) -> tuple[PreTrainedTokenizerBase, int | None]:
    """Download the parts of --model; return its tokenizer and its limit of positions, or None."""

    def parts() -> dict:
        needed, offline = not settings.command.show_sample, settings.hub.offline
        found = locate(settings.model, settings.data.cache_dir, needed, offline)
        return {"tokenizer": found.tokenizer, "positions": max_positions(found.config)}

    _be_quiet(settings.debug.verbose)
    found = ctx.once_per_node("tokenizer", parts)
    name, template = settings.model.model, settings.data.chat_template
    return read_tokenizer(found["tokenizer"], name, template), found["positions"]


def _be_quiet(verbose: bool) -> None:
    """Hide the messages of transformers, unless they are requested."""
    if not verbose:
        if os.environ.get("TRANSFORMERS_VERBOSITY", "error") == "error":  # else it is the user's
            transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()


def configure_transformers(isolates_documents: bool, ctx: DistContext) -> None:
    """Keep transformers from reading tensors on the device, and from storing attention scores."""
    patches.replace_packed_sequence_check(isolates_documents)
    patches.skip_padding_check()
    if not shares_keys(ctx.device.type, ctx.precision, ctx.capability):
        patches.repeat_keys_and_values()


def _prepare_folders(located: Located, name: str, seed: int, shared: bool) -> Prepared:
    """Prepare folders with weights and tokenizer that every rank of the node can load.

    Args:
        name: --model.
        shared: save random weights, too; otherwise `ModelSpec.load` draws them.
    """
    config, tokenizer, folder, notices = located
    entries = len(read_tokenizer(tokenizer, name))
    added = max(0, entries - config.get_text_config().vocab_size)
    enlarged, model = added > 0, None
    random, new_rows = enlarged or folder is None, added if folder else 0
    own_head = folder is not None and weights.check_folder(folder, config, f"--model {name}")
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
        model.resize_token_embeddings(entries)
        config = model.config
        notices.append(f"The embedding was enlarged to the tokenizer's {entries:,} entries.")
    if folder is None or enlarged:
        folder = weights.save_temporarily(config, model)
    return {
        "weights": folder,
        "tokenizer": tokenizer,
        "notices": notices,
        "random": random,
        "new_rows": new_rows,
        "own_head": own_head,
    }


def _read_generation_config(folder: str, config: transformers.PretrainedConfig) -> GenerationConfig:
    """Return the settings of generation; older models have them in their config.json, or none."""
    file = Path(folder, "generation_config.json")
    if not file.exists():
        return GenerationConfig.from_model_config(config)
    with refused_as(f"{file} cannot be used; correct or remove it"):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
