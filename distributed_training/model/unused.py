"""Weights that text does not use: those of a vision or audio part, of attention to images.

They get no gradient. Plain PyTorch leaves such weights as they are, DeepSpeed decays them, and DDP
waits for their gradients. Only models whose configuration has several parts import this module.
"""

import torch
import transformers
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import PretrainedConfig

from distributed_training import console, patches
from distributed_training.errors import MissingRequirement
from distributed_training.model.weights import from_config


def unused_by_text(config: PretrainedConfig) -> frozenset[str]:
    """Return the names of the parameters that get no gradient from text, with a notice.

    A backward pass with fake tensors, which have no memory, finds them. It is in bf16, because the
    grouped matrix multiplication of experts accepts nothing else there.

    Raises:
        MissingRequirement: an older transformers reads values of tensors in the forward pass.
    """
    patches.skip_padding_check()  # reads token ids
    with FakeTensorMode(), patches.without_initialization():
        model = from_config(config, torch.bfloat16).eval()
        tokens = torch.zeros(1, 2, dtype=torch.long)
        try:
            model(input_ids=tokens, use_cache=False).logits.sum().backward()
        except DataDependentOutputException as error:
            raise MissingRequirement(
                f"A model with several parts ({config.model_type}) needs a newer transformers than "
                f"{transformers.__version__}: pip install --upgrade transformers."
            ) from error
    unused = {name: p.numel() for name, p in model.named_parameters() if p.grad is None}
    if unused:
        used = [name for name, p in model.named_parameters() if p.grad is not None]
        parts = outermost_modules(unused, used)
        others = ", …" if len(parts) > 3 else ""
        console.warn(
            f"Text does not use {sum(unused.values()):,} of the model's parameters "
            f"({', '.join(parts[:3])}{others}): they are not trained, and stay as they are."
        )
    return frozenset(unused)


def outermost_modules(unused: frozenset[str] | dict[str, int], used: list[str]) -> list[str]:
    """Return the shortest paths of modules that have unused parameters only, in their order."""
    with_used = {part for name in used for part in _ancestors(name)}
    found = (
        next((path for path in _ancestors(name) if path not in with_used), name) for name in unused
    )
    return list(dict.fromkeys(found))


def _ancestors(name: str) -> list[str]:
    """Return the paths of the modules around a parameter, the outermost first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
