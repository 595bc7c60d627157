"""The cost of a run before it starts: hours, price, energy, Slurm jobs, speed on more ranks.

hours = tokens / (tokens per second of a GPU × GPUs). The rate is measured by a run, or assumed
(peak FLOP/s of a device × MFU). Imports nothing heavy.
"""

from __future__ import annotations

import itertools
import math
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from support import PROJECT, process
from support.cli.argument_types import Options
from support.cli.ds_config import lookup
from support.cluster.slurm import SIGNAL_SECONDS, seconds_of
from support.console import text_table
from support.errors import TrainingError, UserError
from support.files.user_files import read_json, shown
from support.memory.workload import Workload
from support.report.metrics_file import read_metrics
from support.report.peak_flops import find_by_short_name, flops_per_token
from support.tables import STRATEGIES
from support.units import human_rate, human_time

DEFAULT_MFU = 0.4
MEASURED_STEPS = 10  # of --measure, of which a run excludes the first two from its rate
WORK, RATE = ("tokens", "dataset_tokens", "max_steps"), ("measure", "results", "device")


class Rate(NamedTuple):
    """The speed at which one GPU, or one CPU process, trains."""

    tokens_per_second: float  # of one rank
    source: str  # "measured" or "assumed"
    basis: str  # on what it was measured, or from what it follows, in a few words
    details: str  # the same in more words
    device: str  # name of the GPU or CPU
    warnings: list[str]  # why the planned run may have another rate
    share: float = 1.0  # of the positions of its sequences that hold tokens, not padding


class Cost(NamedTuple):
    """The cost of a run; `str` has it as text."""

    summary: str
    values: dict[str, float]
    texts: dict[str, str]  # the values as text
    sources: dict[str, str]  # where each value is from
    warnings: list[str]

    def __str__(self) -> str:
        rows = [(key, text, self.sources[key]) for key, text in self.texts.items()]
        lines = [self.summary, "", text_table(rows, ("number", "value", "source"))]
        lines.append("Start, evaluation, checkpoints and export of the run are not included.")
        return "\n".join(lines + [f"⚠️  {warning}" for warning in self.warnings])


def is_planned(args: Options) -> bool:
    """Return whether the flags of plan_memory.py ask for the cost; raise if they do not fit."""
    others = ("epochs", "mfu", "price", "watts", "time_limit", "save_seconds")
    given = [flag for flag in (*WORK, *RATE, *others) if getattr(args, flag)]
    if given and args.solve:
        raise UserError(f"--{given[0]} has no effect with --solve: leave one out.")
    for names, purpose in ((WORK, "amount of work"), (RATE, "rate")) if given else ():
        if not {*names} & {*given}:
            known = ", --".join(names)
            raise UserError(f"--{given[0]} needs the {purpose}: add one of --{known}.")
    needs = {"epochs": "dataset_tokens", "mfu": "device", "save_seconds": "time_limit"}
    for flag, needed in needs.items():
        if flag in given and needed not in given:
            raise UserError(f"--{flag} needs --{needed}.")
    return bool(given)


def amount_of_work(args: Options, global_batch: int, share: float = 1.0) -> tuple[str, int, int]:
    """Return the work in words, the tokens and the optimizer steps of a run; `share`: see Rate."""
    length = args.seq_length * share
    if args.max_steps:
        tokens = round(args.max_steps * global_batch * length)
        return f"{args.max_steps:,} steps", tokens, args.max_steps
    if args.tokens:
        steps = math.ceil(args.tokens / (global_batch * length))
        return f"{args.tokens:,} tokens", args.tokens, steps
    sequences, epochs = int(args.dataset_tokens / length), args.epochs or 1
    if not sequences:
        raise UserError(
            f"--dataset_tokens {args.dataset_tokens} is less than one sequence of "
            f"{args.seq_length} tokens: use a smaller --seq_length."
        )
    words, steps = f"{epochs} epoch{'s' * (epochs > 1)}", math.ceil(sequences / global_batch)
    return words, round(epochs * sequences * length), epochs * steps


def cost_of(args: Options, work: Workload, rate: Rate) -> Cost:
    """Return the cost of a run."""
    global_batch = work.batch_size * work.accumulation * work.world_size
    words, tokens, steps = amount_of_work(args, global_batch, rate.share)
    gpu_hours = tokens / rate.tokens_per_second / 3600
    hours, speed = gpu_hours / work.world_size, rate.tokens_per_second
    by_rate = f"{rate.source} rate"
    values = {"tokens": tokens, "steps": steps, "tokens_per_second_per_gpu": speed}
    values |= {"hours": hours, "gpu_hours": gpu_hours}
    batch = f"computed: {global_batch:,} sequences of {work.seq_length:,} tokens per step"
    batch += f", of which {1 - rate.share:.1%} is padding" if rate.share < 1 else ""
    given = " and ".join(f"--{flag}" for flag in (*WORK, "epochs") if getattr(args, flag))
    sources = {"tokens": f"given: {given}", "steps": batch}
    sources |= {"tokens_per_second_per_gpu": f"{rate.source}: {rate.details}"}
    sources |= {"hours": by_rate, "gpu_hours": by_rate}
    texts = {key: f"{value:,.0f}" for key, value in values.items()}
    texts["hours"] = f"{human_rate(hours)} h" + f" ({human_time(3600 * hours)})" * (hours < 2)
    texts["gpu_hours"] = f"{human_rate(gpu_hours)} GPU-hours"
    if args.price:
        values["price"] = gpu_hours * args.price
        texts["price"] = f"${values['price']:,.2f}"
        sources["price"] = f"{by_rate}, given: {args.price:g} per GPU-hour"
    if args.watts:
        values["energy_kwh"] = gpu_hours * args.watts / 1000
        texts["energy_kwh"] = f"{human_rate(values['energy_kwh'])} kWh"
        watts = f"given: {args.watts:g} W per GPU; host and cooling not included"
        sources["energy_kwh"] = f"{by_rate}, {watts}"
    title = f"{words} on {work.world_size} x {rate.device}"
    summary = f"{title}: {', '.join([*texts.values()][3:])} ({rate.source}: {rate.basis})"
    return Cost(summary, values, texts, sources, rate.warnings)


# --------------------------------------------------------------------------------------- the rate


def assumed_rate(args: Options, work: Workload) -> Rate:
    """Return the rate of --device at --mfu."""
    peak, mfu, model = find_by_short_name(args.device), args.mfu or DEFAULT_MFU, work.model
    flops = peak.flops(work.precision)
    if flops is None:
        raise UserError(f"--device {peak.title} has no {work.precision}: use --precision fp16.")
    # An embedding lookup is no matrix multiplication, unless the output layer shares the table.
    lookups = model.hidden * (model.positions + (0 if model.tied else model.vocabulary))
    matmul, trained = sum(work.sizes) - lookups, sum(work.trained) - (0 if work.lora else lookups)
    per_token = flops_per_token(matmul, trained, model.layers, model.hidden, work.seq_length)
    basis = f"MFU {100 * mfu:g} %"
    of_peak = f"of the {flops / 1e12:,.0f} TFLOP/s in {work.precision} ({peak.source})"
    details = f"{basis} {of_peak}, {per_token:.3g} FLOP per token"
    warnings = ["The rate is an assumption: --measure on such a GPU replaces it."]
    if work.gradient_checkpointing:
        warnings.append("Gradient checkpointing lowers MFU, which does not count recomputation.")
    return Rate(flops * mfu / per_token, "assumed", basis, details, peak.title, warnings)


def measured_rate(
    place: str, results: dict[str, Any], work: Workload, model: str, strategy: str
) -> Rate:
    """Return the rate of a run, for a plan with the same model, sequence length and precision."""
    must_match = {
        "parameters": sum(work.sizes),
        "trainable_parameters": sum(work.trained),
        "seq_length": work.seq_length,
        "precision": work.precision,
    }
    if different := differences(results, must_match):
        raise UserError(
            f"{place} is a run of {shown(results.get('model'))}, and the plan for {shown(model)} "
            f"differs in {different}: plan the run's work, or name a run of the planned work."
        )
    may_differ = {
        "strategy": strategy,
        "world_size": work.world_size,
        "batch_size": work.batch_size,
        "gradient_accumulation_steps": work.accumulation,
        "gradient_checkpointing": work.gradient_checkpointing,
    }
    warnings = []
    if different := differences(results, may_differ):
        warnings.append(
            f"The measured run differs in {different}. Its rate is used unchanged: communication "
            "that only the planned run has is not included."
        )
    gpu = lookup(results, "hardware.gpu")
    if not gpu:
        warnings.append("The rate is that of CPU processes, not of GPUs.")
    device = shown(gpu or "CPU process")
    basis = f"on {results['world_size']} x {device}"
    cpu = "" if gpu else f" ({shown(lookup(results, 'hardware.cpu'))})"
    details = f"{basis}{cpu}, {results['steps']} steps, {place}"
    rate, share = results["tokens_per_second_per_gpu"], share_of_tokens(results)
    return Rate(rate, "measured", basis, details, device, warnings, share)


def share_of_tokens(results: dict[str, Any]) -> float:
    """Return the share of the positions of a run's sequences that hold tokens; see `Rate`."""
    tokens, samples, length = (results.get(key) for key in ("tokens", "samples", "seq_length"))
    return min(1.0, tokens / (samples * length)) if tokens and samples and length else 1.0


def differences(results: dict[str, Any], planned: dict[str, Any]) -> str:
    """Return the keys of results.json that differ from the plan, with both values."""
    return ", ".join(
        f"{key} ({shown(results.get(key))}, planned: {value})"
        for key, value in planned.items()
        if results.get(key) != value
    )


def read_run(flag: str, path: str) -> tuple[str, dict[str, Any]]:
    """Return the flag with the path, for messages, and the results.json of a completed run.

    Raises:
        UserError: the file is missing or damaged, or the run did not complete or did not train.
    """
    file = str(Path(path) / "results.json" if Path(path).is_dir() else path)
    results, place = read_json(flag, file), f"{flag} {shown(file)}"
    if results.get("status") != "completed":
        why = f"{shown(results.get('status'))} ({shown(results.get('reason'))})"
        raise UserError(f"{place}: the run's status is {why}: name a completed run.")
    if not results["tokens_per_second_per_gpu"]:
        raise UserError(f"{place}: the run trained no step: name a run that trained.")
    return place, results


def measure(flags: list[str], work: Workload) -> tuple[str, dict[str, Any]]:
    """Train a few steps from random weights on generated text, and return what `read_run` returns.

    It runs on as many GPUs as this machine has, at most as many as planned, or in one CPU process.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError("--measure needs PyTorch: pip install -r requirements.txt.") from error
    ranks = min(torch.cuda.device_count(), work.world_size) or 1
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
        exit_code, log = process.run_program([*launcher, *command])
        if exit_code:
            lines = log.strip().splitlines() or ["no output"]
            reasons = [line for line in lines if line.startswith("❌")] or lines[-1:]
            raise TrainingError(f"--measure: the run failed: {reasons[0].removeprefix('❌ ')}")
        return "--measure", read_run("--measure", f"{folder}/run")[1]


# -------------------------------------------------------------------------------- Slurm jobs

BUDGET_FLAGS = ("results", "hours", "max_steps", "save_seconds", "step_seconds", "mtbf")
# Hours of one GPU: 419 unexpected interruptions in 54 days of 16,384 GPUs (Llama 3, arXiv
# 2407.21783, section 3.3.4).
MTBF_HOURS = 50_000
STARTUP_SECONDS = 120
# Optimizer steps between a stop signal and the save: the running one, the next one, in which the
# ranks agree, and on a GPU one more, see checkpoints.manager.
STEPS_TO_STOP = {"cpu": 2, "cuda": 3}


class Times(NamedTuple):
    """Durations of a run in seconds."""

    train: float  # all optimizer steps
    save: float  # the longest time that training waits for a checkpoint
    step: float | None = None  # the mean of the optimizer steps; None if not known
    longest_step: float | None = None
    startup: float = STARTUP_SECONDS  # from the start of a job to the end of its first step
    steps_to_stop: int = STEPS_TO_STOP["cuda"]


class Budget(NamedTuple):
    """The jobs of a run."""

    jobs: int
    interval: float  # seconds between two saves
    saves: int  # number of saves in a job that uses its whole time
    lost: float  # seconds of such a job that do not train, or whose training is lost


def young_daly(save: float, mtbf: float) -> float:
    """Return the time between two saves that loses the least (Young 1974, Daly 2006).

    For saves longer than twice the mean time between failures of the job it is that time (MTBF).
    """
    return math.sqrt(2 * save * mtbf) if save < 2 * mtbf else mtbf


def budget_of(times: Times, limit: float, lead: float | None, mtbf: float) -> Budget:
    """Return the budget of a run in jobs with a time limit; all arguments are in seconds.

    Args:
        limit: time limit of a job.
        lead: time from the stop signal, at which a job saves, to the limit. None: there is no
            signal, and every job fails at its limit, which adds to its failure rate.
        mtbf: mean time between failures of a job.
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


def times_of(args: Options, results: dict[str, Any] | None) -> Times:
    """Return the durations that the flags give, or else those of the run of --results."""
    if bool(args.hours) == bool(args.max_steps):
        raise UserError("The budget of a run needs its length: either --hours or --max_steps.")
    found: dict[str, Any] = {}
    if results:
        path = Path(args.results)
        file = (path if path.is_dir() else path.parent) / "metrics.jsonl"
        records = read_metrics(file)[0] if file.is_file() else []
        steps = [record["seconds"] for record in records if "loss" in record]
        steps = steps[results["warmup_steps_excluded"] :] or [results["step_seconds"]["p90"]]
        found = {
            "step": mean(steps),
            "longest_step": max(steps),
            "startup": results["seconds_to_first_step"],
            "steps_to_stop": STEPS_TO_STOP[results["device"]],
        }
        found |= {"save": max(saves)} if (saves := results["checkpoint_seconds"]) else {}
    step = args.step_seconds
    given = {"save": args.save_seconds, "step": step, "longest_step": step}
    found |= {name: value for name, value in given.items() if value}
    if "save" not in found:
        raise UserError(
            "The budget of a run needs the time of a save: --save_seconds, or --results of a run "
            "with --save_every."
        )
    if args.max_steps and "step" not in found:
        raise UserError("--max_steps needs the time of a step: --step_seconds or --results.")
    return Times(3600 * args.hours if args.hours else args.max_steps * found["step"], **found)


def slurm_budget(args: Options) -> str:
    """Return the Slurm budget as text; "" if no flag asks for it."""
    if not any(getattr(args, flag) for flag in BUDGET_FLAGS):
        return ""
    ranks = args.num_nodes * (args.num_gpus_per_node or 1)
    measured = read_run("--results", args.results) if args.results else None
    times = times_of(args, measured[1] if measured else None)
    lead = (args.signal_seconds or SIGNAL_SECONDS) if args.requeue else None
    per_gpu = args.mtbf or MTBF_HOURS
    plan = budget_of(times, seconds_of(args.time_limit), lead, 3600 * per_gpu / ranks)
    rate = "given" if args.mtbf else "assumed, from Llama 3, arXiv 2407.21783"
    failures = f"{per_gpu:,g} h for a GPU ({rate}), {ranks} of them"
    failures += "" if args.requeue else "; the limit counts as a failure"
    startup = human_time(times.startup) + ("" if args.results else ", assumed")
    end = "the time from the signal" if args.requeue else "the steps after the last save"
    formula = "√(2 · save · MTBF): Young, Daly"
    if args.requeue and not plan.saves:
        formula += "; longer than a job, so the save at the signal is enough"
    lost = f"start-up ({startup}), {plan.saves:,} saves, and {end}"
    source = f"measured: {measured[0]}" if measured and not args.save_seconds else "given"
    training = f"{human_time(times.train)} of training in jobs of {args.time_limit}"
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
    lines = [text_table(rows, ("Slurm budget", "value", "source")), _signal(times, lead)]
    if measured and (different := differences(measured[1], {"world_size": ranks})):
        lines.append(f"⚠️  The measured run differs in {different}.")
    return "\n".join(lines)


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


# ------------------------------------------------------------------------ speed on more ranks

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")  # as --check measures them
# How often a rank sends each byte of the message, in units of (N - 1) / N; 1 for the others.
TIMES_SENT = {"all_reduce": 2, "barrier": 0}
# Collectives that are not measured, and the one whose speed is assumed.
LIKE = {"broadcast": "all_gather", "all_to_all": "all_gather"}
LIKE |= {"reduce": "all_reduce", "barrier": "all_reduce"}
SAME_WORK = ("model", "strategy", "precision", "batch_size", "seq_length", "trainable_parameters")


@dataclass(frozen=True)
class Network:
    """Speed of the network: a latency, and a time that grows with the message (Hockney's model).

    Between the measured sizes of messages the time is interpolated.
    """

    # For each of COLLECTIVES points (message bytes, seconds in addition to the latency, in units
    # of (N - 1) / N) in ascending order. An all-reduce transfers its message twice.
    transfer: dict[str, list[tuple[float, float]]]
    hop_seconds: float  # the time of one of the 2 (N - 1) messages of a small all-reduce in a ring

    @classmethod
    def measured(
        cls, ranks: int, latency: float, bandwidth: Mapping[int, Sequence[float]]
    ) -> Network:
        """Return the network that --check has measured on a number of ranks.

        Args:
            latency: seconds of a small all-reduce.
            bandwidth: for a message's bytes the rates of COLLECTIVES, in bytes that a rank sends
                per second if the collective is a ring.
        """
        share = (ranks - 1) / ranks
        transfer: dict[str, list[tuple[float, float]]] = {kind: [(0, 0)] for kind in COLLECTIVES}
        for message, rates in sorted(bandwidth.items()):
            for kind, rate in zip(COLLECTIVES, rates, strict=True):
                seconds = message / rate - latency / TIMES_SENT.get(kind, 1) / share
                transfer[kind].append((message, max(0, seconds)))
        return cls(transfer, latency / (2 * (ranks - 1)))

    def seconds(self, kind: str, ranks: int, calls: float, sent: float) -> float:
        """Return the time of collectives of one kind, in which a rank sends (N - 1) / N `sent`."""
        latency = calls * 2 * (ranks - 1) * self.hop_seconds
        transfers = calls * TIMES_SENT.get(kind, 1)
        if not sent:  # a barrier
            return latency
        message, each = sent / transfers, 0.0
        for (size, before), (next_size, after) in itertools.pairwise(
            self.transfer[LIKE.get(kind, kind)]
        ):
            part = min(1, (message - size) / (next_size - size))
            each = before + part * (after - before)
            if message <= next_size:
                break
        return latency + transfers * each * max(1, message / next_size) * (ranks - 1) / ranks


@dataclass(frozen=True)
class Step:
    """What an optimizer step consists of."""

    micro_batch_seconds: float  # data, forward and backward of a micro-batch on one rank
    update_seconds: float  # on one rank, which is also assumed where the ranks share the update
    # (kind, calls, sent) as for Network.seconds, and whether they are those of a micro-batch.
    collectives: list[tuple[str, float, float, bool]]

    def seconds(self, ranks: int, micro_batches: int, network: Network) -> tuple[float, float]:
        """Return the seconds of a step, without any overlap, and of these in communication."""
        computing = micro_batches * self.micro_batch_seconds + self.update_seconds
        communicating = sum(
            network.seconds(kind, ranks, calls, sent) * (micro_batches if repeated else 1)
            for kind, calls, sent, repeated in self.collectives
        )
        return computing + communicating, communicating


def read_step(alone: Path, together: Path) -> Step:
    """Read a step from a run on one rank, which shows the time of the computation, and from the
    same run on several ranks on any network, which shows the collectives.
    """
    one, several = (read_run("The folder", str(folder))[1] for folder in (alone, together))
    if different := [key for key in SAME_WORK if one.get(key) != several.get(key)]:
        raise UserError(f"{alone} and {together} differ in {different[0]}: repeat one of them.")
    if one["world_size"] != 1 or several["world_size"] == 1:
        raise UserError("Name a run on one rank first, and then one on several ranks.")
    phases, micro_batches = one["step_phases_seconds"], one["gradient_accumulation_steps"]
    computing = phases["data"] + phases["forward"] + phases["backward"]
    strategy, collectives = STRATEGIES[several["strategy"]], []
    for name, entry in several["communication_per_step"].items():
        kind = name.split(" ")[0]
        # Without whole gradients on each rank they are reduced after each micro-batch; without
        # whole parameters these are gathered in each. dp, zero1 and fsdp reduce once.
        gathers = kind in ("all_gather", "broadcast")
        repeated = strategy.shards_parameters if gathers else strategy.stage >= 2
        parts = several["gradient_accumulation_steps"] if repeated else 1
        sent = TIMES_SENT.get(kind, 1) * entry["message_bytes"]
        collectives.append((kind, entry["calls"] / parts, sent / parts, repeated))
    return Step(computing / micro_batches, phases["update"], collectives)
