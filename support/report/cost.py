"""The cost of a run before it starts: hours, price, energy, Slurm jobs, speed on more GPUs.

hours = tokens / (tokens per second of a GPU × GPUs). The rate is measured by a run, or assumed
(peak FLOP/s of a device × MFU); the time of communication can be added. Imports nothing heavy.
"""

import math
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from support import PROJECT, programs
from support.cli.parser import Options
from support.cluster.gpus import usable_gpus
from support.cluster.slurm import SIGNAL_SECONDS, seconds_of
from support.errors import TrainingError, UserError
from support.files.json_types import JsonObject
from support.files.user_files import read_user_json, shown
from support.memory.estimate import MemoryEstimate, predict, supporting
from support.memory.fit import Room
from support.report.peak_flops import find_by_short_name, flops_per_token
from support.report.recorded_run import last_error
from support.strategies.deepspeed.options import lookup
from support.strategies.table import PREFERENCE
from support.text_tables import text_table
from support.units import GB, human_rate
from support.workload.workload import Workload

DEFAULT_MFU = 0.4
MEASURED_STEPS = 10  # of --measure, of which a run excludes the first two from its rate
# Hours of one GPU: 419 unexpected interruptions in 54 days of 16,384 GPUs (Llama 3, arXiv
# 2407.21783, section 3.3.4).
MTBF_HOURS = 50_000
STARTUP_SECONDS = 120  # from the start of a job to the end of its first step, if not measured
# Between a signal and the save: the running step, one in which the ranks agree, on a GPU one more.
STEPS_TO_STOP = 3
NETWORK_SHARE = 1 / 3  # of a step: with more, a larger accumulation is worth its global batch
MOST_MICRO_BATCHES = 2**20  # of --gradient_accumulation_steps
WORK, RATE = ("tokens", "max_steps"), ("measure", "results", "device")
NEEDS = {"epochs": "tokens", "mfu": "device", "save_seconds": "time_limit", "mtbf": "time_limit"}


class Rate(NamedTuple):
    """The speed at which one GPU, or one CPU process, trains."""

    tokens_per_second: float  # of one rank
    source: str  # "measured" or "assumed"
    basis: str  # on what it was measured, or from what it follows
    warning: str  # why the planned run may have another rate, or ""
    length: float  # tokens of a sequence without padding, on average
    # Of a measured run: seconds of an update, and tokens of a rank in a step.
    update: float = 0.0
    step_tokens: float = 1.0


class Row(NamedTuple):
    """One number of the cost, the number as text, and where it is from."""

    name: str
    value: float | str | None
    text: str
    source: str


def as_dict(rows: list[Row], warning: str) -> JsonObject:
    """Return the cost of a run for --json."""
    sources = {row.name: row.source for row in rows}
    return {**{row.name: row.value for row in rows}, "sources": sources, "warning": warning}


def as_text(rows: list[Row], warning: str) -> str:
    """Return the cost of a run as a table, with a line of warning."""
    table = text_table([(r.name, r.text, r.source) for r in rows], ("number", "value", "source"))
    end = "Start, evaluation, checkpoints and export of the run are not included."
    return f"{table}\n{end}" + (f"\n⚠️  {warning}" if warning else "")


def is_planned(args: Options) -> bool:
    """Return whether the flags of plan_memory.py ask for the cost; raise if they do not fit."""
    flags = (*WORK, *RATE, *NEEDS, "price", "watts", "time_limit", "bandwidth")
    given = [flag for flag in flags if getattr(args, flag)]
    if given and args.solve:
        raise UserError(f"--{given[0]} has no effect with --solve: leave one out.")
    for names, purpose in ((WORK, "amount of work"), (RATE, "rate")) if given else ():
        if len({*names} & {*given}) != 1:
            raise UserError(f"The cost needs one {purpose}: --{' or --'.join(names)}.")
    for flag, needed in NEEDS.items():
        if flag in given and needed not in given:
            raise UserError(f"--{flag} needs --{needed}.")
    return bool(given)


def cost_of(
    args: Options, work: Workload, need: MemoryEstimate, flags: list[str], room: Room
) -> tuple[list[Row], str]:
    """Return the cost of a planned run, and a warning or "".

    Args:
        need: the memory estimate of the run's strategy, which has the bytes that a rank sends.
        flags: those of real_model_example.py for the run, for --measure.
        room: the memory and the speeds of the ranks.
    Raises:
        UserError: --results names no run of this work, or a value is missing.
    """
    results: JsonObject = {}
    if args.device:
        rate = assumed_rate(args, work)
    else:
        name, results = (
            measure(args, flags, work) if args.measure else read_completed_run(args.results)
        )
        rate = measured_rate(args, name, results, work, need.strategy)
    rate = at_pace(rate, room.pace(work, need.strategy))
    network: list[Row] = []
    if args.bandwidth and need.sent:
        network = network_rows(rate, work, need.strategy, args.bandwidth, room)
    if args.bandwidth:
        rate = on_network(rate, work, need.sent, args.bandwidth)
    rows, gpu_hours, steps = time_rows(args, work, rate)
    rows += network
    by_rate = f"{rate.source} rate"
    if args.price:
        price, source = gpu_hours * args.price, f"{by_rate}, given: {args.price:g} per GPU-hour"
        rows.append(Row("price", price, f"${price:,.2f}", source))
    if args.watts:
        energy = gpu_hours * args.watts / 1000
        source = f"{by_rate}, given: {args.watts:g} W per GPU; host and cooling not included"
        rows.append(Row("energy_kwh", energy, f"{human_rate(energy)} kWh", source))
    if args.time_limit:
        seconds = 3600 * gpu_hours / work.world_size
        rows += slurm_rows(args, work.world_size, seconds, steps, results)
    return rows, rate.warning


def time_rows(args: Options, work: Workload, rate: Rate) -> tuple[list[Row], float, int]:
    """Return the rows about tokens, steps, rate and time of a run, its GPU-hours and its steps."""
    batch = work.batch_size * work.accumulation * work.world_size
    tokens, steps = amount_of_work(args, batch, rate.length)
    gpu_hours = tokens / rate.tokens_per_second / 3600
    hours, by_rate = gpu_hours / work.world_size, f"{rate.source} rate"
    given = " and ".join(f"--{flag}" for flag in (*WORK, "epochs") if getattr(args, flag))
    step = f"computed: {batch:,} sequences of {rate.length:,.0f} tokens per step"
    speed, of_rate = rate.tokens_per_second, f"{rate.source}: {rate.basis}"
    return (
        [
            Row("tokens", tokens, f"{tokens:,}", f"given: {given}"),
            Row("steps", steps, f"{steps:,}", step),
            Row("tokens_per_second_per_gpu", speed, f"{speed:,.0f}", of_rate),
            Row("hours", hours, human_time(3600 * hours), by_rate),
            Row("gpu_hours", gpu_hours, f"{human_rate(gpu_hours)} GPU-hours", by_rate),
        ],
        gpu_hours,
        steps,
    )


def amount_of_work(args: Options, global_batch: int, length: float) -> tuple[int, int]:
    """Return the tokens and the optimizer steps of a run.

    Args:
        global_batch: sequences of a step, over all ranks.
        length: tokens of a sequence.
    """
    if args.max_steps:
        return round(args.max_steps * global_batch * length), args.max_steps
    sequences, epochs = max(1, int(args.tokens / length)), args.epochs or 1
    return round(epochs * sequences * length), epochs * math.ceil(sequences / global_batch)


# --------------------------------------------------------------------------------------- the rate


def assumed_rate(args: Options, work: Workload) -> Rate:
    """Return the rate of --device at --mfu."""
    peak, mfu, model = find_by_short_name(args.device), args.mfu or DEFAULT_MFU, work.model
    flops = peak.flops(work.precision)
    if flops is None:
        raise UserError(f"--device {peak.title} has no {work.precision}: use --precision fp16.")
    # An embedding lookup is no matrix multiplication, unless the output layer shares the table.
    tables = model.embedding
    lookups = model.hidden * (tables.positions + (0 if tables.tied else tables.vocabulary))
    matmul, trained = sum(work.sizes) - lookups, sum(work.trained) - (0 if work.lora else lookups)
    per_token = flops_per_token(matmul, trained, model.layers, model.hidden, work.seq_length)
    of_peak = f"of the {flops / 1e12:,.0f} TFLOP/s in {work.precision} ({peak.source})"
    basis = f"MFU {100 * mfu:g} % {of_peak}, {per_token:.3g} FLOP per token"
    warning = "The rate is an assumption: --measure on such a GPU replaces it."
    return Rate(flops * mfu / per_token, "assumed", basis, warning, work.seq_length)


def measured_rate(
    args: Options, place: str, results: JsonObject, work: Workload, strategy: str
) -> Rate:
    """Return the rate of a run, for a plan with the same model, sequence length and precision.

    `place` names the run in messages, `results` is its results.json, `strategy` that of the plan.
    """
    must_match = {
        "parameters": sum(work.sizes),
        "trainable_parameters": sum(work.trained),
        "seq_length": work.seq_length,
        "precision": work.precision,
    }
    ranks, gpu, warning = results["world_size"], lookup(results, "hardware.gpu"), ""
    if is_of_one_rank(args):
        must_match["world_size"] = 1
    if different := differences(results, must_match):
        run = f"{place} is a run of {shown(results.get('model'))}"
        raise UserError(f"{run}; the plan needs one that does not differ in {different}.")
    may_differ = {
        "strategy": strategy,
        "world_size": ranks if is_of_one_rank(args) else work.world_size,
        "batch_size": work.batch_size,
        "gradient_accumulation_steps": work.accumulation,
        "gradient_checkpointing": work.gradient_checkpointing,
    }
    if different := differences(results, may_differ):
        warning = f"The measured run differs in {different}. Its rate is used unchanged."
        if work.world_size > ranks and not args.bandwidth:
            warning += " Communication of more ranks is not included: add --bandwidth."
    device = gpu or f"CPU process of {lookup(results, 'hardware.cpu')}"
    basis = f"on {ranks} x {shown(device)}, {results['steps']} steps, {place}"
    speed, length = results["tokens_per_second_per_gpu"], results["tokens"] / results["samples"]
    update = float(lookup(results, "step_phases_seconds.update") or 0)
    step_tokens = results["tokens"] / results["steps"] / ranks
    return Rate(speed, "measured", basis, warning, length, update, step_tokens)


def is_of_one_rank(args: Options) -> bool:
    """Return whether the rate must be that of one rank: the plan adds what several ranks change."""
    return bool(args.bandwidth or args.gpu_speeds or len(args.gpu_memory or ()) > 1)


def at_pace(rate: Rate, pace: float) -> Rate:
    """Return the average rate of unequal ranks, of which the slowest determines a step.

    Args:
        rate: of a rank of speed 1.
        pace: as `Room.pace`.
    """
    if pace == 1:
        return rate
    basis = f"{rate.basis}, of a GPU of speed 1; {pace:.2f} x that on average"
    speed, update = pace * rate.tokens_per_second, rate.update / pace
    return rate._replace(tokens_per_second=speed, basis=basis, update=update)


def on_network(rate: Rate, work: Workload, sent: int, bandwidth: float) -> Rate:
    """Return the rate with the time of communication added to each step, without any overlap.

    Args:
        rate: of one rank alone.
        sent: bytes that a rank sends per step.
        bandwidth: GB (2^30 bytes) that a rank sends per second.
    """
    tokens, sending = work.batch_size * work.accumulation * rate.length, sent / (bandwidth * GB)
    step = tokens / rate.tokens_per_second + sending
    part = f"sending takes {sending / step:.0%} of {human_time(step)}"
    return rate._replace(tokens_per_second=tokens / step, basis=f"{rate.basis}; {part}")


def network_rows(
    rate: Rate, work: Workload, strategy: str, bandwidth: float, room: Room
) -> list[Row]:
    """Return the rows about the accumulation with which the network takes less than a third.

    If a strategy reaches it at no accumulation, or does not fit with it, a row names another one
    that sends once per step and fits.

    Args:
        rate: without the network.
        bandwidth: GB (2^30 bytes) that a rank sends per second.
    """
    name, number = "accumulation_for_network", enough_accumulation(rate, work, strategy, bandwidth)
    if number:
        more = replace(work, accumulation=number)
        if room.fits(more, strategy):
            part = sending_share(rate, more, strategy, bandwidth)
            batch, now = (w.batch_size * w.accumulation * w.world_size for w in (more, work))
            source = f"computed: {work.batch_size} x {work.world_size} ranks x {number:,}"
            return [
                Row(name, number, f"{number:,}", f"computed: sending takes {part:.0%} of a step"),
                Row("global_batch_for_network", batch, f"{batch:,}", f"{source}; now {now:,}"),
            ]
        size = room.estimate(more, strategy).total / GB
        why = f"{number:,} would suffice, but need {size:.1f} GB"
    else:
        most = replace(work, accumulation=MOST_MICRO_BATCHES)
        part = sending_share(rate, most, strategy, bandwidth)
        why = f"{strategy} sends at least {part:.0%} of a step at any accumulation"
    other = once_per_step(rate, work, bandwidth, room)
    advice = Row("strategy_for_network", None, "none", "none that sends once per step fits")
    if other:
        flags = f"--strategy {other[0]} --gradient_accumulation_steps {other[1]}"
        advice = Row("strategy_for_network", other[0], other[0], f"sends once per step: {flags}")
    return [Row(name, None, "none", why), advice]


def enough_accumulation(rate: Rate, work: Workload, strategy: str, bandwidth: float) -> int | None:
    """Return the fewest micro-batches of a step of which sending takes less than a third, or None.

    Sending takes a + b·n for n micro-batches, computing u + c·n. The share is below s if
    a + b·n < (u + c·n) · s / (1 - s).
    """
    once, each = sending_seconds(work, strategy, bandwidth)
    update, micro_batch = computing_seconds(rate, work)
    relative = NETWORK_SHARE / (1 - NETWORK_SHARE)
    needed, spare = once - update * relative, micro_batch * relative - each
    if needed < spare:
        return 1
    if spare * MOST_MICRO_BATCHES <= needed:
        return None
    return math.floor(needed / spare) + 1


def computing_seconds(rate: Rate, work: Workload) -> tuple[float, float]:
    """Return the seconds of an update, and of forward and backward of a micro-batch.

    Of an assumed rate, all time is that of micro-batches.
    """
    per_token = 1 / rate.tokens_per_second - rate.update / rate.step_tokens
    return rate.update, work.batch_size * rate.length * per_token


def once_per_step(
    rate: Rate, work: Workload, bandwidth: float, room: Room
) -> tuple[str, int] | None:
    """Return the first strategy that sends once per step, and its accumulation, if it fits."""
    for strategy in [name for name in PREFERENCE if name in supporting(work)]:
        _, each = sending_seconds(work, strategy, bandwidth)
        number = enough_accumulation(rate, work, strategy, bandwidth)
        if not each and number and room.fits(replace(work, accumulation=number), strategy):
            return strategy, number
    return None


def sending_share(rate: Rate, work: Workload, strategy: str, bandwidth: float) -> float:
    """Return the share of sending in a step."""
    sending = predict(work, strategy).sent / (bandwidth * GB)
    update, micro_batch = computing_seconds(rate, work)
    return sending / (sending + update + work.accumulation * micro_batch)


def sending_seconds(work: Workload, strategy: str, bandwidth: float) -> tuple[float, float]:
    """Return the seconds in which a rank sends what it sends once per step, and per micro-batch."""
    first, second = (predict(replace(work, accumulation=n), strategy).sent for n in (1, 2))
    return (2 * first - second) / (bandwidth * GB), (second - first) / (bandwidth * GB)


def differences(results: JsonObject, planned: JsonObject) -> str:
    """Return the keys of results.json that differ from the plan, with both values."""
    return ", ".join(
        f"{key} ({shown(results.get(key))}, planned: {value})"
        for key, value in planned.items()
        if results.get(key) != value
    )


def read_completed_run(path: str, flag: str = "--results") -> tuple[str, JsonObject]:
    """Return the flag with the path, for messages, and the results.json of a completed run.

    Raises:
        UserError: the file is missing or damaged, or the run did not complete or did not train.
    """
    file = str(Path(path) / "results.json" if Path(path).is_dir() else path)
    results, place = read_user_json(flag, file), f"{flag} {shown(file)}"
    if results.get("status") != "completed":
        why = f"{shown(results.get('status'))} ({shown(results.get('reason'))})"
        raise UserError(f"{place}: the run's status is {why}: name a completed run.")
    if not results["tokens_per_second_per_gpu"]:
        raise UserError(f"{place}: the run trained no step: name a run that trained.")
    return place, results


def measure(args: Options, flags: list[str], work: Workload) -> tuple[str, JsonObject]:
    """Train a few steps from random weights on generated text, and return what `read_run` returns.

    It runs on this machine's GPUs, at most as many as planned, or in one CPU process; with
    --bandwidth or unequal GPUs on one GPU.
    """
    try:
        gpus = usable_gpus()
    except ImportError as error:
        raise UserError("--measure needs PyTorch: pip install -r requirements.txt.") from error
    ranks = 1 if is_of_one_rank(args) else min(gpus, work.world_size) or 1
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        # One word is at least one token. A tenth of the text is held out for evaluation.
        tokens = MEASURED_STEPS * ranks * work.batch_size * work.accumulation * work.seq_length
        Path(folder, "text.txt").write_text("the " * (2 * tokens), encoding="utf-8")
        command = [str(PROJECT / "real_model_example.py"), *flags, "--from_scratch"]
        command += ["--max_steps", str(MEASURED_STEPS)]
        print(f"⏳ Measuring {MEASURED_STEPS} steps: {shlex.join(command)}", file=sys.stderr)
        command += ["--dataset", f"{folder}/text.txt", "--output_dir", f"{folder}/run"]
        command += ["--cache_dir", f"{folder}/cache", "--no_eval", "--no_export", "--no_save"]
        exit_code, log = programs.run_program([*launcher, *command])
        if exit_code:
            raise TrainingError(f"--measure: the run failed: {last_error(log)}")
        return "--measure", read_completed_run(f"{folder}/run", "--measure")[1]


# ------------------------------------------------------------------------------------- Slurm jobs


def slurm_budget(train: float, save: float, usable: float, mtbf: float) -> tuple[int, float, float]:
    """Return the number of jobs of a run, the time between two saves, and the training of a job.

    The interval √(2 · save · MTBF) loses the least time (Young 1974, Daly 2006). For saves longer
    than twice the MTBF it is the MTBF. All arguments and times are in seconds: of the run's steps
    (`train`), of a save, of a job from its first step to the signal (`usable`), between failures.
    """
    interval = math.sqrt(2 * save * mtbf) if save < 2 * mtbf else mtbf
    trained = usable * interval / (interval + save)
    if trained <= 0:
        raise UserError("--time_limit leaves no time to train: use a longer limit.")
    return math.ceil(train / trained), interval, trained


def slurm_rows(
    args: Options, ranks: int, train: float, steps: float, results: JsonObject
) -> list[Row]:
    """Return the rows about the Slurm jobs of a run with --requeue.

    `train` is the time of all `steps` in seconds, `results` that of a measured run, or empty.
    """
    limit, step = seconds_of(args.time_limit), train / steps
    startup = results.get("seconds_to_first_step") or STARTUP_SECONDS
    save = args.save_seconds or max(results.get("checkpoint_seconds") or [0])
    if not save:
        given = "--save_seconds, or --results of a run with --save_every"
        raise UserError(f"--time_limit needs the time of a save: {given}.")
    # Twice the time that the last steps and the save need, in whole minutes.
    needed = STEPS_TO_STOP * step + save
    signal = max(SIGNAL_SECONDS, 60 * math.ceil(2 * needed / 60))
    mtbf = args.mtbf or MTBF_HOURS
    usable = limit - startup - signal
    jobs, interval, trained = slurm_budget(train, save, usable, 3600 * mtbf / ranks)
    every, lost = max(1, round(interval / step)), limit - trained
    of_job = f"start-up ({human_time(startup)}), saves, and the time from the signal"
    source = "given" if args.mtbf else "assumed, from Llama 3, arXiv 2407.21783"
    young = f"{human_time(interval)} = √(2 · {human_time(save)} · MTBF)"
    of_signal = f"{STEPS_TO_STOP} steps and a save need {human_time(needed)}"
    return [
        Row("jobs", jobs, f"{jobs:,}", f"of {args.time_limit}, with --requeue"),
        Row("lost_seconds_per_job", lost, human_time(lost), of_job),
        Row("save_every", every, f"{every:,}", f"{young}; MTBF {mtbf:,g} h of a GPU, {source}"),
        Row("signal_seconds", signal, f"{signal}", of_signal),
    ]


def human_time(seconds: float) -> str:
    """22 -> "22.0 s"; from two minutes on in minutes, from two hours on in hours."""
    if seconds < 120:
        return f"{human_rate(seconds)} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
