"""LoRA (Hu et al., arXiv 2106.09685): small adapters beside frozen weights, put into the model by
peft.

A layer with the weight W computes x W + (alpha / r) · (x A) B; A has r columns and B r rows, and
only they are trained. B begins at 0, so that training begins at the model as it is.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from support.errors import UserError

ADAPTER = "default"  # peft's name for the one that is there
ALL_LINEAR = "all-linear"


@dataclass
class Lora:
    """What adapters a model gets.

    Attributes:
        r, alpha, dropout: rank, scale (alpha / r), and dropout before A.
        targets: ends of the names of the layers that get one, or "all-linear"; None: what peft
            knows of the architecture, and all linear layers of any other.
        base: the model's name, for adapter_config.json.
        seed: A is drawn from it.
        settled: peft's configuration of them, once a model got them.
    """

    r: int
    alpha: float
    dropout: float
    targets: list[str] | str | None
    base: str
    seed: int
    settled: object = None

    @classmethod
    def of(cls, args) -> Lora | None:
        """What the flags ask for."""
        if args.lora_r is None:
            return None
        targets = args.lora_targets
        if targets not in (None, ALL_LINEAR):
            targets = [name.strip() for name in targets.split(",") if name.strip()]
        base = (
            str(Path(args.model).expanduser().resolve())
            if Path(args.model).expanduser().is_dir()
            else args.model
        )
        return cls(args.lora_r, args.lora_alpha, args.lora_dropout, targets, base, args.seed)

    def attach(self, model: nn.Module) -> None:
        """Put the adapters into a model and freeze all else. They are in fp32, and the same
        whatever type the model is in.

        Raises:
            UserError: a target that the model does not have.
        """
        import peft
        from peft.tuners.lora import LoraLayer

        on_meta = next(model.parameters()).is_meta
        names = self.targets if isinstance(self.targets, list) else []
        layers = [name for name, module in model.named_modules() if _is_linear(module)]
        if wrong := [
            name for name in names if not any(f".{layer}".endswith(f".{name}") for layer in layers)
        ]:
            raise self._no_such_layer(wrong[0], layers)
        weights = Counter(
            id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)
        )
        config = self._config(model)
        self.settled = copy.deepcopy(config)  # before peft names each layer in it
        try:
            with torch.device("meta" if on_meta else "cpu"):
                peft.inject_adapter_in_model(config, model, ADAPTER)
        except ValueError as error:
            raise self._no_such_layer(self.targets, layers) from error
        self.settled.fan_in_fan_out = (
            config.fan_in_fan_out
        )  # GPT-2's weights lie the other way round, peft found
        self.settled.inference_mode = True  # for those who load it
        if isinstance(self.settled.target_modules, set):
            self.settled.target_modules = sorted(self.settled.target_modules)
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer) and weights[id(module.get_base_layer().weight)] > 1:
                raise UserError(
                    f"--lora_targets: {name} shares its weight with another layer, and adapters would change both."
                )
        torch.manual_seed(self.seed)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
                if (
                    ".lora_A." in name and not on_meta
                ):  # as peft draws it, which would round it to the model's type
                    nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))

    def _no_such_layer(self, name, layers: list[str]) -> UserError:
        there = ", ".join(sorted({layer.rsplit(".", 1)[-1] for layer in layers}))
        return UserError(
            f"--lora_targets {name}: this model has no such linear layer; there are {there}, and {ALL_LINEAR} for "
            "all but the output."
        )

    def _config(self, model: nn.Module):
        """peft's configuration of these adapters, its targets settled."""
        import peft
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

        targets = self.targets or USUAL.get(model.config.model_type, ALL_LINEAR)
        alpha = int(self.alpha) if self.alpha == int(self.alpha) else self.alpha
        return peft.LoraConfig(
            r=self.r,
            lora_alpha=alpha,
            lora_dropout=self.dropout,
            target_modules=targets,
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.base,
        )

    def describe(self, folder: Path) -> None:
        """Write adapter_config.json, as peft reads it, into an existing folder; after `attach`."""
        self.settled.save_pretrained(folder)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def peft_name(name: str) -> str:
    """A parameter's name in adapter_model.safetensors."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def merged(
    model: nn.Module, adapters: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, weight in fp32) of the model without adapters, with what they have learned added to
    it; one weight at a time.

    Args:
        model: with adapters, its weights as they were before training; they may be mapped from a
            file.
        adapters: what was trained, by name.
    """
    from peft.tuners.lora import LoraLayer

    own = dict(model.named_parameters())
    for name, value in adapters.items():
        own[name].data = value.float().cpu()
    layers = {
        f"{name}.base_layer.weight": module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    for name, parameter in own.items():
        if name in adapters:
            continue
        weight = parameter.data.float()
        if name in layers:
            weight = weight + layers[name].get_delta_weight(ADAPTER)
        yield base_name(name), weight


def base_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")
