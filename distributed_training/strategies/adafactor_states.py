"""Adafactor's states in a checkpoint: rows and columns of whole parameters, equal on all ranks."""

import torch

from distributed_training.strategies.optimizer_shards import ShardedState


def read(state: ShardedState) -> dict[str, torch.Tensor]:
    """Return Adafactor's states by "<parameter>/<kind>"."""
    return {
        f"{shard.names[0]}/{kind}": value
        for shard in state.shards
        for kind, value in state.base.state.get(shard.key, {}).items()
        if kind.startswith("exp_avg_sq")
    }


def write(state: ShardedState, saved: dict[str, torch.Tensor]) -> None:
    """Set Adafactor's states; a parameter without saved states gets new ones."""
    keys = {shard.names[0]: shard.key for shard in state.shards}
    for name, value in saved.items():
        parameter, _, kind = name.rpartition("/")
        states = state.base.state[keys[parameter]]
        states[kind] = value.float().to(keys[parameter].device)
        states.setdefault("RMS", 0)
