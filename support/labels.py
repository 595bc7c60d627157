"""The label of tokens without a loss: padding, and prompts of examples."""

IGNORED = -100  # the default ignore_index of PyTorch's cross_entropy
