"""ModelSpec: a model without its weights in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from distributed_training import console
from distributed_training.errors import TrainingError, refused_as
from distributed_training.files.atomic import remove_temporary_folder
from distributed_training.files.json_types import JsonObject
from distributed_training.model import resolve, weights
from distributed_training.model.config import (
    apply_flags,
    max_positions,
    read_config,
    read_generation_config,
)
from distributed_training.model.loss import (
    OutputLayer,
    add_loss,
    computes_loss,
    returns_plain_logits,
)
from distributed_training.model.tokenizer import read_tokenizer
from distributed_training.ranks.context import DistContext
from distributed_training.settings.data import DataSettings, choose_seq_length
from distributed_training.settings.model import ModelSettings
from distributed_training.settings.settings import Settings

if TYPE_CHECKING:
    from distributed_training.model.lora import Lora


@dataclass(frozen=True)
class WeightSource:
    """Where a model's weights come from, and how they are loaded."""

    folder: str  # local folder that `ModelSpec.load` reads
    seed: int  # for weights that the folder lacks
    # The weights, or rows of the embedding, are drawn from the seed for this run.
    random: bool = False
    new_rows: int = 0  # rows added to an embedding that was not random
    dtype: torch.dtype = torch.float32  # of the loaded weights; adapters are in fp32
    in_4bit: bool = False  # weights of linear layers are loaded in 4 bits, on the rank's device
    frozen: JsonObject = field(default_factory=dict)  # under adapters: see `frozen.identity_of`

    @classmethod
    def of(
        cls, found: resolve.Prepared, model: ModelSettings, seed: int, dtype: torch.dtype
    ) -> WeightSource:
        """Return the source of the folders that were found for --model."""
        random, rows, frozen = found["random"], found["new_rows"], found["frozen"]
        return cls(found["weights"], seed, random, rows, dtype, model.load_in_4bit, frozen)

    def remove_drawn(self) -> None:
        """Remove the folder if its weights were drawn for this run; call it once loaded."""
        remove_temporary_folder(Path(self.folder))


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters, adapters included; tied weights count once."""

    total: int
    trainable: int
    largest: int  # of one tensor
    # Those that take part in matrix multiplications.
    matmul: int
    trainable_matmul: int

    @classmethod
    def of(cls, model: nn.Module) -> ParameterCounts:
        """Count the parameters of a model, which may be on the meta device."""
        # An embedding lookup is no matrix multiplication, unless the output layer shares the table.
        lookups = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        if is_tied(model):
            lookups -= {model.get_output_embeddings().weight}
        sizes = {weight: weight.numel() for weight in model.parameters()}
        trained = {weight: size for weight, size in sizes.items() if weight.requires_grad}
        matmul, trainable_matmul = (
            sum(size for weight, size in counted.items() if weight not in lookups)
            for counted in (sizes, trained)
        )
        total, trainable = sum(sizes.values()), sum(trained.values())
        return cls(total, trainable, max(sizes.values()), matmul, trainable_matmul)


def is_tied(model: nn.Module) -> bool:
    """Return whether the output layer shares the weight of an embedding."""
    head = model.get_output_embeddings()
    lookups = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    return head is not None and head.weight in lookups


@dataclass
class ModelSpec:
    """A model without its weights: configuration, tokenizer, sizes. It loads the weights."""

    # Transformers configuration, with the run's changes (dropout, vocabulary) applied.
    config: transformers.PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig
    weights: WeightSource
    seq_length: int  # tokens of a sequence: --seq_length, or its default for this model
    lora: Lora | None = None  # the configuration of its adapters
    unused: frozenset[str] = frozenset()  # names of parameters that text does not use
    # Original values of settings that the run has replaced; an exported model gets them back.
    own_settings: dict = field(default_factory=dict)
    compiles_loss: bool = False  # --compile, --compile_loss

    def __post_init__(self) -> None:
        # The output layer computes the loss in chunks; see distributed_training/model/loss.py.
        self.chunked_loss = returns_plain_logits(self.config)
        model = self.on_meta_device()
        self.chunked_loss = computes_loss(model)  # an output layer with adapters does not
        self.tied = is_tied(model)  # the output layer shares the weight of the input embedding
        self.counts = ParameterCounts.of(model)
        self._names = [name for name, _ in model.named_parameters()]

    @classmethod
    def find(cls, settings: Settings, ctx: DistContext) -> ModelSpec:
        """Resolve --model; a node downloads weights, or draws shared ones, once.

        Raises:
            UserError: the model cannot be found or downloaded, is no causal language model, has
                less than --seq_length positions, or cannot isolate documents.
        """
        model_settings, data = settings.model, settings.data
        name, seed = model_settings.model, settings.training.seed
        adapters, strategy = model_settings.lora_r is not None, settings.strategy
        resolve.be_quiet(settings.debug.verbose)
        found = resolve.find_folders(
            model_settings, data, settings.training, strategy, settings.hub.offline, ctx
        )
        what = f"--model {name}"
        config = read_config(found["weights"], what)
        tokenizer = read_tokenizer(found["tokenizer"], what, data.chat_template)
        for notice in found["notices"]:
            console.warn(notice)
        if found["own_head"]:
            weights.untie(config)
        own_settings = apply_flags(config, model_settings)
        generation = read_generation_config(found["weights"], config)
        with refused_as(weights.NOT_BUILT.format(what)):
            length = choose_seq_length(data.seq_length, name, max_positions(config))
            if "longrope" in str(getattr(config.get_text_config(), "rope_scaling", None)):
                from distributed_training.model.long_rope import fix_factors  # few models have it

                own_settings |= fix_factors(config.get_text_config(), length)
            lora, unused = None, frozenset[str]()
            if config.sub_configs:  # it has a vision part, for example
                from distributed_training.model.unused import unused_by_text

                unused = unused_by_text(config)
            if model_settings.lora_r is not None:
                from distributed_training.model.lora import Lora  # only with the flag

                lora, unused = Lora.of(model_settings, seed, unused), frozenset()  # frozen as well
            dtype = weights.weights_dtype(strategy, adapters, ctx)
            if model_settings.load_in_4bit:
                strategy.check_4bit()
            source = WeightSource.of(found, model_settings, seed, dtype)
            compiles = bool(model_settings.compiler_flag)
            spec = cls(
                config, tokenizer, generation, source, length, lora, unused, own_settings, compiles
            )
        strategy.check_model(spec.on_meta_device)
        spec._check_attention(model_settings, data, ctx)
        spec._check_loss(model_settings)
        return spec

    def _check_loss(self, model_settings: ModelSettings) -> None:
        """Print a line if --compile_loss has no effect."""
        if model_settings.compile_loss and not self.chunked_loss:
            console.warn(
                "--compile_loss: ignored, because the output layer does not compute the loss of "
                "this model: it has adapters, or the model changes its logits"
            )

    def _check_attention(
        self, model_settings: ModelSettings, data: DataSettings, ctx: DistContext
    ) -> None:
        """Check --isolate_documents, --packing and --attn_implementation, and set the latter."""
        if data.isolates_documents:
            from distributed_training.model.isolation import check_isolation  # only with the flag

            check_isolation(self.config, self.tokenizer, model_settings.model, data.packing)
        if attention := model_settings.attn_implementation:
            from distributed_training.model.attention import set_attention  # only with the flag

            set_attention(self.config, attention, data.isolates_documents, ctx)

    @property
    def text_config(self) -> transformers.PretrainedConfig:
        """Configuration of the language model; the whole configuration if it has no parts."""
        return self.config.get_text_config()

    def on_meta_device(self, in_4bit: bool = False) -> nn.Module:
        """Build the model on the meta device: shapes without memory.

        Args:
            in_4bit: the weights of linear layers have the shapes that they have in 4 bits.
        """
        with torch.device("meta"):
            model = weights.from_config(self.config, self.weights.dtype)
        if not in_4bit:
            return self._prepare(model)
        from distributed_training.model import four_bit  # only with --load_in_4bit

        four_bit.replace_layers(model, self.weights.dtype)
        four_bit.give_packed_shapes(model := self._prepare(model))
        return model

    def load(self, ctx: DistContext, dtype: torch.dtype | str | None = None) -> nn.Module:
        """Load the model with its weights on the CPU.

        Args:
            dtype: instead of `weights.dtype`; "auto": memory-mapped from the file, not copied.
        """
        source = self.weights
        console.print0("⏳ Loading the weights")
        torch.manual_seed(source.seed)
        if source.random and not Path(source.folder, "model.safetensors").exists():
            return self._prepare(weights.from_config(self.config))
        in_4bit = ctx.device if source.in_4bit and dtype is None else None
        model, info = weights.from_folder(
            source.folder, self.config, dtype or source.dtype, in_4bit
        )
        weights.report_differences(source.folder, model, info)
        model = self._prepare(model)
        if [name for name, _ in model.named_parameters()] != self._names:
            raise TrainingError(
                f"The model that transformers loaded from {source.folder} shares other weights "
                "than its config.json describes: set tie_word_embeddings there to what the files "
                "hold."
            )
        return model

    def quantize_from_rank0(
        self, sharded: nn.Module, whole: nn.Module | None, device: torch.device
    ) -> None:
        """Quantize the weights of `whole` for `sharded` if requested (--load_in_4bit).

        Args:
            sharded, whole, device: see `four_bit.quantize_from_rank0`.
        """
        if self.weights.in_4bit:
            from distributed_training.model import four_bit  # only with --load_in_4bit

            four_bit.quantize_from_rank0(sharded, whole, device)

    def _prepare(self, model: nn.Module) -> nn.Module:
        if self.lora:
            self.lora.attach(model)
        if self.chunked_loss and type(model.get_output_embeddings()) is nn.Linear:  # no adapters
            output_layer = OutputLayer
            if self.compiles_loss:
                from distributed_training.model import compiled_loss  # only with the flags

                output_layer = compiled_loss.CompiledOutputLayer
            add_loss(model, output_layer)
        return model
