"""Settings and layers of a model whose names depend on its architecture."""

from __future__ import annotations

from torch import nn

from support.cluster.context import DistContext


def fuse_gelu(config) -> dict[str, str]:
    """Replace GPT-2's activation by the same function in one kernel; return the original settings.

    transformers' gelu_new computes the tanh approximation of GELU (Hendrycks and Gimpel, arXiv
    1606.08415) in eight operations; gelu_pytorch_tanh is PyTorch's own implementation.
    """
    text_config = config.get_text_config()
    replaced = {name: value for name, value in text_config.to_dict().items() if value == "gelu_new"}
    text_config.update(dict.fromkeys(replaced, "gelu_pytorch_tanh"))
    return replaced


def set_dropout(config, probability: float, ctx: DistContext) -> None:
    """Set every dropout probability of an architecture, whatever its name is."""
    text_config = config.get_text_config()
    names = [
        name
        for name, value in text_config.to_dict().items()
        if "drop" in name and type(value) in (float, int)
        if not name.startswith(("summary", "classifier"))
    ]
    text_config.update(dict.fromkeys(names, probability))
    if not names and probability:
        ctx.console.warn("--dropout: this architecture has no dropout.")


def max_positions(config) -> int | None:
    """Return the longest sequence that the model supports; None if it has no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of `_no_split_modules`, or else those of the largest ModuleList."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        blocks = list(
            max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()), default=[])
        )
    return blocks
