"""LoRA adapters (Hu et al., arXiv 2106.09685) for frozen weights, attached to the model by peft.

A linear layer with the weight W computes x W + s · (x A) B. A has r columns and B has r rows; only
A and B are trained. B is initialized to 0. The scale s is alpha / r, or alpha / √r under rsLoRA
(Kalajdzievski, arXiv 2312.03732), whose gradients do not shrink as r grows.

DoRA (Liu et al., arXiv 2402.09353) computes m · (x V) / |V| for V = W + s · A B, where |V| has the
norm of each column of V, which is a constant for backward. The magnitudes m, one for each output,
are trained as well; they are initialized to |W|.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from distributed_training.errors import UserError, redact
from distributed_training.files.json_types import JsonObject
from distributed_training.model.experts import fused_experts, without_fused_experts
from distributed_training.settings.model import ModelSettings
from distributed_training.workload.workload import ALL_LINEAR, is_target, target_names

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

ADAPTER = "default"  # peft's name for a model's only adapter


@dataclass
class Lora:
    """Configuration of the adapters that a model gets."""

    # Rank, numerator of the scale, and dropout probability of the input of A.
    r: int
    alpha: float
    dropout: float
    # Suffixes of the names of the layers that get an adapter, or "all-linear"; None: peft's default
    # for the architecture, or all linear layers if peft has no default.
    targets: list[str] | str | None
    base: str  # the model's name, for adapter_config.json
    seed: int  # for the initialization of A
    rslora: bool = False  # the scale is alpha / √r
    dora: bool = False  # the magnitudes are trained too
    unused: frozenset[str] = frozenset()  # parameters whose layers get no adapter, see ModelSpec
    settled: LoraConfig | None = (
        None  # peft's configuration, written to adapter_config.json; set by `attach`
    )

    @classmethod
    def of(
        cls, model_settings: ModelSettings, seed: int, unused: frozenset[str] = frozenset()
    ) -> Lora | None:
        """Return the configuration that the flags request; None without --lora_r."""
        chosen, names, base = model_settings, model_settings.lora_targets, model_settings.model
        if chosen.lora_r is None or chosen.lora_alpha is None:
            return None
        targets = names if names in (None, ALL_LINEAR) else target_names(names)
        if Path(base).is_dir():
            base = str(Path(base).resolve())
        return cls(
            chosen.lora_r,
            chosen.lora_alpha,
            chosen.lora_dropout,
            targets,
            base,
            seed,
            chosen.lora_rslora,
            chosen.lora_dora,
            unused,
        )

    @property
    def identity(self) -> JsonObject:
        """What must match to resume a checkpoint, by the names of the flags."""
        return {f"lora_{name}": getattr(self, name) for name in ("r", "alpha", "rslora", "dora")}

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
            use_rslora=self.rslora,
            use_dora=self.dora,
            target_modules=self.targets or usual.get(model.config.model_type, ALL_LINEAR),
            exclude_modules=self._excluded(model),
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=redact(self.base),
        )
        if self.settled is None and fused_experts(model):  # only for the first model
            by_user = isinstance(self.targets, list)
            self.targets = without_fused_experts(model, config, by_user)
            config.target_modules = self.targets
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

    def _excluded(self, model: nn.Module) -> str | None:
        """Return a regular expression for the layers that text does not use; None without any."""
        if not self.unused:
            return None
        from distributed_training.model.unused import outermost_modules

        used = [name for name, _ in model.named_parameters() if name not in self.unused]
        return rf"({'|'.join(map(re.escape, outermost_modules(self.unused, used)))})(\..*)?"

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
                weight = _adapted_weight(layers[name], weight)
            yield base_name(name), weight


def _adapted_weight(layer: LoraLayer, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight that computes the same as a layer with its adapters.

    Args:
        weight: of the layer without them, in fp32: [outputs, inputs], or transposed in GPT-2.
    """
    weight = weight + layer.get_delta_weight(ADAPTER)
    if ADAPTER not in layer.lora_magnitude_vector:
        return weight
    inputs = 0 if layer.fan_in_fan_out else 1
    norms = torch.linalg.vector_norm(weight, dim=inputs, keepdim=True)
    # Rounded as in training, where peft computes them in the dtype of the frozen weights.
    norms = norms.to(layer.get_base_layer().weight.dtype).float()
    return layer.lora_magnitude_vector[ADAPTER].weight.view_as(norms) / norms * weight


def peft_name(name: str) -> str:
    """Return a parameter's name in adapter_model.safetensors."""
    name = f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"
    # Magnitudes have the name that they had before peft made them the weight of a layer.
    return name.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def base_name(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")
