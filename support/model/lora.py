"""LoRA adapters (Hu et al., arXiv 2106.09685) for frozen weights, attached to the model by peft.

A linear layer with the weight W computes x W + (alpha / r) · (x A) B. A has r columns and B has r
rows; only A and B are trained. B is initialized to 0.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from support.errors import UserError, redact
from support.settings.model import ModelSettings
from support.workload.workload import ALL_LINEAR, is_target, target_names

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

ADAPTER = "default"  # peft's name for a model's only adapter


@dataclass
class Lora:
    """Configuration of the adapters that a model gets."""

    # Rank, scale (alpha / r), and dropout probability of the input of A.
    r: int
    alpha: float
    dropout: float
    # Suffixes of the names of the layers that get an adapter, or "all-linear"; None: peft's default
    # for the architecture, or all linear layers if peft has no default.
    targets: list[str] | str | None
    base: str  # the model's name, for adapter_config.json
    seed: int  # for the initialization of A
    settled: LoraConfig | None = (
        None  # peft's configuration, written to adapter_config.json; set by `attach`
    )

    @classmethod
    def of(cls, model_settings: ModelSettings, seed: int) -> Lora | None:
        """Return the configuration that the flags request; None without --lora_r."""
        r, names, base = model_settings.lora_r, model_settings.lora_targets, model_settings.model
        alpha = model_settings.lora_alpha
        if r is None or alpha is None:
            return None
        targets = names if names in (None, ALL_LINEAR) else target_names(names)
        if Path(base).is_dir():
            base = str(Path(base).resolve())
        return cls(r, alpha, model_settings.lora_dropout, targets, base, seed)

    def attach(self, model: nn.Module) -> None:
        """Attach the adapters to a model and freeze all other parameters.

        The adapters are in fp32 and have the same initial values for every type of the model.

        Raises:
            UserError: the model has no such target, or a target shares its weight with another
                layer.
        """
        import peft

        self._check_targets(model)
        usual = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        config = peft.LoraConfig(
            r=self.r,
            lora_alpha=int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.targets or usual.get(model.config.model_type, ALL_LINEAR),
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=redact(self.base),
        )
        self.settled = copy.deepcopy(config)  # peft adds the name of each layer to `config`
        uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        with torch.device("meta" if next(model.parameters()).is_meta else "cpu"):
            peft.inject_adapter_in_model(config, model, ADAPTER)
        # peft sets this if the weights are transposed, as GPT-2's are.
        self.settled.fan_in_fan_out = config.fan_in_fan_out
        self.settled.inference_mode = True  # for users who load the adapters
        if isinstance(self.settled.target_modules, set):  # in an order that does not change
            self.settled.target_modules = sorted(self.settled.target_modules)
        for name, layer in _adapted_layers(model).items():
            if uses[id(layer.get_base_layer().weight)] > 1:
                raise UserError(
                    f"--lora_targets: {name} shares its weight with another layer, "
                    "and adapters would change both."
                )
            # Autocast or the engine makes input and adapter one dtype. peft would first convert the
            # input to the adapter's fp32.
            layer.cast_input_dtype_enabled = False
        self._initialize(model)

    def save_config(self, folder: Path) -> None:
        """Write adapter_config.json; the adapters must have been attached to a model before."""
        assert self.settled is not None  # ModelSpec attaches them when it is created
        self.settled.save_pretrained(folder)

    def _check_targets(self, model: nn.Module) -> None:
        """Check that each name selects a layer: peft ignores some of several wrong names."""
        layers = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        ]
        for name in self.targets if isinstance(self.targets, list) else []:
            if not any(is_target(layer, name) for layer in layers):
                ends = ", ".join(sorted({layer.rsplit(".", 1)[-1] for layer in layers}))
                raise UserError(
                    f"--lora_targets {name}: this model has no such linear layer; it has {ends}. "
                    f"{ALL_LINEAR} selects all except the output layer."
                )

    def _initialize(self, model: nn.Module) -> None:
        """Initialize A as peft does, but in fp32: peft rounds it to the model's type."""
        torch.manual_seed(self.seed)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
                if ".lora_A." in name and not parameter.is_meta:
                    # On the CPU, because a GPU draws other numbers.
                    values = nn.init.kaiming_uniform_(torch.empty(parameter.shape), a=math.sqrt(5))
                    parameter.data = values.to(parameter.device)


def _adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}


def merged(
    model: nn.Module, adapters: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight in fp32) of the model without adapters, with the trained adapters added.

    Args:
        model: with adapters, its weights as before training; they may be mapped from a file.
    """
    own = dict(model.named_parameters())
    for name, value in adapters.items():
        own[name].data = value.float().cpu()
    layers = {f"{name}.base_layer.weight": layer for name, layer in _adapted_layers(model).items()}
    for name, parameter in own.items():
        if name not in adapters:
            weight = parameter.data.float()
            if name in layers:
                weight = weight + layers[name].get_delta_weight(ADAPTER)
            yield base_name(name), weight


def peft_name(name: str) -> str:
    """Return a parameter's name in adapter_model.safetensors."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def base_name(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")
