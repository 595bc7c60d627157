"""Read the runs of a comparison, check that they did the same work, and compare them.

Imports nothing heavy. scripts/compare_report.py turns the result into tables, files and a figure.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from support.cli.flags import lookup
from support.files.user_files import shown
from support.strategy import STRATEGIES, Strategy
from support.units import human_bytes, human_rate

# Largest relative difference between losses that rounding explains, by precision. On a GPU fp32
# matrices are multiplied in TF32, which keeps 10 bits of each factor's mantissa.
# docs/MEMORY_COMPARISON.md lists the measurements; TF32 and fp16 were not measured.
TOLERANCES = {"fp32": 1e-4, "tf32": 1e-3, "bf16": 5e-3, "fp16": 5e-3}
# In TF32, bf16 and fp16 the losses of a single step may differ by percents, where an unusual
# sequence makes the loss jump. If a strategy trains another model, the difference lasts. So in
# these precisions a difference is the median over this many steps.
LASTING_STEPS = 5

# Data that each rank moves per step, in units of the number of parameters P (ZeRO, arXiv
# 1910.02054, section 7). The paper has no gradient accumulation. FSDP shards as stage 3 does;
# offload and infinity communicate as stages 2 and 3 do.
PAPER_VOLUMES = {
    "dp": 2,
    "zero1": 2,
    "zero2": 2,
    "zero3": 3,
    "offload": 2,
    "infinity": 3,
    "fsdp": 3,
}

SAME_WORK = (
    "model",
    "parameters",
    "trainable_parameters",
    "world_size",
    "simulated_world_size",
    "device",
    "precision",
    "batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "seq_length",
    "seed",
    "steps",
    "samples",
    "dataset.sha256",
    "hardware.cpu",
    "hardware.cores",
    "hardware.gpu",
    "versions.torch",
    "versions.deepspeed",
    "versions.transformers",
)

# Keys that results.json of a completed run must have; an older version's file may lack some. A
# memory simulation has no speed and no losses.
NEEDED = (
    "hardware",
    "precision",
    "memory.peak_bytes",
    "memory.device_categories_bytes_by_rank",
    "memory.placement",
)
NEEDED_OF_TRAINING = (
    "samples_per_second",
    "tokens_per_second_per_gpu",
    "step_phases_seconds",
    "train_loss_last",
)

NUMBERS_OF_RESULTS = (
    "parameters",
    "trainable_parameters",
    "world_size",
    "batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "seq_length",
    "steps",
    "samples",
    "seed",
    "hardware.cores",
    "hardware.ram_bytes",
)
TEXTS_OF_RESULTS = (
    "model",
    "device",
    "precision",
    "started_at",
    "dataset.name",
    "dataset.sha256",
    "hardware.cpu",
)

# torchrun's report lists the ranks that exited. The one that was killed need not be the first:
# torchrun may name as the cause another rank, which failed because its connection broke.
KILLED = re.compile(r"exitcode\s*: -9 ")

STATES = ("parameters", "gradients", "optimizer")
ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}


# ------------------------------------------------------------------------------------------ one run


@dataclass
class Attempt:
    """One run of one strategy: its files, and the outcome that compare_strategies.sh recorded.

    Attributes:
        folder: <strategy>/<repeat>.
        status: completed, skipped, oom, timeout, failed, interrupted or other_work.
        reason: why the run did not complete; empty otherwise.
        command: the command line.
        results: results.json, or {}.
        losses, lrs: loss and learning rate of each optimizer step.
        token_rates: tokens per second of each step, of all ranks together.
    """

    folder: Path
    strategy: str
    status: str
    reason: str
    command: str
    results: dict
    losses: list[float]
    lrs: list[float]
    token_rates: list[float]

    @property
    def completed(self) -> bool:
        return self.status == "completed"


def read_attempt(folder: Path) -> Attempt:
    """Read the folder of one run, <strategy>/<repeat>.

    A run with a missing, incomplete or damaged file has the status "failed".
    """
    results = _read_json(folder / "results.json")
    steps = [record for record in _read_json_lines(folder / "metrics.jsonl") if "loss" in record]
    status, reason = _status(folder, results, len(steps))
    command = _read_text(folder / "command.txt").strip() or str(results.get("command", ""))
    columns = {
        key: [step.get(key) for step in steps] for key in ("loss", "lr", "tokens_per_second")
    }
    attempt = Attempt(
        folder, folder.parent.name, status, reason, command, results, *columns.values()
    )
    if attempt.completed and (problem := _damage(attempt)):
        attempt.status, attempt.reason = "failed", problem
    return attempt


def _damage(attempt: Attempt) -> str | None:
    """Return why a completed run cannot be compared, or None.

    The files may have been changed by hand, or by a disk error. So this compares the run with
    itself, and checks that every number and text that the report shows is present.
    """
    results, row = attempt.results, Row(attempt.strategy, "completed", "", [attempt])
    try:
        _measure(row)
        numbers = [lookup(results, key) for key in NUMBERS_OF_RESULTS]
        machine = results["hardware"]
        optional_numbers = [
            row.planned_bytes,
            row.volume,
            row.step_peak_bytes,
            row.sent_bytes,
            machine["gpu_memory_bytes"],
            results.get("simulated_world_size"),
        ]
        numbers += [number for number in optional_numbers if number is not None]
        numbers += [machine["gpu_memory_bytes"]] if machine["gpu"] is not None else []
        numbers += [
            row.memory_bytes,
            row.host_bytes,
            row.nvme_bytes,
            *row.planned.values(),
            *row.categories.values(),
            *row.host_categories.values(),
        ]
        texts = [lookup(results, key) for key in TEXTS_OF_RESULTS] + [machine["gpu"] or ""]
        texts += [version or "" for version in results["versions"].values()]
        if not results.get("simulated_world_size"):
            _compare(row, row, TOLERANCES[results["precision"]], 1)
            if row.volume is not None:
                _explain_row(row, results["parameters"], results["gradient_accumulation_steps"])
            phases = row.phases_seconds
            numbers += [
                *attempt.losses,
                *attempt.lrs,
                row.samples_per_second,
                row.tokens_per_second_per_gpu,
            ]
            numbers += [results["train_loss_first"], results["train_loss_last"]]
            numbers += [phases["data"], phases["forward"], phases["backward"], phases["update"]]
        if not all(isinstance(number, int | float) and 0 <= number < 1e30 for number in numbers):
            raise ValueError("a number is missing")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a text is missing")
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        ZeroDivisionError,
        OverflowError,
    ) as error:
        return (
            f"results.json or metrics.jsonl is damaged ({type(error).__name__}: "
            f"{shown(str(error))})"
        )
    return None


def _status(folder: Path, results: dict, steps: int) -> tuple[str, str]:
    """Return (status, reason) of a run; see `Attempt`.

    Args:
        folder: holds outcome.txt ("exit N", "timeout N" or "interrupted") and log.txt.
        results: results.json, or {}.
        steps: number of optimizer steps in metrics.jsonl.
    """
    outcome, _, number = _read_text(folder / "outcome.txt").strip().partition(" ")
    if outcome == "timeout":
        return "timeout", f"not finished after {number} s"
    if outcome == "interrupted":
        return "interrupted", "stopped by the user"
    written_status = results.get("status")
    if written_status == "completed" and outcome in ("exit", "") and number in ("0", ""):
        simulated = results.get("simulated_world_size")
        required_keys = NEEDED if simulated else (*NEEDED, *NEEDED_OF_TRAINING)
        if missing_keys := [key for key in required_keys if lookup(results, key) is None]:
            return (
                "failed",
                f"results.json lacks {', '.join(missing_keys)}: was it made by --eval_only, or by "
                "an older version?",
            )
        has_every_step = simulated or steps == results.get("steps")
        return (
            ("completed", "")
            if has_every_step
            else ("failed", "metrics.jsonl does not hold every step")
        )
    if KILLED.search(_read_text(folder / "log.txt")):
        return (
            "oom",
            "a rank was killed (SIGKILL): by the kernel, as a rule, when the host has no memory "
            "left",
        )
    reason = (
        str(results.get("reason") or "")
        or last_error(folder / "log.txt")
        or f"ended with exit code {number or 'unknown'}"
    )
    if written_status == "oom":
        return "oom", reason
    return ("skipped" if results.get("error_kind") == "missing_requirement" else "failed"), reason


def last_error(log: Path) -> str:
    """Return the script's own error line in a log, or else the last line with a letter or digit."""
    lines = [line.strip() for line in _read_text(log).splitlines() if any(map(str.isalnum, line))]
    marked = [line.removeprefix("❌ ") for line in lines if line.startswith("❌")]
    return (marked or lines or [""])[-1]


def _read_text(path: Path) -> str:
    # Only regular files: reading a pipe would block.
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except OSError:
        return ""


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError):  # not JSON, a number of thousands of digits, deep nesting
        return {}
    return value if isinstance(value, dict) else {}


def _read_json_lines(path: Path) -> list[dict]:
    records = []
    for line in _read_text(path).splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # the incomplete last line of a run that was killed
            break
        if isinstance(record, dict):
            records.append(record)
    return records


# ----------------------------------------------------------------------------------------- all runs


@dataclass
class Row:
    """One strategy: medians over its completed repeats.

    Bytes are those of the rank that needs most. None: not known.

    Attributes:
        status: "completed", "not run", or the status of the first repeat that did not complete.
        reason: why that repeat did not complete; empty otherwise.
        memory_bytes: peak of the GPU's allocator; on a CPU the parameters, gradients and optimizer
            states that a GPU would hold.
        planned_bytes: the memory estimate for memory_bytes; see support/memory/estimate.py.
        planned: the whole memory estimate, in bytes by kind.
        step_peak_bytes: largest sum of live tensors in the measured step; not known on a CPU for
            ordinary runs, nor where part of the tensors would not be on a GPU.
        activations, logits: bytes at the end of forward, if the run measured them.
        categories: live bytes on the device by category, at the end of backward.
        host_categories: the same in host memory.
        saved: 1 minus the ratio of memory_bytes to the reference's; None for the reference, and
            for a strategy that only shards, on one rank.
        host_bytes: peak of the process in host memory.
        nvme_bytes: bytes on NVMe, of all ranks.
        samples_per_second: with _low and _high: the slowest and fastest repeat; with one repeat,
            the tenth and ninetieth percentile of its steps.
        speed: samples_per_second relative to the reference, with _low and _high.
        difference, difference_step: largest relative difference of a loss from the reference's (see
            `differences`), and its step.
        departs_at, departing_loss: first step whose difference exceeds the tolerance, and its loss.
        sent_bytes: bytes that a rank sends per step, the mean over ranks.
        volume: the volume of the collectives per step in the paper's unit, P; see `volumes`.
        collectives: results.json's communication_per_step.
        phases_seconds: seconds of each phase of a step.
    """

    strategy: str
    status: str
    reason: str
    attempts: list[Attempt]
    memory_bytes: float | None = None
    planned_bytes: float | None = None
    planned: dict[str, int] = field(default_factory=dict)
    step_peak_bytes: float | None = None
    activations: float | None = None
    logits: float | None = None
    categories: dict[str, float] = field(default_factory=dict)
    host_categories: dict[str, float] = field(default_factory=dict)
    saved: float | None = None
    host_bytes: float | None = None
    nvme_bytes: float | None = None
    samples_per_second: float | None = None
    samples_per_second_low: float | None = None
    samples_per_second_high: float | None = None
    tokens_per_second_per_gpu: float | None = None
    speed: float | None = None
    speed_low: float | None = None
    speed_high: float | None = None
    final_loss: float | None = None
    difference: float | None = None
    difference_step: int | None = None
    departs_at: int | None = None
    departing_loss: float | None = None
    sent_bytes: float | None = None
    volume: float | None = None
    collectives: dict = field(default_factory=dict)
    phases_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def completed(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.completed]

    @property
    def definition(self) -> Strategy:
        """What the strategy shards and offloads; the control is dp with another learning rate."""
        return STRATEGIES["dp" if self.strategy == "control" else self.strategy]

    @property
    def failed(self) -> bool:
        """Whether the strategy neither completed nor was skipped; a skip is not a failure."""
        return self.status not in ("completed", "skipped")


@dataclass
class Comparison:
    """All strategies of one comparison.

    Attributes:
        name: name of the comparison's folder.
        rows: one per strategy, in the order of STRATEGIES.
        reference: the row that the others are compared with: dp's, or else the first that
            completed; None if none did.
        work: the values of SAME_WORK, from the reference; {} without one.
        tolerance: largest relative loss difference that counts as the same model.
        step_cap: the default --max_steps that was added to the user's arguments, or None.
        control: the reference run again with a higher learning rate (a row outside of `rows`), to
            see whether the losses would show a difference; None if it was not run.
    """

    name: str
    rows: list[Row]
    reference: Row | None
    work: dict
    tolerance: float | None
    step_cap: int | None
    control: Row | None = None

    @property
    def simulated(self) -> bool:
        """Whether the runs are memory simulations, which have no speed and no losses."""
        return bool(self.work.get("simulated_world_size"))

    @property
    def lasting(self) -> int:
        """Number of steps over which a loss difference is the median.

        It is 1 for fp32 on a CPU, where rounding is small enough to judge each step separately.
        """
        return (
            1
            if self.work.get("precision") == "fp32" and self.work.get("device") == "cpu"
            else LASTING_STEPS
        )

    @property
    def repeated(self) -> bool:
        """Whether there are several repeats, so that the spread is that of the repeats."""
        return any(len(row.attempts) > 1 for row in self.rows)

    @property
    def compared(self) -> list[Row]:
        """Completed rows other than the reference."""
        return [row for row in self.rows if row.completed and row is not self.reference]

    @property
    def same_model(self) -> bool | None:
        """Whether all compared strategies train the same model; None if none could be compared."""
        return not self.departing if self.compared and not self.simulated else None

    @property
    def facts(self) -> dict:
        """results.json of the reference's first completed run, or {}."""
        return self.reference.completed[0].results if self.reference else {}

    @property
    def departing(self) -> list[Row]:
        """Rows of the strategies that do not train the same model."""
        return [row for row in self.rows if row.departs_at is not None]

    @property
    def exit_code(self) -> int:
        """1 if a loss curve departs, a strategy failed or nothing completed; else 0."""
        return int(
            self.reference is None or bool(self.departing) or any(row.failed for row in self.rows)
        )


def read_comparison(folder: Path, tolerance: float | None = None) -> Comparison:
    """Read <folder>/<strategy>/<repeat>/ and compare.

    Args:
        folder: the folder that compare_strategies.sh filled; its planned.txt names strategies that
            may not have run yet.
        tolerance: replaces the value in TOLERANCES.
    """
    planned_names = _read_text(folder / "planned.txt").split()
    existing = {path.name for path in folder.iterdir() if path.name in STRATEGIES and path.is_dir()}
    rows = [
        _gather(folder / name, name)
        for name in STRATEGIES
        if name in existing or name in planned_names
    ]
    completed_rows = [row for row in rows if row.completed]
    reference = next(
        (row for row in completed_rows if row.strategy == "dp"),
        completed_rows[0] if completed_rows else None,
    )
    cap_text = _read_text(folder / "step_cap.txt").strip()
    comparison = Comparison(
        folder.resolve().name,
        rows,
        reference,
        {},
        tolerance,
        int(cap_text) if cap_text.isdecimal() else None,
    )
    if reference is None:
        return comparison
    results = comparison.facts
    comparison.work = {key: lookup(results, key) for key in SAME_WORK}
    tf32 = results["precision"] == "fp32" and results["device"] == "cuda"
    comparison.tolerance = tolerance or TOLERANCES["tf32" if tf32 else results["precision"]]
    control = _gather(folder / "control", "control")
    for row in (*rows, control):
        _set_other_work_apart(row, comparison.work)
        _measure(row)
    for row in (*rows, control):
        _compare(row, reference, comparison.tolerance, comparison.lasting)
    comparison.control = control if control.completed else None
    return comparison


def _gather(folder: Path, strategy: str) -> Row:
    repeats = (
        [path for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
    )
    attempts = [read_attempt(path) for path in sorted(repeats, key=lambda path: int(path.name))]
    row = Row(strategy, "not run", "", attempts)
    _settle_status(row)
    return row


def _settle_status(row: Row) -> None:
    """Set "completed" if every repeat completed, else the status of the first that did not."""
    broken = [attempt for attempt in row.attempts if not attempt.completed]
    if row.attempts:
        row.status, row.reason = (
            (broken[0].status, broken[0].reason) if broken else ("completed", "")
        )


def _set_other_work_apart(row: Row, work: dict) -> None:
    """Set the status "other_work" for runs that did not do the reference's work.

    A run with another batch size, seed, text or library version proves nothing, so its numbers are
    left out.
    """
    for attempt in row.completed:
        for key, expected in work.items():
            if (value := lookup(attempt.results, key)) != expected:
                attempt.status, attempt.reason = (
                    "other_work",
                    f"{key} is {value}, the reference's is {expected}",
                )
    _settle_status(row)


def _measure(row: Row) -> None:
    """Fill in the fields that do not depend on the reference."""
    results = [attempt.results for attempt in row.completed]
    if not results:
        return
    memory = [entry["memory"] for entry in results]
    kinds = ("parameters", "gradients", "optimizer", "buffers", "other")

    by_rank = [
        zip(m["device_categories_bytes_by_rank"], m["categories_bytes_by_rank"], strict=True)
        for m in memory
    ]
    fullest = [
        max(ranks, key=lambda rank: sum(rank[0][kind] for kind in kinds)) for ranks in by_rank
    ]
    row.categories = {kind: median(device[kind] for device, _ in fullest) for kind in kinds}
    row.host_categories = {
        kind: median(everywhere[kind] - device[kind] for device, everywhere in fullest)
        for kind in ("gradients", "optimizer")
    }
    on_gpu = results[0]["device"] == "cuda"
    if on_gpu:
        row.memory_bytes = median(max(entry["peak_bytes"]) for entry in memory)
    else:
        row.memory_bytes = sum(row.categories[kind] for kind in STATES)
    _add_plan_and_step(row, memory[0], on_gpu)
    row.host_bytes = median(max(entry["host_peak_bytes"]) for entry in memory)
    row.nvme_bytes = median(entry["nvme_bytes"] for entry in memory)
    if results[0].get("simulated_world_size"):
        return
    row.final_loss = median(entry["train_loss_last"] for entry in results)
    _measure_speed(row)
    _measure_traffic(row, results)


def _add_plan_and_step(row: Row, memory: dict, on_gpu: bool) -> None:
    """Fill in the memory estimate, and the temporary memory of the measured step."""
    if memory.get("predicted_bytes"):
        row.planned = memory["predicted_bytes"]
        row.planned_bytes = (
            row.planned["peak"] if on_gpu else sum(row.planned[kind] for kind in STATES)
        )
    ranks = memory["device_categories_bytes_by_rank"]
    if ranks[0].get("activations") is not None:
        row.activations, row.logits = (
            max(rank[kind] for rank in ranks) for kind in ("activations", "logits")
        )
    steps = memory.get("step_bytes_by_rank") or [None]
    if steps[0] and (on_gpu or not row.definition.offloads):
        row.step_peak_bytes = max(phase["peak"] for step in steps for phase in step.values())


def _measure_speed(row: Row) -> None:
    results = [attempt.results for attempt in row.completed]
    speeds = [result["samples_per_second"] for result in results]
    row.samples_per_second = median(speeds)
    row.tokens_per_second_per_gpu = median(
        result["tokens_per_second_per_gpu"] for result in results
    )
    row.phases_seconds = {
        phase: median(result["step_phases_seconds"][phase] for result in results)
        for phase in results[0]["step_phases_seconds"]
    }
    # With one repeat: the spread of its steps, without the slowest and the fastest tenth.
    if len(row.attempts) == 1:
        rates = sorted(row.completed[0].token_rates[results[0]["warmup_steps_excluded"] :])
        tenth = (len(rates) - 1) // 10
        speeds = [rate / results[0]["seq_length"] for rate in rates[tenth : len(rates) - tenth]]
    row.samples_per_second_low, row.samples_per_second_high = min(speeds), max(speeds)


def _measure_traffic(row: Row, results: list[dict]) -> None:
    measured = [
        result for result in results if result.get("communication_bytes_per_step") is not None
    ]
    if not measured:
        return
    row.sent_bytes = median(result["communication_bytes_per_step"] for result in measured)
    row.collectives = measured[0]["communication_per_step"]
    if measured[0]["world_size"] > 1:
        row.volume = sum(volumes(row.collectives, measured[0]["parameters"]).values())


def volumes(collectives: dict, parameters: int) -> dict[str, float]:
    """Return the volume of each kind of collective, in units of P.

    The volume is the number of elements of any type, counted twice for an all-reduce, as in the
    ZeRO paper.

    Args:
        collectives: results.json's communication_per_step.
        parameters: P, the number of parameters.
    Returns:
        {"all_gather": …, "all_reduce": …, …}
    """
    totals: dict[str, float] = {}
    for name, entry in collectives.items():
        kind, dtype = name.split(" ")
        elements = entry["message_bytes"] / ITEM_BYTES.get(dtype, 1) / parameters
        totals[kind] = totals.get(kind, 0) + elements * (2 if kind == "all_reduce" else 1)
    return totals


def _compare(row: Row, reference: Row, tolerance: float, lasting: int) -> None:
    """Fill in the fields that are relative to the reference."""
    if not row.completed:
        return
    shards_only = not row.definition.offloads
    results = row.completed[0].results
    if row is not reference and not (
        shards_only and (results.get("simulated_world_size") or results["world_size"]) == 1
    ):
        row.saved = 1 - row.memory_bytes / reference.memory_bytes
    if results.get("simulated_world_size"):
        return
    base = reference.samples_per_second
    row.speed = row.samples_per_second / base
    row.speed_low, row.speed_high = (
        row.samples_per_second_low / base,
        row.samples_per_second_high / base,
    )
    row.difference, row.difference_step = 0.0, 1
    for attempt in row.completed:
        for step, difference in enumerate(differences(attempt, reference.completed[0], lasting), 1):
            if difference > row.difference:
                row.difference, row.difference_step = difference, step
            if difference > tolerance and step < (row.departs_at or step + 1):
                row.departs_at, row.departing_loss = step, attempt.losses[step - 1]


def differences(attempt: Attempt, reference: Attempt, lasting: int) -> list[float]:
    """Return the relative difference of the loss from the reference's, step by step.

    Args:
        attempt, reference: runs with the same number of steps.
        lasting: number of steps of which each value is the median: the step and those before it.
            The first values are all the median of the first `lasting` steps.
    Raises:
        ValueError: the numbers of steps differ.
    """
    pairs = zip(attempt.losses, reference.losses, strict=True)
    per_step = [abs(loss - expected) / max(abs(expected), 1e-12) for loss, expected in pairs]
    return [
        median(per_step[max(0, step - lasting) : max(step, lasting)])
        for step in range(1, len(per_step) + 1)
    ]


# ----------------------------------------------------------------------------------------- in words


def verdict(comparison: Comparison) -> list[str]:
    """Return the conclusions of the comparison, one or more sentences each."""
    if comparison.reference is None:
        return ["❌ No strategy completed, so there is nothing to compare."]
    matching_rows = [row for row in comparison.rows if row.completed and row.departs_at is None]
    if comparison.simulated:
        return [*_say_simulated(comparison), *_say_incomplete(comparison)]
    sentences = [*_say_same_model(comparison), *_say_control(comparison)]
    if matching_rows:
        sentences += [
            _say_fastest(comparison, matching_rows),
            _say_smallest(comparison, matching_rows),
            *_say_limits(comparison, matching_rows),
        ]
    return sentences + _say_incomplete(comparison)


def _say_simulated(comparison: Comparison) -> list[str]:
    """Explain memory simulations, and compare the memory estimate with them."""
    ranks = comparison.work["simulated_world_size"]
    sentences = [
        f"A memory simulation: one process allocated what rank 0 of {ranks} would, without the "
        "others. Nothing was trained, so there are no losses and no speeds. "
        "The table is in MB, 2^20 bytes."
    ]
    planned_rows = [row for row in comparison.rows if row.completed and row.planned_bytes]
    if planned_rows:
        worst = max(planned_rows, key=lambda row: abs(row.planned_bytes / row.memory_bytes - 1))
        percent = 100 * (worst.planned_bytes / worst.memory_bytes - 1)
        quantity = "peaks" if comparison.work["device"] == "cuda" else "model states"
        sentences.append(
            f"The planner's {quantity} are within {abs(percent):.1f}% of the simulated ones "
            f"({worst.strategy})."
        )
    return sentences


def _say_same_model(comparison: Comparison) -> list[str]:
    reference, tolerance = comparison.reference, comparison.tolerance
    sentences = []
    if reference.strategy != "dp":
        dp = next((row for row in comparison.rows if row.strategy == "dp"), None)
        reason = f"did not complete ({dp.status})" if dp else "was left out"
        sentences.append(
            f"ℹ️  dp, the plain reference, {reason}: the others are compared with "
            f"{reference.strategy}."
        )
    tolerance_text = f"tolerance {tolerance:g} for {comparison.work['precision']}"
    advice = (
        " --precision fp32 tells a fault from rounding."
        if comparison.work["precision"] != "fp32"
        else ""
    )
    median_text = f" in medians of {comparison.lasting} steps" if comparison.lasting > 1 else ""
    for row in comparison.departing:
        if row is reference:
            sentences.append(
                f"❌ {row.strategy}'s own repeats differ by {row.difference:.1e}{median_text} at "
                f"step {row.difference_step}; {tolerance_text}. The same command must give the "
                "same losses: look for what changed between them."
            )
            continue
        expected = reference.completed[0].losses[row.departs_at - 1]
        sentences.append(
            f"❌ {row.strategy} does not train the same model: it departs from "
            f"{reference.strategy} at step {row.departs_at} (loss {row.departing_loss:.6f}, "
            f"{reference.strategy} {expected:.6f}) and is off by "
            f"{row.difference:.1e}{median_text} at step {row.difference_step}; "
            f"{tolerance_text}.{advice}"
        )
    matching_rows = [row for row in comparison.compared if row.departs_at is None]
    if matching_rows:
        worst = max(matching_rows, key=lambda row: row.difference)
        sentences.append(
            f"✅ Same model: {_names(matching_rows)} "
            f"{'trains' if len(matching_rows) == 1 else 'train'} what {reference.strategy} "
            f"trains. Over {comparison.work['steps']} steps no loss is off by more than "
            f"{worst.difference:.1e} relative{median_text} ({worst.strategy}, step "
            f"{worst.difference_step}); {tolerance_text}."
        )
    elif not comparison.departing:
        sentences.append(f"ℹ️  Only {reference.strategy} completed, so no losses could be compared.")
    if reference.difference and reference not in comparison.departing:
        sentences.append(
            f"ℹ️  {reference.strategy}'s own repeats are off by up to {reference.difference:.1e} "
            "from its first."
        )
    return sentences


def _say_control(comparison: Comparison) -> list[str]:
    """Say whether the losses would show a strategy that trains slightly differently."""
    if comparison.control is None or not comparison.compared:
        return []
    reference, control = comparison.reference, comparison.control
    higher = 100 * (control.completed[0].lrs[0] / reference.completed[0].lrs[0] - 1)
    text = (
        f"Control: {reference.strategy} with a learning rate {higher:.0f}% higher is off by up to "
        f"{control.difference:.1e}"
    )
    if control.departs_at:
        return [
            f"{text}, beyond the tolerance from step {control.departs_at} on: a fault of that "
            "size would show."
        ]
    return [
        f"ℹ️  {text}, within the tolerance: a fault of that size would not show. --precision "
        "fp32 or more steps are a sharper test."
    ]


def _say_fastest(comparison: Comparison, done: list[Row]) -> str:
    by_speed = sorted(done, key=lambda row: -row.samples_per_second)
    fastest, slowest = by_speed[0], by_speed[-1]
    text = f"Fastest: {fastest.strategy}, {human_rate(fastest.samples_per_second)} samples/s"
    if len(by_speed) > 1:
        text += (
            f"; slowest: {slowest.strategy}, "
            f"{slowest.samples_per_second / fastest.samples_per_second:.2f} of that"
        )
    overlap = [
        row.strategy
        for row in by_speed[1:]
        if row.samples_per_second_high > fastest.samples_per_second_low
    ]
    # Without repeats the spread is that of one run's steps, which has other causes.
    if comparison.repeated and overlap:
        text += f" (within the spread of repeats: {', '.join(overlap)})"
    if comparison.work["device"] == "cpu":
        text += ". The ranks share this CPU and its memory: on GPUs the order can be another"
    return text + "."


def _say_smallest(comparison: Comparison, done: list[Row]) -> str:
    by_memory = sorted(done, key=lambda row: row.memory_bytes)
    least, reference = by_memory[0], comparison.reference
    if comparison.work["device"] == "cuda":
        usage = "needs least, at its peak"
    else:
        usage = "keeps least model state on what would be a GPU, at the end of backward"
    text = (
        f"Room for the largest model: {least.strategy} {usage} {human_bytes(least.memory_bytes)} "
        "per rank"
    )
    if least is not reference:
        text += f", {reference.strategy} {human_bytes(reference.memory_bytes)}"
    in_host = sum(least.host_categories.values())
    other_memory = [f"{human_bytes(in_host)} per rank in host memory"] * bool(in_host)
    other_memory += [f"{human_bytes(least.nvme_bytes)} on NVMe in all"] * bool(least.nvme_bytes)
    if other_memory:
        text += f"; it keeps {' and '.join(other_memory)} instead"
    without_offload = [row for row in by_memory if not row.definition.offloads]
    if least.definition.offloads and without_offload:
        text += (
            f". Without offloading: {without_offload[0].strategy}, "
            f"{human_bytes(without_offload[0].memory_bytes)}"
        )
    return text + "."


def _say_limits(comparison: Comparison, done: list[Row]) -> list[str]:
    sentences = []
    single_rank, on_cpu = comparison.work["world_size"] == 1, comparison.work["device"] == "cpu"
    if single_rank:
        sharded = [
            row.strategy for row in done if row.definition.sharded and not row.definition.offloads
        ]
        sharded_text = (
            f": {', '.join(sharded)} split over one rank, which saves nothing" if sharded else ""
        )
        sentences.append(
            f"ℹ️  One {'process' if on_cpu else 'GPU'} cannot show what sharding saves, nor what "
            f"communication costs{sharded_text}. Compare on two or more."
        )
    if on_cpu:
        sentences.append(
            "ℹ️  On a CPU the memory column counts the parameters, gradients and optimizer "
            "states that a GPU would hold at the end of backward, and nothing that comes and "
            "goes: activations, gathered layers, buckets. Host peak is the whole process, "
            "libraries included."
        )
    return sentences


def _say_incomplete(comparison: Comparison) -> list[str]:
    sentences = []
    for row in comparison.rows:
        if row.status == "completed":
            continue
        mark = "ℹ️ " if row.status in ("skipped", "not run") else "❌"
        first_failed = next((attempt for attempt in row.attempts if not attempt.completed), None)
        log_text = (
            f" Log: {first_failed.folder / 'log.txt'}"
            if first_failed and row.status != "interrupted"
            else ""
        )
        repeats_text = (
            f" ({len(row.completed)} of {len(row.attempts)} repeats completed)"
            if row.completed
            else ""
        )
        sentences.append(
            (
                f"{mark} {row.strategy}: {row.status.replace('_', ' ')}{repeats_text}. "
                f"{row.reason}{log_text}"
            ).rstrip()
        )
    return sentences


def explain_traffic(comparison: Comparison) -> list[str]:
    """Explain each strategy's communication, from the counted collectives and the ZeRO paper."""
    if comparison.reference is None:
        return []
    if comparison.work["world_size"] == 1:
        return ["One rank sends nothing."]
    ranks, parameters = comparison.work["world_size"], comparison.work["parameters"]
    micro_steps = comparison.work["gradient_accumulation_steps"]
    lines = [
        f"P = {parameters:,} parameters. The volume counts each element that is gathered or "
        "reduced, twice in an all-reduce, as the paper does; of it a rank sends (N−1)/N = "
        f"{(ranks - 1) / ranks:.2f}, times the bytes of its type."
    ]
    rows_by_text: dict[str, list[Row]] = {}
    for row in comparison.rows:
        if row.volume is not None:
            rows_by_text.setdefault(_explain_row(row, parameters, micro_steps), []).append(row)
    return lines + [f"{_names(rows)}: {text}." for text, rows in rows_by_text.items()]


def _explain_row(row: Row, parameters: int, micro_steps: int) -> str:
    volume_by_kind = volumes(row.collectives, parameters)
    gathered = volume_by_kind.get("all_gather", 0) + volume_by_kind.get("broadcast", 0)
    reduced = row.volume - gathered
    collective = (
        "all-reduce" if volume_by_kind.get("all_reduce", 0) > reduced / 2 else "reduce-scatter"
    )
    text = f"gradients {reduced:.2f}P by {collective} in {_types(row, 'reduce')}"
    if gathered > 0.005:
        text += f", parameters {gathered:.2f}P by all-gather in {_types(row, 'gather')}"
    reasons = []
    if row.definition.stage in (1, 2) and collective == "all-reduce":
        reasons.append(
            "the paper reduces each part of the gradients to its owner only, 1P; DeepSpeed "
            "all-reduces buckets"
        )
    if micro_steps > 1 and row.definition.stage >= 2:
        reasons.append(
            f"no rank keeps whole gradients, so they are reduced after each of the {micro_steps} "
            "micro-batches"
        )
    if row.definition.shards_parameters:
        per_micro_step = gathered / micro_steps
        repeat_text = f", in each of the {micro_steps} micro-batches" if micro_steps > 1 else ""
        exception_text = ""
        if per_micro_step < 1.98:
            exception_text = (
                ", the outermost (embeddings) only once"
                if row.strategy == "fsdp"
                else ", some less often"
            )
        elif per_micro_step > 2.005:
            exception_text = ", some more often than that"
        reasons.append(
            f"parameters are gathered for forward and for backward{repeat_text}{exception_text}"
        )
    return f"{text} ({'; '.join(reasons)})" if reasons else text


def _types(row: Row, verb: str) -> str:
    """Return the types that carry more than 1% of the bytes each: "fp32", "fp32 and bf16".

    Args:
        verb: "gather" or "reduce", which selects the collectives.
    """
    bytes_by_dtype: dict[str, float] = {}
    for name, entry in row.collectives.items():
        kind, dtype = name.split(" ")
        if verb in kind:
            bytes_by_dtype[dtype] = bytes_by_dtype.get(dtype, 0) + entry["message_bytes"]
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    names = [
        short.get(dtype, dtype)
        for dtype, size in bytes_by_dtype.items()
        if size > 0.01 * sum(bytes_by_dtype.values())
    ]
    return " and ".join(names) or "nothing"


def _names(rows: list[Row]) -> str:
    names = [row.strategy for row in rows]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
