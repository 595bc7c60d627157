"""PyTorch's FSDP2 (fully_shard): every rank holds a shard of each parameter and its states."""
