"""Train a small model with DeepSpeed in bf16 and make its second loss not a number:

    python -m tests.helpers.held_update STRATEGY

Prints as JSON whether each of the two updates changed the weights, whether the weights are finite
at the end, and how often DeepSpeed searched the gradients for infinities.
"""

import json
import os
import sys
from unittest import mock

import torch
from torch import nn

from distributed_training.cli.parse import parse_arguments
from distributed_training.strategies import gradients
from distributed_training.strategies.deepspeed import patches
from distributed_training.strategies.deepspeed.options import ModelSizes, complete_ds_config
from distributed_training.strategies.objects import TrainingObjects


def weights(model: nn.Module) -> torch.Tensor:
    from deepspeed.utils import safe_get_full_fp32_param

    return torch.cat([safe_get_full_fp32_param(p).flatten() for p in model.parameters()]).clone()


def main(strategy: str) -> dict:
    import deepspeed

    patches.skip_shared_memory_op()
    settings = parse_arguments(["--strategy", strategy, "--precision", "bf16"])
    config = settings.strategy.config
    complete_ds_config(config, "bf16", ModelSizes(8, 72, 64, tied=False), 1, None)
    config["optimizer"]["params"]["lr"] = 0.1
    model = nn.Linear(8, 8)
    parameters = model.parameters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    type(engine.optimizer).has_overflow = searches = mock.Mock(return_value=False)
    found_inf, changed = torch.zeros((), dtype=torch.bool), []
    disabled, zero = torch.amp.GradScaler("cpu", enabled=False), settings.strategy
    objects = TrainingObjects(zero, engine, engine.optimizer, disabled, found_inf)
    for factor in (1.0, float("nan")):
        before = weights(model)
        loss = engine(torch.ones(4, 8, dtype=torch.bfloat16)).float().square().mean() * factor
        engine.backward(loss)
        gradients.block_update_if_not_finite(objects, loss.detach(), None, simulated=False)
        engine.step()
        changed.append(not torch.equal(before, weights(model)))
    finite = bool(weights(model).isfinite().all())
    engine.destroy()
    return {"changed": changed, "finite": finite, "searches": searches.call_count}


if __name__ == "__main__":
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    print(json.dumps(main(sys.argv[1])))
