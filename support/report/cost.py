"""The cost of a run before it starts: optimizer steps, hours, GPU-hours, price and energy.

hours = tokens / (tokens per second of a GPU × GPUs). The rate is measured (results.json of a run,
see measure_rate.py) or assumed (peak FLOP/s of a device × MFU). Imports nothing heavy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from support.cli.ds_config import lookup
from support.errors import UserError
from support.files.user_files import read_json, shown
from support.memory.workload import Workload
from support.report.peak_flops import find_by_short_name, flops_per_token
from support.text_tables import text_table
from support.units import human_rate, human_time

MOST_OF_RESULTS = 256 << 20  # characters; results.json may list every bad row
DEFAULT_MFU = 0.4
WORK, RATE = ("tokens", "dataset_tokens", "max_steps"), ("measure", "results", "device")


@dataclass(frozen=True)
class Rate:
    """The speed at which one GPU, or one CPU process, trains."""

    tokens_per_second: float  # of one rank
    source: str  # "measured" or "assumed"
    basis: str  # on what it was measured, or from what it follows, in a few words
    details: str  # the same in more words
    device: str  # name of the GPU or CPU
    warnings: list[str]  # why the planned run may have another rate
    share: float = 1.0  # of the positions of its sequences that hold tokens, not padding


class Figure(NamedTuple):
    """A number of the cost: its key, its value, the value as text, and where it is from."""

    key: str
    value: float
    text: str
    source: str


@dataclass(frozen=True)
class Cost:
    """The cost of a run; `str` has it as text."""

    title: str
    figures: list[Figure]
    rate: Rate

    @property
    def summary(self) -> str:
        """The figures from the hours on, in one line."""
        texts = ", ".join(figure.text for figure in self.figures[3:])
        return f"{self.title}: {texts} ({self.rate.source}: {self.rate.basis})"

    def as_dict(self) -> dict:
        """Return the entry of --json."""
        return {
            "summary": self.summary,
            **{figure.key: figure.value for figure in self.figures},
            "sources": {figure.key: figure.source for figure in self.figures},
            "warnings": self.rate.warnings,
        }

    def __str__(self) -> str:
        rows = [(figure.key, figure.text, figure.source) for figure in self.figures]
        lines = [self.summary, "", text_table(rows, ("number", "value", "source"))]
        lines.append("Start, evaluation, checkpoints and export of the run are not included.")
        return "\n".join(lines + [f"⚠️  {warning}" for warning in self.rate.warnings])


def is_planned(args) -> bool:
    """Return whether the flags of plan_memory.py ask for the cost; raise if they do not fit."""
    flags = (*WORK, *RATE, "epochs", "mfu", "price", "watts")
    given = [flag for flag in flags if getattr(args, flag)]
    if given and args.solve:
        raise UserError(f"--{given[0]} has no effect with --solve: leave one out.")
    for names, purpose in ((WORK, "amount of work"), (RATE, "rate")) if given else ():
        chosen = [name for name in names if name in given]
        if not chosen:
            known = ", --".join(names)
            raise UserError(f"--{given[0]} needs the {purpose}: add one of --{known}.")
        if len(chosen) > 1:
            both = " and --".join(chosen)
            raise UserError(f"--{both} set the same {purpose}: leave one out.")
    for flag, needed in (("epochs", "dataset_tokens"), ("mfu", "device")):
        if flag in given and needed not in given:
            raise UserError(f"--{flag} needs --{needed}.")
    return bool(given)


def amount_of_work(args, global_batch: int, share: float = 1.0) -> tuple[str, int, int]:
    """Return the work in words, the tokens and the optimizer steps of a run.

    Args:
        args: --max_steps, --tokens, or --dataset_tokens with --epochs; and the seq_length.
        global_batch: sequences per optimizer step; the last step of an epoch may have fewer.
        share: see `Rate`.
    """
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


def cost_of(args, work: Workload, rate: Rate) -> Cost:
    """Return the cost of a run."""
    global_batch = work.batch_size * work.accumulation * work.world_size
    words, tokens, steps = amount_of_work(args, global_batch, rate.share)
    gpu_hours = tokens / rate.tokens_per_second / 3600
    hours, speed = gpu_hours / work.world_size, rate.tokens_per_second
    by_rate, source = f"{rate.source} rate", f"{rate.source}: {rate.details}"
    in_hours = f"{human_rate(hours)} h" + f" ({human_time(3600 * hours)})" * (hours < 2)
    batch = f"computed: {global_batch:,} sequences of {work.seq_length:,} tokens per step"
    batch += f", of which {1 - rate.share:.1%} is padding" if rate.share < 1 else ""
    given = " and ".join(f"--{flag}" for flag in (*WORK, "epochs") if getattr(args, flag))
    figures = [
        Figure("tokens", tokens, f"{tokens:,}", f"given: {given}"),
        Figure("steps", steps, f"{steps:,}", batch),
        Figure("tokens_per_second_per_gpu", speed, f"{speed:,.0f}", source),
        Figure("hours", hours, in_hours, by_rate),
        Figure("gpu_hours", gpu_hours, f"{human_rate(gpu_hours)} GPU-hours", by_rate),
    ]
    if args.price:
        price = gpu_hours * args.price
        source = f"{by_rate}, given: {args.price:g} per GPU-hour"
        figures.append(Figure("price", price, f"${price:,.2f}", source))
    if args.watts:
        energy = gpu_hours * args.watts / 1000
        source = f"{by_rate}, given: {args.watts:g} W per GPU; host and cooling not included"
        figures.append(Figure("energy_kwh", energy, f"{human_rate(energy)} kWh", source))
    return Cost(f"{words} on {work.world_size} x {rate.device}", figures, rate)


# --------------------------------------------------------------------------------------- the rate


def assumed_rate(args, work: Workload) -> Rate:
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


def measured_rate(place: str, results: dict, work: Workload, model: str, strategy: str) -> Rate:
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
    if results.get("device") != "cuda":
        warnings.append("The rate is that of CPU processes, not of GPUs.")
    gpu, ranks = lookup(results, "hardware.gpu"), results.get("world_size")
    device = shown(gpu or "CPU process")
    basis = f"on {shown(ranks)} x {device}"
    cpu = "" if gpu else f" ({shown(lookup(results, 'hardware.cpu'))})"
    details = f"{basis}{cpu}, {shown(results.get('steps'))} steps, {place}"
    rate, share = results["tokens_per_second_per_gpu"], _share_of_tokens(results)
    return Rate(rate, "measured", basis, details, device, warnings, share)


def _share_of_tokens(results: dict) -> float:
    """Return the share of the positions of a run's sequences that hold tokens; see `Rate`."""
    counts: list[Any] = [results.get(key) for key in ("tokens", "samples", "seq_length")]
    if not all(type(count) is int and count > 0 for count in counts):
        return 1.0
    tokens, samples, length = counts
    return min(1.0, tokens / (samples * length))


def differences(results: dict, planned: dict[str, Any]) -> str:
    """Return the keys of results.json that differ from the plan, with both values.

    Keys that an older version did not write are not compared.
    """
    return ", ".join(
        f"{key} ({shown(results[key])}, planned: {value})"
        for key, value in planned.items()
        if key in results and results[key] != value
    )


def read_run(flag: str, path: str) -> tuple[str, dict]:
    """Return the flag with the path, for messages, and the results.json of a completed run.

    Args:
        path: the file, or the output folder of the run.
    Raises:
        UserError: the file is missing or damaged, or the run did not complete or did not train.
    """
    file = str(Path(path) / "results.json" if Path(path).is_dir() else path)
    results, place = read_json(flag, file, most=MOST_OF_RESULTS), f"{flag} {shown(file)}"
    status, reason = results.get("status"), results.get("reason")
    if status != "completed":
        why = f"{shown(status)} ({shown(reason)})" if reason else shown(status)
        raise UserError(f"{place}: the run's status is {why}: name a completed run.")
    number(place, results, "tokens_per_second_per_gpu")
    return place, results


def number(place: str, results: dict, key: str) -> float:
    """Return the number above 0 at a dotted key of results.json, or raise a UserError."""
    value = lookup(results, key)
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise UserError(
            f"{place}: {key} is {shown(value)} and not a number above 0: name a run that trained."
        )
    return value
