"""PyTorch's DistributedDataParallel: every rank holds all model states."""
