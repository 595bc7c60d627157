"""Resolve --model to an architecture, a tokenizer and a local folder with the weights.

Every kind of --model results in a local folder, which each strategy loads in its own way. Ranks
that share random weights find them there; one process alone draws them when it loads the model.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from support import console, patches
from support.cli.checks import is_local_model, names_on_hub, scratch_without_hub
from support.cluster.context import DistContext
from support.errors import TrainingError, UserError, redact, refused_as
from support.files.atomic import remove_temporary_folder, write_text
from support.files.cache import Cache, cache_folder
from support.files.user_files import read_json, read_text
from support.gpu_generations import shares_keys
from support.known_models import CONFIGS, EMBEDDED_MODEL, EMBEDDED_VOCABULARY
from support.model import weights
from support.model.download import download
from support.model.isolation import check_isolation
from support.model.lora import Lora
from support.model.loss import add_loss, computes_loss, returns_plain_logits
from support.settings.data import choose_seq_length
from support.settings.model import ModelSettings
from support.settings.settings import Settings
from support.strategies.wrapped import full_shape

END_OF_TEXT = "<|endoftext|>"


@dataclass
class ModelSpec:
    """Everything of a model except its weights in memory; counts include adapters."""

    # Transformers configuration, with the run's changes (dropout, vocabulary) applied.
    config: transformers.PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig
    weights: str  # local folder that `load` reads
    seed: int  # for weights that the folder lacks
    seq_length: int  # tokens of a sequence: --seq_length, or its default for this model
    # The weights, or rows of the embedding, are drawn from the seed for this run.
    random: bool = False
    new_rows: int = 0  # rows added to an embedding that was not random
    lora: Lora | None = None  # the configuration of its adapters
    dtype: torch.dtype = torch.float32  # of the weights that `load` returns; adapters are in fp32
    # `load` returns the weights of linear layers in 4 bits, on the rank's device.
    load_in_4bit: bool = False
    # Original values of settings that the run has replaced; an exported model gets them back.
    own_settings: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The output layer computes the loss in chunks; see support/model/loss.py.
        self.chunked_loss = returns_plain_logits(self.config)
        model = self.on_meta_device()
        head = model.get_output_embeddings()
        # An embedding lookup is no matrix multiplication, unless the output layer shares the table.
        lookups = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        # The output layer shares the weight of the input embedding.
        self.tied = head is not None and head.weight in lookups
        lookups -= {head.weight} if self.tied else set()
        sizes = {weight: weight.numel() for weight in model.parameters()}
        trained = {weight: size for weight, size in sizes.items() if weight.requires_grad}
        self._names = [name for name, _ in model.named_parameters()]
        self.parameters, self.trainable = sum(sizes.values()), sum(trained.values())
        self.largest_parameter = max(sizes.values())
        # Those that take part in matrix multiplications.
        self.matmul_parameters, self.trainable_matmul = (
            sum(size for weight, size in counted.items() if weight not in lookups)
            for counted in (sizes, trained)
        )

    @property
    def text_config(self) -> transformers.PretrainedConfig:
        """Configuration of the language model; the whole configuration if it has no parts."""
        return self.config.get_text_config()

    def on_meta_device(self) -> nn.Module:
        """Build the model on the meta device: shapes without memory."""
        with torch.device("meta"):
            model = weights.from_config(self.config, self.dtype)
        return self._prepare(model)

    def load(self, ctx: DistContext, dtype: torch.dtype | str | None = None) -> nn.Module:
        """Load the model with its weights on the CPU.

        Args:
            dtype: instead of `self.dtype`; "auto": memory-mapped from the file, not copied.
        """
        console.print0("⏳ Loading the weights")
        torch.manual_seed(self.seed)
        if self.random and not Path(self.weights, "model.safetensors").exists():
            return self._prepare(weights.from_config(self.config))
        in_4bit = ctx.device if self.load_in_4bit and dtype is None else None
        model, info = weights.from_folder(self.weights, self.config, dtype or self.dtype, in_4bit)
        weights.report_differences(self.weights, model, info)
        model = self._prepare(model)
        if [name for name, _ in model.named_parameters()] != self._names:
            raise TrainingError(
                f"The model that transformers loaded from {self.weights} shares other weights than "
                "its config.json describes: set tie_word_embeddings there to what the files hold."
            )
        return model

    def remove_drawn_weights(self) -> None:
        """Remove the folder of the weights if they were drawn for this run; call it once loaded."""
        remove_temporary_folder(Path(self.weights))

    def describe(self, folder: Path, dtype: torch.dtype | None = None, whole: bool = False) -> None:
        """Write everything of the model except its weights: configurations and tokenizer.

        Args:
            dtype: the type of the weights, recorded in the configuration; None leaves it unchanged.
            whole: describe the model itself and not its adapters, which have been added to it.
        """
        folder.mkdir(exist_ok=True)
        self.tokenizer.save_pretrained(folder)
        if self.lora and not whole:
            self.lora.save_config(folder)
            return
        config = copy.deepcopy(self.config)
        config.name_or_path = redact(config.name_or_path)  # saved by older versions of transformers
        config.use_cache = True  # disabled for training only
        config.get_text_config().update(self.own_settings)
        config.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
        if dtype is not None:
            config.update(weights.as_dtype(dtype))
        config.save_pretrained(folder)
        # save_pretrained of older versions rejects the generation configuration of some models.
        write_text(folder / "generation_config.json", self.generation.to_json_string())

    def _prepare(self, model: nn.Module) -> nn.Module:
        if self.lora:
            self.lora.attach(model)
        if self.chunked_loss and type(model.get_output_embeddings()) is nn.Linear:  # no adapters
            add_loss(model)
        return model


# ------------------------------------------------------------------- settings of an architecture


def fuse_gelu(config) -> dict[str, str]:
    """Replace GPT-2's activation by the same function in one kernel; return the original settings.

    transformers' gelu_new computes the tanh approximation of GELU (Hendrycks and Gimpel, arXiv
    1606.08415) in eight operations; gelu_pytorch_tanh is PyTorch's own implementation.
    """
    text_config = config.get_text_config()
    replaced = {name: value for name, value in text_config.to_dict().items() if value == "gelu_new"}
    text_config.update(dict.fromkeys(replaced, "gelu_pytorch_tanh"))
    return replaced


def set_dropout(config, probability: float) -> None:
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


def max_positions(config) -> int | None:
    """Return the longest sequence that the model supports; None if it has no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


# -------------------------------------------------------------------------------- resolving --model


class Located(NamedTuple):
    """The parts of --model on this machine."""

    config: transformers.PretrainedConfig
    tokenizer: str  # its folder
    weights: str | None  # their folder; None: they are drawn from the seed
    notices: list[str]  # for the user


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
    locate = partial(_locate, model_settings, data.cache_dir, True, offline)
    found: Prepared = ctx.once_per_node(
        "model", lambda: _prepare_folders(locate(), name, seed, shared)
    )
    config = _read_config(found["weights"], name)
    tokenizer = _read_tokenizer(found["tokenizer"], name, data.chat_template)
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

    def locate() -> dict:
        needed, offline = not settings.command.show_sample, settings.hub.offline
        found = _locate(settings.model, settings.data.cache_dir, needed, offline)
        return {"tokenizer": found.tokenizer, "positions": max_positions(found.config)}

    _be_quiet(settings.debug.verbose)
    found = ctx.once_per_node("tokenizer", locate)
    name, template = settings.model.model, settings.data.chat_template
    return _read_tokenizer(found["tokenizer"], name, template), found["positions"]


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


def _locate(
    model_settings: ModelSettings, cache_dir: str | None, with_weights: bool, offline: bool
) -> Located:
    """Find the parts of --model on this machine, and download or build those that are missing.

    Args:
        with_weights: also download the weights; not with --from_scratch.
        offline: use no network.
    """
    name = model_settings.model
    if name == EMBEDDED_MODEL:
        # Dropout 0, as is usual for pretraining from random weights; --dropout changes it.
        return Located(_gpt2_config(name, 0.0, 0), embedded_tokenizer(cache_dir), None, [])

    needed = with_weights and not model_settings.from_scratch
    download_it = partial(download, name, model_settings.model_revision, needed, offline)
    if is_local_model(name) or not scratch_without_hub(model_settings):
        folder = name if is_local_model(name) else download_it()
        config = _read_config(folder, name)
        return Located(config, folder, None if model_settings.from_scratch else folder, [])
    config = _gpt2_config(name, 0.1, 50256)
    try:
        folder = download_it()
        _read_tokenizer(folder, name)
        return Located(config, folder, None, [])
    except UserError:
        notice = f"The tokenizer of {name} is not available: using the embedded one."
        return Located(config, embedded_tokenizer(cache_dir), None, [notice])


def _prepare_folders(located: Located, name: str, seed: int, shared: bool) -> Prepared:
    """Prepare folders with weights and tokenizer that every rank of the node can load.

    Args:
        name: --model.
        shared: save random weights, too; otherwise `ModelSpec.load` draws them.
    """
    config, tokenizer, folder, notices = located
    entries = len(_read_tokenizer(tokenizer, name))
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


def _read_config(folder: str, name: str) -> transformers.PretrainedConfig:
    with refused_as(f"--model {name}: its config.json cannot be used"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **weights.NO_REMOTE_CODE)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"--model {name} is a {config.model_type}, which is not a causal language model."
        )
    return config


def _read_generation_config(folder: str, config: transformers.PretrainedConfig) -> GenerationConfig:
    """Return the settings of generation; older models have them in their config.json, or none."""
    file = Path(folder, "generation_config.json")
    if not file.exists():
        return GenerationConfig.from_model_config(config)
    with refused_as(f"{file} cannot be used; correct or remove it"):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)


def _read_tokenizer(
    folder: str, name: str, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder.

    Args:
        name: --model, for messages.
        chat_template: a file with the template of conversations; None: the tokenizer's own.
    """
    patterns = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
    if not any(file for pattern in patterns for file in Path(folder).glob(pattern)):
        raise UserError(
            f"--model {name}: there are no tokenizer files "
            "(tokenizer.json, or vocab.json and merges.txt)."
        )
    options = {"local_files_only": True, **weights.NO_REMOTE_CODE}
    with refused_as(f"--model {name}: its tokenizer files cannot be used; copy them again"):
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        except Exception:
            _name_damaged_file(Path(folder))
            raise
    if chat_template:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    return tokenizer


def _name_damaged_file(folder: Path) -> None:
    """Raise a UserError that names the tokenizer's file that is not JSON or text, if there is one.

    The messages of the libraries do not name the file.
    """
    for name in ("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"):
        for file in sorted(folder.glob(name)):
            read_json("The tokenizer's file", str(file))
    for file in (*sorted(folder.glob("*.jinja")), folder / "merges.txt"):
        if file.is_file():
            read_text("The tokenizer's file", str(file))


def _gpt2_config(name: str, dropout: float, end_of_text: int) -> transformers.GPT2Config:
    """Return the configuration of a GPT-2 architecture in support/known_models.py."""
    settings = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
    settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    settings |= dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text)
    return transformers.GPT2Config(**settings, architectures=["GPT2LMHeadModel"])


def embedded_tokenizer(cache_dir: str | None) -> str:
    """Return the folder of tiny-gpt2's tokenizer, a BPE trained on the Python reference."""
    from pydoc_data.topics import topics

    from tokenizers import ByteLevelBPETokenizer

    text = [topics[name] for name in sorted(topics)]
    digest = hashlib.sha256("\0".join(text).encode()).hexdigest()[:16]

    def train(folder: Path) -> dict:
        tokenizer = ByteLevelBPETokenizer()
        options = {"special_tokens": [END_OF_TEXT], "show_progress": False}
        tokenizer.train_from_iterator(text, EMBEDDED_VOCABULARY, min_frequency=2, **options)
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer._tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT
        ).save_pretrained(folder)
        return {}

    cache = Cache(cache_folder(cache_dir))
    # transformers 4 cannot read what transformers 5 writes.
    written_by = transformers.__version__.partition(".")[0]
    folder, _ = cache.get(f"{EMBEDDED_MODEL}-tokenizer-{written_by}-{digest}", train)
    return str(folder)
