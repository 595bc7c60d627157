"""The measured part of results.json: what the ranks measured, combined."""

from __future__ import annotations

import statistics

import psutil

from support.cli.arguments import Arguments
from support.cli.ds_config import nvme_folder
from support.cluster.context import DistContext
from support.errors import TrainingError
from support.memory import advise
from support.memory import measure as memory
from support.model.resolve import ModelSpec
from support.optimizers import OPTIMIZERS
from support.report import schema
from support.report.metrics_log import MetricsLogger
from support.report.peak_flops import flops_per_token, peak_flops
from support.report.results import progress
from support.units import perplexity_of


def summarize(
    ctx: DistContext,
    metrics: MetricsLogger,
    memory_by_phase: memory.MemoryByPhase,
    eval_loss: float | None,
    args: Arguments,
    spec: ModelSpec,
) -> dict:
    """Return the measured part of results.json; all ranks call it together.

    Throughput and times are means over the ranks, memory is listed by rank.

    Raises:
        TrainingError: a memory simulation updated no weights, so Adam's states were not measured.
    """
    metrics.flush()
    state, traffic = metrics.state, metrics.traffic.per_step(metrics.warmup_steps)
    on_nvme = nvme_folder(args.ds_config_dict)
    own_memory = memory.of_this_rank(
        memory_by_phase, metrics.step_memory, on_nvme, ctx.launch.is_node_leader
    )
    memory_of_ranks = ctx.all_gather(own_memory)
    speeds = ctx.all_gather(metrics.speed())
    sent = ctx.all_gather(sum(collective["sent_bytes"] for collective in traffic.values()))
    best = state.best or {"loss": None, "step": None}
    measured = {
        **{key.name: None for key in schema.AT_END if key.type.endswith(" or null")},
        **progress(state.counters()),
        "eval_loss": eval_loss,
        "perplexity": None if eval_loss is None else perplexity_of(eval_loss),
        "best_eval_loss": best["loss"],
        "best_step": best["step"],
        "stopped_early": state.patience if state.stopped_early else None,
        **mean_over_ranks(speeds),
    }
    if metrics.first_step_at:
        process_started = psutil.Process().create_time()
        measured["seconds_to_first_step"] = metrics.first_step_at - process_started
    if measured["tokens_per_second"]:
        tokens_per_second = measured["tokens_per_second"] / ctx.world_size
        measured["tokens_per_second_per_gpu"] = tokens_per_second
        if peak := peak_flops(ctx.device, ctx.precision):
            config, matmul = spec.text_config, (spec.matmul_parameters, spec.trainable_matmul)
            shape = config.num_hidden_layers, config.hidden_size, args.seq_length
            per_token = flops_per_token(*matmul, *shape)
            measured["mfu"] = tokens_per_second * per_token / peak
    if state.step > state.first_step:
        measured["communication_bytes_per_step"] = statistics.mean(sent)
        measured["communication_per_step"] = traffic
    measured["memory"] = memory.over_ranks(memory_of_ranks)
    measured["memory"]["predicted_bytes"] = advise.predicted_bytes(args, ctx, spec)
    # With --eval_only no step is measured, so the placement is not known.
    placement = measured["memory"]["placement"] or {}
    has_states = OPTIMIZERS[args.optim].state_bytes and placement.get("optimizer") != "nvme"
    if ctx.simulated and has_states and not measured["memory"]["moments_bytes"]:
        raise TrainingError(
            "The simulated steps updated no weights, so Adam's states are missing in the measured "
            "memory."
        )
    return measured


def mean_over_ranks(values: list[dict]) -> dict:
    """Return the mean of each number over the ranks, also inside nested dicts."""
    columns = {key: [value[key] for value in values] for key in values[0]}
    return {
        key: mean_over_ranks(column) if isinstance(column[0], dict) else statistics.mean(column)
        for key, column in columns.items()
    }
