"""Resolve --model to an architecture, a tokenizer and a local folder with the weights.

Every kind of --model results in a local folder, which each strategy loads in its own way. Random
weights are also drawn once per node and saved to a temporary folder; a single process of dp draws
them when it loads the model.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from support import patches
from support.cli.arguments import Arguments, choose_seq_length, isolates_documents
from support.cli.checks import is_local_model, scratch_without_hub
from support.cluster.context import DistContext
from support.errors import UserError, first_line, refused_as
from support.files.atomic import write_text
from support.files.cache import Cache
from support.files.hub_cache import cache_folder, login_command
from support.model import weights
from support.model.isolation import check_isolation, choose_block_mask
from support.model.layers import fuse_gelu, max_positions, set_dropout
from support.model.lora import Lora
from support.model.loss import add_loss, returns_plain_logits
from support.tables import CONFIGS, EMBEDDED_MODEL, EMBEDDED_VOCABULARY, STRATEGIES

END_OF_TEXT = "<|endoftext|>"


@dataclass
class ModelSpec:
    """Everything of a model except its weights in memory; counts include adapters."""

    # Transformers configuration, with the run's changes (dropout, vocabulary) applied.
    config: transformers.PretrainedConfig
    tokenizer: transformers.PreTrainedTokenizerBase
    generation: GenerationConfig
    weights: str  # local folder that `load` reads
    seed: int  # for weights that the folder lacks
    lora: Lora | None = None  # the model's adapters, or None
    dtype: torch.dtype = torch.float32  # of the weights that `load` returns; adapters are in fp32
    # `load` returns the weights of linear layers in 4 bits, on the rank's device.
    load_in_4bit: bool = False
    # The weights, or rows of the embedding, were drawn from the seed for this run.
    random: bool = False
    draws_weights: bool = False  # `load` draws them, because `weights` has only a config.json
    # Original values of settings that the run has replaced; an exported model gets them back.
    own_settings: dict = field(default_factory=dict)
    parameters: int = field(init=False)
    trainable: int = field(init=False)
    matmul_parameters: int = field(init=False)  # those that take part in matrix multiplications
    trainable_matmul: int = field(init=False)
    largest_parameter: int = field(init=False)
    tied: bool = field(init=False)  # the output layer shares the weight of the input embedding
    # The output layer computes the loss in chunks; see support/model/loss.py.
    chunked_loss: bool = field(init=False)

    def __post_init__(self) -> None:
        self.chunked_loss = returns_plain_logits(self.config)
        model = self.on_meta_device()
        head = model.get_output_embeddings()
        # An embedding lookup is no matrix multiplication, unless the output layer shares the table.
        lookups = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        self.tied = head is not None and head.weight in lookups
        lookups -= {head.weight} if self.tied else set()
        all_weights = list(model.parameters())
        matrices = [weight for weight in all_weights if weight not in lookups]
        self.parameters, self.trainable = _counts(all_weights)
        self.matmul_parameters, self.trainable_matmul = _counts(matrices)
        self.largest_parameter = max(weight.numel() for weight in all_weights)

    @property
    def text_config(self) -> transformers.PretrainedConfig:
        """Configuration of the language model; the whole configuration if it has no parts."""
        return self.config.get_text_config()

    def seq_length(self, args: Arguments) -> int:
        """Return --seq_length, or its default for this model."""
        return choose_seq_length(args, max_positions(self.config))

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
        torch.manual_seed(self.seed)
        if self.draws_weights:
            return self._prepare(weights.from_config(self.config))
        in_4bit = ctx.device if self.load_in_4bit and dtype is None else None
        model, info = weights.from_folder(self.weights, self.config, dtype or self.dtype, in_4bit)
        if names := sorted(info["missing_keys"]):
            shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
            ctx.console.warn(
                f"The checkpoint has no weights for {shown}: they are initialized randomly."
            )
        return self._prepare(model)

    def describe(self, folder: Path, dtype: torch.dtype | None = None, whole: bool = False) -> None:
        """Write everything of the model except its weights: configurations and tokenizer.

        Args:
            dtype: the type of the weights, recorded in the configuration; None leaves it unchanged.
            whole: describe the model itself and not its adapters, which have been added to it.
        """
        folder.mkdir(exist_ok=True)
        self.tokenizer.save_pretrained(folder)
        if self.lora and not whole:
            self.lora.describe(folder)
            return
        config = copy.deepcopy(self.config)
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


def _counts(parameters: list[nn.Parameter]) -> tuple[int, int]:
    """Return the number of elements, and of those that are trained."""
    sizes = [(p.numel(), p.requires_grad) for p in parameters]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


# -------------------------------------------------------------------------------- resolving --model


def find_model(args: Arguments, ctx: DistContext) -> ModelSpec:
    """Resolve --model to a `ModelSpec`; weights are downloaded, or drawn, once per node.

    Raises:
        UserError: the model cannot be found or downloaded, is no causal language model, or cannot
            isolate documents.
    """
    _be_quiet(args)
    if not args.hub_offline:
        ctx.console.print0(f"⏳ Downloading {args.model}, unless it is in the cache")
    prepared = ctx.once_per_node("model", lambda: _prepare_folders(args, ctx))
    folder = prepared["weights"]
    config = _read_config(folder, args.model)
    tokenizer = _read_tokenizer(prepared["tokenizer"], args)
    for notice in prepared["notices"]:
        ctx.console.warn(notice)
    config.use_cache = False
    own_settings = fuse_gelu(config) if args.fused_gelu else {}
    if args.dropout is not None:
        set_dropout(config, args.dropout, ctx)
    with refused_as(f"--model {args.model}: no model can be built from its configuration"):
        # Older models have it in their config.json, or not at all.
        generation = GenerationConfig.from_model_config(config)
        if (Path(folder) / "generation_config.json").exists():
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        spec = ModelSpec(
            config,
            tokenizer,
            generation,
            folder,
            args.seed,
            lora=Lora.of(args),
            dtype=weights.weights_dtype(args, ctx),
            load_in_4bit=args.load_in_4bit,
            random=prepared["random"],
            draws_weights=prepared["draws_weights"],
            own_settings=own_settings,
        )
    if isolates_documents(args):
        check_isolation(config, tokenizer, args)
        choose_block_mask(config, ctx.device)
    return spec


def find_tokenizer(args: Arguments, ctx: DistContext) -> tuple[PreTrainedTokenizerBase, int | None]:
    """Download the parts of --model; return its tokenizer, and its most positions (None: any)."""

    def locate() -> dict:
        location = _locate(args, ctx)
        return {"tokenizer": location.tokenizer, "positions": max_positions(location.config)}

    _be_quiet(args)
    found = ctx.once_per_node("tokenizer", locate)
    return _read_tokenizer(found["tokenizer"], args), found["positions"]


def configure_transformers(args: Arguments) -> None:
    """Keep transformers from reading tensors on the device in each forward pass."""
    patches.replace_packed_sequence_check(isolates_documents(args))
    patches.skip_padding_check()


def _be_quiet(args: Arguments) -> None:
    if not args.verbose:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()


class Location(NamedTuple):
    """Where a model's parts are."""

    config: transformers.PretrainedConfig
    tokenizer: str  # the folder of the tokenizer
    weights: str | None = None  # the folder of the weights; None: they are drawn from the seed
    notices: tuple[str, ...] = ()


def _locate(args: Arguments, ctx: DistContext) -> Location:
    """Find the parts of --model on this machine, and download or build those that are missing."""
    if args.model == EMBEDDED_MODEL:
        # Dropout 0, as is usual for pretraining from random weights; --dropout changes it.
        return Location(_gpt2_config(args.model, 0.0, 0), embedded_tokenizer(args, ctx))
    if is_local_model(args.model):
        folder = args.model
    elif scratch_without_hub(args):
        return _locate_without_hub(args, ctx)
    else:
        with_weights = not (args.from_scratch or args.show_sample)
        folder = download(args.model, args.model_revision, args.hub_offline, with_weights)
    config = _read_config(folder, args.model)
    return Location(config, folder, None if args.from_scratch else folder)


def _locate_without_hub(args: Arguments, ctx: DistContext) -> Location:
    """Return a GPT-2 for --from_scratch, with the embedded tokenizer if its own is not cached."""
    config = _gpt2_config(args.model, dropout=0.1, end_of_text=50256)
    try:
        folder = download(args.model, args.model_revision, args.hub_offline, with_weights=False)
        _read_tokenizer(folder, args)
        return Location(config, folder)
    except UserError:
        notice = (
            f"The tokenizer of {args.model} is not in the cache and cannot be downloaded: "
            "using the embedded one (4,096 entries)."
        )
        return Location(config, embedded_tokenizer(args, ctx), notices=(notice,))


def _prepare_folders(args: Arguments, ctx: DistContext) -> dict:
    """Prepare folders with weights and tokenizer that every rank of the node can load."""
    location = _locate(args, ctx)
    config, folder, notices = location.config, location.weights, list(location.notices)
    entries = len(_read_tokenizer(location.tokenizer, args))
    larger = entries > config.get_text_config().vocab_size
    # A single process of dp draws the weights while it loads: the file of GPT-2 124M takes 0.8 s to
    # write. Other engines shard while they read a file, and --merge_lora reads it again.
    draws_weights = folder is None and not (larger or args.lora_r or ctx.failures.store)
    draws_weights = draws_weights and STRATEGIES[args.strategy].engine == "ddp"
    if folder is None:
        torch.manual_seed(args.seed)
        drawn = None if draws_weights else weights.from_config(config)
        folder = weights.save_temporarily(config, drawn, ctx)
    if larger:
        model, _ = weights.from_folder(folder, config)
        torch.manual_seed(args.seed)
        model.resize_token_embeddings(entries)
        folder = weights.save_temporarily(model.config, model, ctx)
        notices.append(
            f"The tokenizer has {entries:,} entries, more than the model: "
            "its embedding was enlarged."
        )
    return {
        "weights": folder,
        "tokenizer": location.tokenizer,
        "notices": notices,
        "random": folder != location.weights,
        "draws_weights": draws_weights,
    }


def _read_config(folder: str, name: str) -> transformers.PretrainedConfig:
    with refused_as(f"--model {name}: its config.json cannot be used"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **weights.NO_REMOTE_CODE)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"--model {name} is a {config.model_type}, which is not a causal language model."
        )
    return config


def _read_tokenizer(folder: str, args: Arguments) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder, with the template of --chat_template."""
    patterns = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
    if not any(file for pattern in patterns for file in Path(folder).glob(pattern)):
        raise UserError(
            f"--model {args.model}: there are no tokenizer files "
            "(tokenizer.json, or vocab.json and merges.txt)."
        )
    options = {"local_files_only": True, **weights.NO_REMOTE_CODE}
    with refused_as(f"--model {args.model}: its tokenizer cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    if args.chat_template:
        tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
    return tokenizer


def download(name: str, revision: str | None, offline: bool, with_weights: bool) -> str:
    """Return the local snapshot of a model on the hub; download it if it is not in the cache.

    Only the files that training needs are downloaded: configuration, tokenizer and safetensors in
    the top folder. Pickled weights are downloaded only if there are no safetensors.
    """
    from huggingface_hub import HfApi, errors, snapshot_download

    patterns = ["*.json", "*.txt", "*.model", "*.tiktoken"]
    try:
        if with_weights and not offline:
            files = HfApi().list_repo_files(name, revision=revision)
            safe = any(file.endswith(".safetensors") and "/" not in file for file in files)
            patterns.append("*.safetensors" if safe else "pytorch_model*.bin")
        return snapshot_download(
            name,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=["*/*", "consolidated*"],
            local_files_only=offline,
        )
    except Exception as error:  # the clients raise many classes, which differ between versions
        problem = f" cannot be downloaded: {first_line(error)}"
        if isinstance(error, errors.GatedRepoError):
            problem = f" is gated: accept its license and log in with `{login_command()}`."
        elif isinstance(error, errors.RevisionNotFoundError):
            problem = f" has no branch, tag or commit {revision} (--model_revision)."
        elif isinstance(error, errors.RepositoryNotFoundError):
            problem = ": there is no such model on the hub (or it is private), and no such folder."
        raise UserError(f"--model {name}{problem}") from error


def _gpt2_config(name: str, dropout: float, end_of_text: int) -> GPT2Config:
    """Return the configuration of a GPT-2 architecture in known_models."""
    settings = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
    settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    settings |= dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text)
    return GPT2Config(**settings, architectures=["GPT2LMHeadModel"])


def embedded_tokenizer(args: Arguments, ctx: DistContext) -> str:
    """Return the folder of tiny-gpt2's tokenizer, a BPE trained on the Python reference."""
    from pydoc_data.topics import topics

    from tokenizers import ByteLevelBPETokenizer

    text = [topics[name] for name in sorted(topics)]
    digest = hashlib.sha256("\0".join(text).encode()).hexdigest()[:16]

    def train(folder: Path) -> dict:
        tokenizer = ByteLevelBPETokenizer()
        options = {"special_tokens": [END_OF_TEXT], "show_progress": False}
        tokenizer.train_from_iterator(text, EMBEDDED_VOCABULARY, min_frequency=2, **options)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer._tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT
        ).save_pretrained(folder)
        return {}

    cache = Cache(cache_folder(args.cache_dir), ctx.temporary, ctx.console.print)
    # transformers 4 cannot read what transformers 5 writes.
    written_by = transformers.__version__.partition(".")[0]
    folder, _ = cache.get(f"{EMBEDDED_MODEL}-tokenizer-{written_by}-{digest}", train)
    return str(folder)
