"""The measured part of results.json: what the ranks measured, combined."""

from __future__ import annotations

import statistics

import psutil

from support.cli.arguments import Arguments
from support.cli.ds_config import nvme_folder
from support.cluster.context import DistContext
from support.errors import TrainingError
from support.memory import fit
from support.memory import measure as memory
from support.model.resolve import ModelSpec
from support.optimizers import OPTIMIZERS
from support.report.metrics_log import MetricsLogger
from support.report.peak_flops import flops_per_token, peak_flops
from support.report.results import progress
from support.train_state import TrainState
from support.units import perplexity_of

# Keys that are null where nothing was trained (--eval_only) or evaluated.
KEYS_OF_TRAINING = """
    seconds_to_first_step communication_bytes_per_step communication_per_step step_seconds
    step_phases_seconds samples_per_second tokens_per_second tokens_per_second_per_gpu mfu
""".split()


def summarize(
    args: Arguments,
    ctx: DistContext,
    spec: ModelSpec,
    metrics: MetricsLogger,
    state: TrainState,
    eval_loss: float | None,
) -> dict:
    """Return the measured part of results.json; all ranks call it together.

    Throughput and times are means over the ranks, memory is listed by rank.

    Raises:
        TrainingError: a memory simulation updated no weights, so Adam's states were not measured.
    """
    metrics.flush()
    best = state.best or {"loss": None, "step": None}
    return {
        **dict.fromkeys(KEYS_OF_TRAINING),
        **progress(state.counters()),
        "eval_loss": eval_loss,
        "perplexity": None if eval_loss is None else perplexity_of(eval_loss),
        "best_eval_loss": best["loss"],
        "best_step": best["step"],
        "stopped_early": state.patience if state.stopped_early else None,
        **_speed(args, ctx, spec, metrics),
        **_communication(ctx, metrics),
        "memory": _memory(args, ctx, spec, metrics),
    }


def _speed(args: Arguments, ctx: DistContext, spec: ModelSpec, metrics: MetricsLogger) -> dict:
    speed = _mean_over_ranks(ctx.all_gather(metrics.speed()))
    if metrics.first_step_at:
        process_started = psutil.Process().create_time()
        speed["seconds_to_first_step"] = metrics.first_step_at - process_started
    if speed.get("tokens_per_second"):
        tokens_per_second = speed["tokens_per_second"] / ctx.world_size
        speed["tokens_per_second_per_gpu"] = tokens_per_second
        if peak := peak_flops(ctx.device, ctx.precision):
            config, matmul = spec.text_config, (spec.matmul_parameters, spec.trainable_matmul)
            shape = config.num_hidden_layers, config.hidden_size, args.seq_length
            speed["mfu"] = tokens_per_second * flops_per_token(*matmul, *shape) / peak
    return speed


def _communication(ctx: DistContext, metrics: MetricsLogger) -> dict:
    meter = metrics.meter
    traffic = meter.traffic.per_step(meter.warmup_steps)
    sent = ctx.all_gather(sum(collective["sent_bytes"] for collective in traffic.values()))
    if meter.step == meter.first_step:
        return {}
    return {
        "communication_bytes_per_step": statistics.mean(sent),
        "communication_per_step": traffic,
    }


def _memory(args: Arguments, ctx: DistContext, spec: ModelSpec, metrics: MetricsLogger) -> dict:
    meter, on_nvme = metrics.meter, nvme_folder(args.ds_config_dict)
    of_this_rank = memory.of_this_rank(
        meter.memory_by_phase, meter.step_memory, on_nvme, ctx.launch.is_node_leader
    )
    found = memory.over_ranks(ctx.all_gather(of_this_rank))
    found["predicted_bytes"] = fit.predicted_bytes(args, ctx, spec)
    # With --eval_only no step is measured, so the placement is not known.
    on_disk = (found["placement"] or {}).get("optimizer") == "nvme"
    has_states = OPTIMIZERS[args.optim].state_bytes and not on_disk
    if ctx.simulated and has_states and not found["moments_bytes"]:
        raise TrainingError(
            "The simulated steps updated no weights, so Adam's states are missing in the measured "
            "memory."
        )
    return found


def _mean_over_ranks(values: list[dict]) -> dict:
    """Return the mean of each number over the ranks, also inside nested dicts."""
    columns = {key: [value[key] for value in values] for key in values[0]}
    return {
        key: _mean_over_ranks(column) if isinstance(column[0], dict) else statistics.mean(column)
        for key, column in columns.items()
    }
