"""Where the model states are under DDP: whole on every rank."""

from collections.abc import Iterator

from distributed_training.model_parts import Piece
from distributed_training.strategies.optimizer_shards import Shard, ShardedState


class WholeState(ShardedState):
    """Every master is a whole parameter."""

    replicated = True

    def _find_shards(self) -> Iterator[Shard]:
        for name, parameter in self.trained.items():
            numel = parameter.numel()
            yield Shard(parameter, [name], [Piece(name, 0, 0, numel)] if numel else [])
