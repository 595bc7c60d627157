"""ModelSpec: everything of a model except its weights in memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from support import console
from support.cluster.context import DistContext
from support.errors import TrainingError, redact
from support.files.atomic import remove_temporary_folder, write_text
from support.model import weights
from support.model.lora import Lora
from support.model.loss import add_loss, returns_plain_logits


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
