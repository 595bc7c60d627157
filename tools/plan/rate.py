"""The rate that a run has measured; and a row of the cost that follows from a rate."""

import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated, NamedTuple, TypedDict

import msgspec

from distributed_training import PROJECT, programs
from distributed_training.cli.parser import Options
from distributed_training.errors import TrainingError, UserError
from distributed_training.files.checked_types import Number, wrong_place
from distributed_training.files.json_types import JsonObject, lookup
from distributed_training.files.user_files import read_user_json, shown
from distributed_training.ranks.gpus import usable_gpus
from distributed_training.records.recorded_run import last_error
from distributed_training.units import human_rate
from distributed_training.workload.rate import Rate
from distributed_training.workload.workload import Workload

Amount = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]


class Hardware(TypedDict, total=False):
    """The machine of a run."""

    gpu: str | None
    cpu: str


class _Measured(TypedDict):
    world_size: Amount
    steps: Amount
    samples: Amount
    tokens: Amount
    tokens_per_second_per_gpu: Amount


class Used(_Measured, total=False):
    """The keys of a completed run's results.json that a plan uses."""

    hardware: Hardware | None
    step_phases_seconds: dict[str, Number] | None
    seconds_to_first_step: Number | None
    checkpoint_seconds: list[Number] | None
    saves: dict[str, Number] | None


MEASURED_STEPS = 10  # of --measure, of which a run excludes the first two from its rate


class Row(NamedTuple):
    """One number of the cost, the number as text, and where it is from."""

    name: str
    value: float | str | None
    text: str
    source: str


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
    update = max(0.0, lookup(results, "step_phases_seconds.update") or 0)
    step_tokens = results["tokens"] / results["steps"] / ranks
    return Rate(speed, "measured", basis, warning, length, update, step_tokens)


def is_of_one_rank(args: Options) -> bool:
    """Return whether the rate must be that of one rank: the plan adds what several ranks change."""
    return bool(args.bandwidth or args.gpu_speeds or len(args.gpu_memory or ()) > 1)


def at_pace(rate: Rate, pace: float) -> Rate:
    """Return the average rate of unequal ranks, of which the slowest determines a step.

    Args:
        rate: of a rank of speed 1.
        pace: as `Devices.pace`.
    """
    if pace == 1:
        return rate
    basis = f"{rate.basis}, of the fastest GPU; {pace:.2f} x that on average"
    speed, update = pace * rate.tokens_per_second, rate.update / pace
    return rate._replace(tokens_per_second=speed, basis=basis, update=update)


def differences(results: JsonObject, planned: JsonObject) -> str:
    """Return the keys of results.json that differ from the plan, with both values."""
    return ", ".join(
        f"{key} ({shown(results.get(key))}, planned: {value})"
        for key, value in planned.items()
        if results.get(key) != value
    )


def read_completed_run(path: str, flag: str = "--results") -> tuple[str, JsonObject]:
    """Return the flag with the path, for messages, and the results.json of a completed run.

    Durations that cannot be, which a clock that was set back left in earlier versions, are null.

    Raises:
        UserError: the file is missing or damaged, or the run did not complete or did not train.
    """
    file = str(Path(path) / "results.json" if Path(path).is_dir() else path)
    results, place = read_user_json(flag, file), f"{flag} {shown(file)}"
    if results.get("status") != "completed":
        why = f"{shown(results.get('status'))} ({shown(results.get('reason'))})"
        raise UserError(f"{place}: the run's status is {why}: name a completed run.")
    if not results.get("tokens_per_second_per_gpu"):
        raise UserError(f"{place}: the run trained no step: name a run that trained.")
    if key := wrong_place(results, Used):
        value = shown(results.get(re.split(r"[.[]", key)[0], "missing"))
        raise UserError(f"{place} is damaged: {key} is {value}: name another completed run.")
    if (results.get("seconds_to_first_step") or 0) <= 0:
        results["seconds_to_first_step"] = None
    saves = [seconds for seconds in results.get("checkpoint_seconds") or [] if seconds > 0]
    return place, {**results, "checkpoint_seconds": saves}


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


def human_time(seconds: float) -> str:
    """22 -> "22.0 s"; from two minutes on in minutes, from two hours on in hours."""
    if seconds < 120:
        return f"{human_rate(seconds)} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
