"""The measured part of results.json: what the ranks measured, combined."""

from __future__ import annotations

import statistics

import psutil

from support.cli.ds_config import nvme_folder
from support.cluster.comm_volume import Traffic
from support.cluster.context import DistContext
from support.errors import TrainingError
from support.memory import advise
from support.memory import measure as memory
from support.report.metrics_log import Meter
from support.report.peak_flops import peak_flops
from support.report.results import progress

PROCESS_STARTED = psutil.Process().create_time()


def summarize(
    ctx: DistContext,
    meter: Meter,
    memory_by_phase: memory.MemoryByPhase,
    evaluation: tuple | None,
    args,
    spec,
) -> dict:
    """Return the measured part of results.json; all ranks call it together.

    Throughput and times are means over the ranks, memory is listed by rank.

    Args:
        memory_by_phase: memory after each phase of the run.
        evaluation: (loss, perplexity) of the last evaluation, or None.
        spec: the model.
    Raises:
        TrainingError: a memory simulation updated no weights, so Adam's states were not measured.
    """
    counters, steps = meter.counters(), meter.step - meter.before["step"]
    rank_facts = {
        "memory": memory.of_this_rank(
            memory_by_phase,
            meter.step_memory,
            nvme_folder(args.ds_config_dict),
            ctx.launch.is_node_leader,
        ),
        "speed": meter.speed(),
    }
    traffic = meter.traffic.per_step(meter.warmup_steps)
    rank_facts["sent"] = sum(collective["sent_bytes"] for collective in traffic.values())
    ranks = ctx.all_gather(rank_facts)
    measured = {
        **progress(counters),
        "eval_loss": evaluation[0] if evaluation else None,
        "perplexity": evaluation[1] if evaluation else None,
        "best_eval_loss": meter.best["loss"] if meter.best else None,
        "best_step": meter.best["step"] if meter.best else None,
        "stopped_early": args.early_stopping_patience if meter.stopped_early else None,
        "seconds_to_first_step": meter.first_step_at - PROCESS_STARTED
        if meter.first_step_at
        else None,
        "communication_bytes_per_step": None,
        "communication_per_step": None,
        "step_seconds": None,
        "step_phases_seconds": None,
        "samples_per_second": None,
        "tokens_per_second": None,
        "tokens_per_second_per_gpu": None,
        "mfu": None,
        **mean_over_ranks([rank["speed"] for rank in ranks]),
    }
    if measured["tokens_per_second"]:
        measured["tokens_per_second_per_gpu"] = measured["tokens_per_second"] / ctx.world_size
        if peak := peak_flops(ctx.device, ctx.precision):
            text_config, weights = (
                spec.text_config,
                (spec.matmul_parameters, spec.trainable_matmul),
            )
            flops = flops_per_token(
                *weights, text_config.num_hidden_layers, text_config.hidden_size, args.seq_length
            )
            measured["mfu"] = measured["tokens_per_second_per_gpu"] * flops / peak
    if steps and Traffic.complete(ctx.device, args.ds_config_dict is not None):
        measured["communication_bytes_per_step"] = statistics.mean(rank["sent"] for rank in ranks)
        measured["communication_per_step"] = traffic
    measured["memory"] = memory.over_ranks([rank["memory"] for rank in ranks])
    if (
        ctx.simulated
        and not measured["memory"]["moments_bytes"]
        and measured["memory"]["placement"]["optimizer"] != "nvme"
    ):
        raise TrainingError(
            "The simulated steps updated nothing, so Adam's states are missing in what was "
            "measured."
        )
    measured["memory"]["predicted_bytes"] = advise.predicted_bytes(args, ctx, spec)
    return measured


def mean_over_ranks(values: list[dict]) -> dict:
    """Return the mean of each number over the ranks, also inside nested dicts."""
    columns = {key: [value[key] for value in values] for key in values[0]}
    return {
        key: mean_over_ranks(column) if isinstance(column[0], dict) else statistics.mean(column)
        for key, column in columns.items()
    }


def flops_per_token(
    matmul_parameters: int, trained: int, layers: int, hidden: int, seq_length: int
) -> float:
    """Return the floating-point operations per token of the forward and backward passes.

    The formula is 6N + 12·L·H·T (PaLM, arXiv 2204.02311, appendix B). Of the 6 operations per
    parameter, 2 are the forward pass, 2 the gradient of its input, and 2 its own gradient, which a
    frozen parameter does not have.

    Args:
        matmul_parameters: number of parameters that take part in matrix multiplications (not
            position embeddings or untied input embeddings).
        trained: how many of them are trained.
        layers: L, the number of transformer blocks.
        hidden: H, the hidden size.
        seq_length: T, the tokens of a sequence.
    """
    return 4 * matmul_parameters + 2 * trained + 12 * layers * hidden * seq_length
