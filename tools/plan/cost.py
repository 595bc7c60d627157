"""The cost of a run before it starts: hours, price, energy, Slurm jobs, speed on more GPUs.

hours = tokens / (tokens per second of a GPU × GPUs). The rate is measured by a run, or assumed
(peak FLOP/s of a device × MFU); the time of communication can be added. Imports nothing heavy.
"""

import math

from distributed_training.cli.parser import Options
from distributed_training.errors import UserError
from distributed_training.files.json_types import JsonObject
from distributed_training.memory.estimate import MemoryEstimate
from distributed_training.memory.fit import Devices
from distributed_training.ranks.time_limit import SIGNAL_SECONDS, seconds_of
from distributed_training.text_tables import text_table
from distributed_training.units import human_rate
from distributed_training.workload.cost import Cost, cost_of_work
from distributed_training.workload.rate import Rate, assumed_rate
from distributed_training.workload.workload import Workload
from tools.plan.network_cost import network_rows, on_network
from tools.plan.rate import Row, at_pace, human_time, measure, measured_rate, read_completed_run

# Hours of one GPU: 419 unexpected interruptions in 54 days of 16,384 GPUs (Llama 3, arXiv
# 2407.21783, section 3.3.4).
MTBF_HOURS = 50_000
STARTUP_SECONDS = 120  # from the start of a job to the end of its first step, if not measured
# Between a signal and the save: the running step, one in which the ranks agree, on a GPU one more.
STEPS_TO_STOP = 3
WORK, RATE = ("tokens", "max_steps"), ("measure", "results", "device")
NEEDS = {"epochs": "tokens", "mfu": "device", "save_seconds": "time_limit", "mtbf": "time_limit"}


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
    args: Options, work: Workload, need: MemoryEstimate, flags: list[str], devices: Devices
) -> tuple[list[Row], str]:
    """Return the cost of a planned run, and a warning or "".

    Args:
        need: the memory estimate of the run's strategy, which has the bytes that a rank sends.
        flags: those of real_model_example.py for the run, for --measure.
        devices: the memory and the speeds of the ranks.
    Raises:
        UserError: --results names no run of this work, or a value is missing.
    """
    results: JsonObject = {}
    if args.device:
        rate = assumed_rate(args.device, args.mfu, work)
    else:
        name, results = (
            measure(args, flags, work) if args.measure else read_completed_run(args.results)
        )
        rate = measured_rate(args, name, results, work, need.strategy)
    rate = at_pace(rate, devices.pace(work, need.strategy))
    network: list[Row] = []
    if args.bandwidth and need.sent:
        network = network_rows(rate, work, need.strategy, args.bandwidth, devices)
    if args.bandwidth:
        rate = on_network(rate, work, need.sent, args.bandwidth)
    rows, cost = time_rows(args, work, rate)
    rows += network
    by_rate = f"{rate.source} rate"
    if args.price:
        price = cost.gpu_hours * args.price
        source = f"{by_rate}, given: {args.price:g} per GPU-hour"
        rows.append(Row("price", price, f"${price:,.2f}", source))
    if args.watts:
        energy = cost.gpu_hours * args.watts / 1000
        source = f"{by_rate}, given: {args.watts:g} W per GPU; host and cooling not included"
        rows.append(Row("energy_kwh", energy, f"{human_rate(energy)} kWh", source))
    if args.time_limit:
        seconds = 3600 * cost.gpu_hours / work.world_size
        rows += slurm_rows(args, work.world_size, seconds, cost.steps, results)
    return rows, rate.warning


def time_rows(args: Options, work: Workload, rate: Rate) -> tuple[list[Row], Cost]:
    """Return the rows about tokens, steps, rate and time of a run, and these numbers."""
    batch = work.batch_size * work.accumulation * work.world_size
    cost = cost_of_work(work, rate, args.tokens, args.epochs or 1, args.max_steps)
    by_rate, speed = f"{rate.source} rate", cost.tokens_per_second_per_gpu
    given = " and ".join(f"--{flag}" for flag in (*WORK, "epochs") if getattr(args, flag))
    step = f"computed: {batch:,} sequences of {rate.length:,.0f} tokens per step"
    return [
        Row("tokens", cost.tokens, f"{cost.tokens:,}", f"given: {given}"),
        Row("steps", cost.steps, f"{cost.steps:,}", step),
        Row("tokens_per_second_per_gpu", speed, f"{speed:,.0f}", cost.basis),
        Row("hours", cost.hours, human_time(3600 * cost.hours), by_rate),
        Row("gpu_hours", cost.gpu_hours, f"{human_rate(cost.gpu_hours)} GPU-hours", by_rate),
    ], cost


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


def save_times(args: Options, results: JsonObject) -> tuple[float, float]:
    """Return the seconds that training waits for a save, and those that a thread then writes.

    Raises:
        UserError: no flag gives them, and the run of --results has saved nothing.
    """
    if args.save_seconds:
        return args.save_seconds, 0.0
    waits, saves = results.get("checkpoint_seconds"), results.get("saves") or {}
    if not waits:
        given = "--save_seconds, or --results of a run with --save_every"
        raise UserError(f"--time_limit needs the time of a save: {given}.")
    return max(waits), saves.get("write_seconds", 0.0) / (saves.get("count") or 1)


def slurm_rows(
    args: Options, ranks: int, train: float, steps: float, results: JsonObject
) -> list[Row]:
    """Return the rows about the Slurm jobs of a run with --requeue.

    `train` is the time of all `steps` in seconds, `results` that of a measured run, or empty.
    """
    limit, step = seconds_of(args.time_limit), train / steps
    startup = results.get("seconds_to_first_step") or STARTUP_SECONDS
    save, written = save_times(args, results)
    # Twice the time that the last steps and the save need, in whole minutes.
    needed = STEPS_TO_STOP * step + save + written
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
