"""What a run recorded: reads its files, and computes the numbers that a comparison shows.

Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from distributed_training import arguments
from distributed_training.checkpoints.recognize import newest_of_trainer
from distributed_training.errors import UserError
from distributed_training.files import atomic
from distributed_training.files.checked_types import has_type
from distributed_training.files.json_types import JsonObject
from distributed_training.files.user_files import shown
from distributed_training.records.agreement import TOLERANCES, Agreement, Curve, Tolerance
from distributed_training.records.metrics_file import PHASES
from distributed_training.records.metrics_reader import Record, read_metrics
from distributed_training.records.results_types import wrong_key
from distributed_training.strategies.table import STRATEGIES

# In the reports of torchrun and of DeepSpeed's launcher about ranks that were killed. torchrun's
# report names several ranks, and the one that was killed need not be the first.
KILLED = re.compile(r"exitcode\s*: -9 |exits with return code = -9\b")
STATES = ("parameters", "gradients", "optimizer")
ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}


@dataclass
class RecordedRun:
    """What a run recorded, and how it ended.

    Attributes:
        place: the output folder; or of Hugging Face's Trainer the file with the records.
        records: of metrics.jsonl in their order, or Trainer's log_history. See `steps`,
            `evaluations` and `curve`.
        results: the keys of results.json; {} for Trainer.
        seconds: of the whole process, if compare_strategies.sh started it; else None.
        status: "completed", "running", "preempted", "oom", "failed", "skipped", "timeout",
            "interrupted" or "not run".
        reason: why the run did not complete, or "".
        numbers: of a completed run, such as "samples_per_second" and "memory_bytes" (see
            docs/COMPARISON.md of the project); {} if they were not measured.
        repeats: of a strategy all repeats, this one included.
        name: in a comparison: "A", "B", ..., or the strategy.
        unreadable: numbers of the lines of metrics.jsonl that are damaged.
        agreement: with the reference, of a run of a comparison.
    """

    place: Path
    records: list[dict] = field(repr=False)
    results: dict = field(default_factory=dict, repr=False)
    seconds: int | None = None
    status: str = "completed"
    reason: str = ""
    numbers: JsonObject = field(default_factory=dict, repr=False)
    repeats: list[RecordedRun] = field(default_factory=list, repr=False)
    name: str = ""
    unreadable: list[int] = field(default_factory=list)
    agreement: Agreement = field(default_factory=Agreement, repr=False)

    @property
    def steps(self) -> list[dict]:
        """The records of the optimizer steps that were logged, in their order.

        Each has "step" (from 1), "loss" (mean over the tokens of the step, in nats; None if it is
        not finite), "lr", "grad_norm" and other keys of docs/OUTPUTS.md#metricsjsonl. Of Trainer
        each loss is the mean since the record before it.
        """
        return [record for record in self.records if "loss" in record]

    @property
    def evaluations(self) -> list[dict]:
        """The records of the evaluations, in their order: "step", "eval_loss" (in nats) and others.

        The keys are those of docs/OUTPUTS.md#metricsjsonl.
        """
        return [record for record in self.records if "eval_loss" in record]

    @property
    def of_trainer(self) -> bool:
        """Whether Hugging Face's Trainer recorded the run."""
        return self.place.is_file()

    def curve(self, key: str) -> Curve:
        """Return the values of a key of the records, such as "loss", "grad_norm" or "eval_loss".

        Norms that are missing, or not finite because fp16 overflowed, are left out.

        Returns:
            The values by (first step, last step) of which each is the mean: of this project's runs
            both are the same step. A value of null is NaN. Empty if no record has the key.
        """
        found, first = {}, 1
        for record in self.records:
            if key not in record:
                continue
            step, value = record["step"], record[key]
            # Trainer's loss is the mean since its last record.
            start = first if self.of_trainer and key == "loss" else step
            first = step + 1
            if key != "grad_norm":
                found[start, step] = math.nan if value is None else value
            elif isinstance(value, float | int) and 0 <= value < math.inf:
                found[step, step] = value
        return found

    @property
    def in_tf32(self) -> bool:
        """Return whether fp32 matrices were multiplied in TF32."""
        # Earlier versions used it on every GPU, and did not record it.
        allowed = self.results.get("tf32", self.results.get("device") == "cuda")
        return allowed and self.results.get("precision") == "fp32"

    @property
    def rounding(self) -> Tolerance:
        """Return the entry of TOLERANCES for the precision of the run."""
        precision = self.results.get("precision") or "fp32"
        return TOLERANCES["tf32"] if self.in_tf32 else TOLERANCES.get(precision, TOLERANCES["fp32"])


def read_run(folder: str | Path) -> RecordedRun:
    """Read what a run recorded, also while it trains or after it failed.

    Args:
        folder: its output folder; or of Hugging Face's Trainer a trainer_state.json, or its folder.
    Returns:
        The run: `results` (the keys of results.json, see docs/OUTPUTS.md), `steps`, `evaluations`,
        `status`, and `reason` if it did not complete.
    Raises:
        UserError: there is no run, or a value in results.json has another type.
    """
    path = Path(arguments.path("folder", folder))
    if any((path / name).exists() for name in ("results.json", "metrics.jsonl")):
        return read_folder(path)
    file = path if path.is_file() else newest_of_trainer(path) / "trainer_state.json"
    if not isinstance(history := _read_json(file).get("log_history"), list):
        known = "an output folder with results.json and metrics.jsonl, or a trainer_state.json"
        runs = [shown(file.parent) for file in sorted(path.glob("*/results.json"))]
        more = ", ..." if len(runs) > 5 else ""
        known = f"one of the runs in it ({', '.join(runs[:5])}{more})" if runs else known
        raise UserError(f"{shown(path)} is no run: name {known}.")
    for number, record in enumerate(history, 1):
        if not has_type(record, Record):
            raise UserError(f"{shown(file)} is damaged: record {number} of log_history.")
    return RecordedRun(file, history)


def read_folder(path: Path) -> RecordedRun:
    """Read the output folder of a run, which has failed if its files have no numbers.

    Raises:
        UserError: a value in results.json has another type.
    """
    results = _read_json(path / "results.json")
    if key := wrong_key(results):
        raise UserError(f"{shown(path / 'results.json')} is damaged: the type of {key}.")
    seconds = next((int(line) for line in _outcome(path)[1:] if line.isdigit()), None)
    records, unreadable = [], []
    with contextlib.suppress(OSError):
        records, unreadable = read_metrics(path / "metrics.jsonl")
    (status, reason), numbers = _status(path, results), {}
    if status == "completed":
        try:
            numbers = numbers_of(results)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            status = "failed"  # or --eval_only
            reason = f"results.json lacks a number ({type(error).__name__}: {shown(error)})"
    return RecordedRun(
        path, records, results, seconds, status, reason, numbers, unreadable=unreadable
    )


def _status(folder: Path, results: dict) -> tuple[str, str]:
    """Return (status, reason) of a run.

    compare_strategies.sh adds log.txt and outcome.txt: "exit N", "timeout N" or "interrupted", and
    in the second line the seconds that the run took.
    """
    outcome, log = _outcome(folder)[0], read_text(folder / "log.txt")
    status = results.get("status") or "failed"
    reason = results.get("reason") or last_error(log) or outcome
    if outcome.startswith(("timeout", "interrupted")):
        return outcome.split()[0], f"{outcome} s" if "timeout" in outcome else "by the user"
    if KILLED.search(log):
        return "oom", "a rank was killed by SIGKILL, probably because the host's memory was full"
    if results.get("error_kind") == "missing_requirement":
        return "skipped", reason
    if outcome not in ("", "exit 0") and status != "oom":
        return "failed", reason
    return status, "" if status == "completed" else reason


def _outcome(folder: Path) -> list[str]:
    """Return the lines of outcome.txt, at least one."""
    return read_text(folder / "outcome.txt").splitlines() or [""]


def last_error(log: str) -> str:
    """Return the script's first error line in a log, or else the last line with a letter or digit.

    Later error lines are of ranks that the launcher stops after the first failure.
    """
    lines = [line.strip() for line in log.splitlines() if any(map(str.isalnum, line))]
    marked = [line.removeprefix("❌ ") for line in lines if line.startswith("❌")]
    return marked[0] if marked else (lines or [""])[-1]


def read_text(path: Path) -> str:
    """Return the text of a file; "" if there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _read_json(path: Path) -> dict:
    """Return the object in a JSON file; {} if there is none."""
    with contextlib.suppress(OSError, ValueError):
        value = atomic.read_json(path)
        return value if isinstance(value, dict) else {}
    return {}


# -------------------------------------------------------------------------------- numbers of a run


def numbers_of(results: dict) -> JsonObject:
    """Return the numbers of a run that a comparison shows; docs/COMPARISON.md explains the keys.

    Memory is that of the rank that holds most.

    Raises:
        LookupError, TypeError, ValueError or the like: results.json lacks a number.
    """
    memory, on_gpu = results["memory"], results["device"] == "cuda"
    ranks = [memory[f"{where}categories_bytes_by_rank"] for where in ("device_", "")]
    device, anywhere = max(zip(*ranks, strict=True), key=lambda rank: states_of(rank[0]))
    planned = memory.get("predicted_bytes") or {}
    numbers = {
        "memory_bytes": max(memory["peak_bytes"]) if on_gpu else states_of(device),
        "planned_bytes": (planned["peak"] if on_gpu else states_of(planned)) if planned else None,
        "categories": {kind: device[kind] for kind in STATES},
        "host_categories": {k: anywhere[k] - device[k] for k in ("gradients", "optimizer")},
        "host_bytes": max(memory["host_peak_bytes"]),
        "nvme_bytes": memory["nvme_bytes"],
    }
    if results.get("simulated_world_size"):
        return numbers
    collectives, phases = results.get("communication_per_step"), results["step_phases_seconds"]
    # The median step: in a short run 5 s of other load changed the mean by 9 percent. The spread is
    # that of the middle 80 percent of the steps.
    speed, low, high = (
        results["global_batch_size"] / results["step_seconds"][key]
        for key in ("median", "p90", "p10")
    )
    return numbers | {
        "samples_per_second": speed,
        "samples_per_second_low": low,
        "samples_per_second_high": high,
        "tokens_per_second_per_gpu": float(results["tokens_per_second_per_gpu"]),
        **{f"{phase}_seconds": phases[phase] for phase in PHASES},
        "step_seconds": sum(phases.values()),
        "paper_volume": STRATEGIES[results["strategy"]].paper_volume,
        "final_loss": float(results["train_loss_last"]),
        "bits_per_byte": results.get("bits_per_byte"),  # earlier versions recorded none
        "volume": collectives and volume_of(collectives) / results["parameters"],
        "sent_bytes": results.get("communication_bytes_per_step"),
    }


def states_of(sizes: dict[str, float]) -> float:
    """Return the sum of the model states in a dict of bytes by kind."""
    return sum(sizes[kind] for kind in STATES)


def volume_of(collectives: dict) -> float:
    """Return the number of elements in the collectives, as in the ZeRO paper.

    An all-reduce counts twice (arXiv 1910.02054, section 7).
    """
    total = 0.0
    for name, entry in collectives.items():
        kind, dtype = name.split(" ")
        elements = entry["message_bytes"] / ITEM_BYTES.get(dtype, 1)
        total += 2 * elements if kind == "all_reduce" else elements
    return total
