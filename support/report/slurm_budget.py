"""The budget of a run in Slurm jobs: how many jobs, what each loses, and how often to save."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from support.cluster.slurm import SIGNAL_SECONDS, seconds_of
from support.errors import UserError
from support.report.compare import read_json_lines
from support.report.cost import differences, number, read_run
from support.text_tables import text_table
from support.units import human_time

FLAGS = ("results", "hours", "max_steps", "save_seconds", "step_seconds", "mtbf")
# Hours of one GPU: 419 unexpected interruptions in 54 days of 16,384 GPUs (Llama 3, arXiv
# 2407.21783, section 3.3.4).
MTBF_HOURS = 50_000
STARTUP_SECONDS = 120
# Optimizer steps between a stop signal and the save: the running one, the next one, in which the
# ranks agree, and on a GPU one more, see checkpoints.manager.DelayedFlag.
STEPS_TO_STOP = {"cpu": 2, "cuda": 3}


@dataclass(frozen=True)
class Times:
    """Durations of a run in seconds."""

    train: float  # all optimizer steps
    save: float  # the longest time that training waits for a checkpoint
    step: float | None = None  # the mean of the optimizer steps; None if not known
    longest_step: float | None = None
    startup: float = STARTUP_SECONDS  # from the start of a job to the end of its first step
    steps_to_stop: int = STEPS_TO_STOP["cuda"]


@dataclass(frozen=True)
class Budget:
    """The jobs of a run."""

    jobs: int
    interval: float  # seconds between two saves
    saves: int  # number of saves in a job that uses its whole time
    lost: float  # seconds of such a job that do not train, or whose training is lost


def young_daly(save: float, mtbf: float) -> float:
    """Return the time between two saves that loses the least: sqrt(2 · save · MTBF).

    Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; Daly,
    "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3),
    2006. The formula holds for saves that are short relative to the MTBF; for saves longer than
    twice the MTBF, Daly's interval is the MTBF.

    Args:
        mtbf: mean time between failures of the whole job, in the same unit.
    """
    return math.sqrt(2 * save * mtbf) if save < 2 * mtbf else mtbf


def budget_of(times: Times, limit: float, lead: float | None, mtbf: float) -> Budget:
    """Return the budget of a run in jobs with a time limit; all arguments are in seconds.

    Args:
        limit: time limit of a job.
        lead: time from the stop signal, at which a job saves, to the limit. None: there is no
            signal, and every job fails at its limit, which adds to its failure rate.
        mtbf: mean time between failures of a job.
    Raises:
        UserError: a job has no time to train.
    """
    usable = limit - times.startup - (lead or 0)
    interval = young_daly(times.save, 1 / (1 / mtbf + 1 / limit) if lead is None else mtbf)
    if times.step:
        interval = times.step * max(1, round(interval / times.step))
    saves = max(0, math.floor(usable / (interval + times.save)))
    rest = usable - saves * (interval + times.save)
    trained = saves * interval + min(rest, interval)
    kept = saves * interval if lead is None else trained  # of a job that another one continues
    if trained < times.train and kept <= 0:
        raise UserError(
            "--time_limit: start-up, saves and the signal leave no time to train in "
            f"{human_time(limit)}: use a longer limit."
        )
    jobs = 1 if trained >= times.train else 1 + math.ceil((times.train - trained) / kept)
    return Budget(jobs, interval, saves, limit - kept)


def times_of(args) -> tuple[Times, str, str]:
    """Return the durations that the flags give or --results measured.

    Returns:
        The durations, where that of a save is from, and how the plan differs from the measured run.
    """
    if bool(args.hours) == bool(args.max_steps):
        raise UserError("The budget of a run needs its length: either --hours or --max_steps.")
    measured, source, different = {}, "given", ""
    if args.results:
        place, results = read_run("--results", args.results)
        measured, source = _measured(place, results, args.results), f"measured: {place}"
        different = differences(results, {"world_size": ranks_of(args)})
    step = args.step_seconds
    given = {"save": args.save_seconds, "step": step, "longest_step": step}
    found = measured | {name: value for name, value in given.items() if value}
    if "save" not in found:
        raise UserError(
            "The budget of a run needs the time of a save: --save_seconds, or --results of a run "
            "with --save_every."
        )
    if args.max_steps and "step" not in found:
        raise UserError("--max_steps needs the time of a step: --step_seconds or --results.")
    train = 3600 * args.hours if args.hours else args.max_steps * found["step"]
    return Times(train, **found), "given" if args.save_seconds else source, different


def _measured(place: str, results: dict, path: str) -> dict:
    """Return the fields of `Times` that a run measured.

    Args:
        path: its path, or that of its folder, which has metrics.jsonl.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    records = [record for record in read_json_lines(folder / "metrics.jsonl") if "loss" in record]
    steps = [number(place, record, "seconds") for record in records]
    excluded = results.get("warmup_steps_excluded")
    steps = steps[excluded:] if type(excluded) is int else steps
    median, p90 = (number(place, results, f"step_seconds.{key}") for key in ("median", "p90"))
    found = {
        "step": mean(steps) if steps else median,
        "longest_step": max(steps, default=p90),
        "startup": number(place, results, "seconds_to_first_step"),
        "steps_to_stop": STEPS_TO_STOP["cpu" if results.get("device") == "cpu" else "cuda"],
    }
    key = "checkpoint_seconds"
    saves = results.get(key)
    if isinstance(saves, list) and saves:
        found["save"] = max(number(place, {key: save}, key) for save in saves)
    return found


def ranks_of(args) -> int:
    """Return the number of ranks of the job."""
    return args.num_nodes * (args.num_gpus_per_node or 1)


def report(args) -> str:
    """Return the Slurm budget as text; "" if no flag asks for it."""
    if not any(getattr(args, flag) for flag in FLAGS):
        return ""
    times, source, different = times_of(args)
    lead = (args.signal_seconds or SIGNAL_SECONDS) if args.requeue else None
    mtbf = 3600 * (args.mtbf or MTBF_HOURS) / ranks_of(args)
    plan = budget_of(times, seconds_of(args.time_limit), lead, mtbf)
    lines = [text_table(_rows(args, times, plan, source), ("Slurm budget", "value", "source"))]
    lines.append(_signal(times, lead))
    if different:
        lines.append(f"⚠️  The measured run differs in {different}.")
    return "\n".join(lines)


def _rows(args, times: Times, plan: Budget, source: str) -> list[tuple[str, str, str]]:
    """Return the rows of the table: the name of a number, its value, and where it is from."""
    per_gpu, ranks = args.mtbf or MTBF_HOURS, ranks_of(args)
    rate = "given" if args.mtbf else "assumed, from Llama 3, arXiv 2407.21783"
    failures = f"{per_gpu:,g} h for a GPU ({rate}), {ranks} of them"
    failures += "" if args.requeue else "; the limit is a failure, too"
    training = f"{human_time(times.train)} of training in jobs of {args.time_limit}"
    startup = human_time(times.startup) + ("" if args.results else ", assumed")
    end = "the time from the signal" if args.requeue else "the steps after the last save"
    lost = f"start-up ({startup}), {plan.saves:,} saves, and {end}"
    formula = "√(2 · save · MTBF): Young, Daly"
    if args.requeue and not plan.saves:
        formula += "; longer than a job, so the save at the signal is enough"
    rows = [
        ("jobs", f"{plan.jobs:,}", training),
        ("lost in a full job", human_time(plan.lost), lost),
        ("time of a save", human_time(times.save), source),
        ("MTBF", human_time(3600 * per_gpu / ranks), failures),
        ("time between saves", human_time(plan.interval), formula),
    ]
    if times.step:
        every = f"{round(plan.interval / times.step):,}"
        rows.append(("--save_every", every, f"steps of {human_time(times.step)}"))
    return rows


def _signal(times: Times, lead: float | None) -> str:
    """Say whether the stop signal is early enough for the running steps and a save."""
    if lead is None:
        return "⚠️  Without --requeue a job neither saves before its limit nor continues after it."
    if times.longest_step is None:
        return "⚠️  The signal cannot be checked without --step_seconds or --results."
    needed = times.steps_to_stop * times.longest_step + times.save
    text = (
        f"the signal arrives {lead:.0f} s before the limit; {times.steps_to_stop} steps of up to "
        f"{human_time(times.longest_step)} and a save need {human_time(needed)}"
    )
    if needed <= lead:
        return f"✅ Early enough: {text}."
    return f"⚠️  Too late: {text}. Add --signal_seconds {60 * math.ceil(2 * needed / 60)}."
