"""results.json, the output folder with its lock, and the console lines of a run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shlex
import statistics
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import psutil
import torch

from support.cli.arguments import global_batch
from support.cli.ds_config import nvme_folder
from support.cluster.comm_volume import Traffic
from support.cluster.context import DistContext
from support.cluster.tuning import available_cores
from support.errors import TrainingError, UserError
from support.files.atomic import (
    lock,
    only_finite,
    overwrite,
    read_json,
    remove_leftovers,
    set_aside,
    write_text,
)
from support.memory import advise
from support.memory import measure as memory
from support.redaction import redact
from support.report.metrics_log import Meter
from support.report.peak_flops import peak_flops
from support.units import GB, human_bytes
from support.versions import versions

PROCESS_STARTED = psutil.Process().create_time()


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


def new_output_dir(args, ctx: DistContext) -> Path:
    """Create the output folder, named by --output_dir or by rank 0, and lock it.

    Raises:
        UserError: the folder cannot be created, is in use by another run, or is not on a disk that
            all nodes share although the run writes checkpoints or the export.
    """
    name = (
        args.output_dir
        or f"runs/{Path(args.model).name}-{args.strategy}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    if ctx.is_main:
        while not args.output_dir and Path(name).exists():  # two runs started in the same second
            name += "x"
        try:
            Path(name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output_dir {name} cannot be created: {error.strerror}.") from error
        ctx.lock = lock_folder(Path(name))
    folder = Path(ctx.broadcast_from_rank0(name))
    if ctx.nodes > 1 and not (args.no_save and args.no_export):
        check_all_see(folder, ctx)
    return folder


def check_all_see(folder: Path, ctx: DistContext) -> None:
    """Check that every rank sees the output folder, because each writes its part of a checkpoint.

    All ranks call it at the start, so that the run does not fail hours later at its first save.

    Raises:
        UserError: some hosts do not see the folder; the message names them.
    """
    deadline = time.monotonic() + 10  # NFS shows a new folder with a delay
    while not (folder / ".lock").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    hosts_without_folder = sorted(
        {
            host
            for host in ctx.all_gather("" if (folder / ".lock").exists() else platform.node())
            if host
        }
    )
    if hosts_without_folder:
        raise UserError(
            f"--output_dir {folder} is on no disk that {', '.join(hosts_without_folder)} shares "
            "with rank 0: name one that all nodes see, or use --no_save --no_export."
        )


def lock_folder(folder: Path):
    """Lock an output folder against other runs until this process ends.

    Returns:
        The open file that holds the lock; None on a file system without locks.
    Raises:
        UserError: another run holds the lock, or the lock file cannot be used.
    """
    try:
        return lock(folder / ".lock")
    except BlockingIOError:
        raise UserError(
            f"--output_dir {folder} is in use by another run: wait for it, or name another folder."
        ) from None
    except OSError as error:
        raise UserError(
            f"--output_dir {folder}: its lock file .lock cannot be used ({error.strerror}): "
            "remove it."
        ) from error


def open_results(args, ctx: DistContext, folder: Path) -> Results:
    """Return the run's `Results` with the facts that are known before anything is loaded."""
    settings = {
        "strategy": args.strategy,
        "model": args.model,
        "world_size": ctx.real_world_size,
        "simulated_world_size": args.simulate_gpus,
        "device": ctx.device.type,
        "backend": ctx.backend,
        "launcher": ctx.launch.launcher,
        "precision": ctx.precision,
        "batch_size": args.batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "global_batch_size": global_batch(args, ctx.world_size),
        "seed": args.seed,
    }
    return Results(ctx, folder, settings, resuming=args.resume is not None)


class Results:
    """results.json, written at the start with the status "running" and again at every kind of end.

    With --resume the file of the earlier run stays until `begin`.

    Attributes:
        facts: the content of the file.
        before: the earlier run's results.json, on every rank; None without one.
        kept: whether the file still is the earlier run's.
        was_complete: whether the earlier run, whose file is kept, had completed.
    """

    def __init__(self, ctx: DistContext, folder: Path, facts: dict, resuming: bool):
        self.ctx, self.path = ctx, folder / "results.json"
        self.facts = {
            "schema_version": 1,
            "status": "running",
            "reason": None,
            "error_kind": None,
            "started_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": redact(shlex.join([Path(sys.executable).name, *sys.argv])),
            "versions": versions(),
            "hardware": hardware(ctx.device),
            **facts,
        }
        # An earlier run's file is kept until this run has loaded its checkpoint.
        self.before, self._damage = read_results(self.path) if ctx.is_main else (None, "")
        self.kept = resuming and (self.before is not None or bool(self._damage))
        if ctx.is_main and not self.kept:
            # Before the other ranks continue: if one fails, the file must be this run's.
            self.begin()
        started = self.facts["started_at"]  # all ranks take rank 0's time
        self.before, self.kept, self.facts["started_at"] = ctx.broadcast_from_rank0(
            (self.before, self.kept, started)
        )
        self.was_complete = (
            self.kept and self.before is not None and self.before["status"] == "completed"
        )
        ctx.failures.on_failure.append(self.fail)

    def begin(self) -> None:
        """Write this run's file in place of an earlier run's (rank 0); rename a damaged one."""
        self.was_complete = self.kept = False
        if not self.ctx.is_main:
            return
        if self.ctx.lock:
            remove_leftovers(self.path.parent)
        if self._damage:
            new_path = set_aside(self.path, f"{self.path.name}.damaged")
            self.ctx.console.warn(
                f"{self.path} is damaged ({self._damage}): ignored, and renamed to {new_path.name}."
            )
            self._damage = ""
        self._write()

    def continue_complete_run(self) -> None:
        """Take over the facts of the earlier run, which had completed."""
        self.facts |= self.before

    def update(self, **facts) -> None:
        """Add or replace facts; they are written with the next status."""
        self.facts.update(facts)

    def complete(self) -> None:
        """Write the final results (rank 0)."""
        self.facts["status"] = "completed"
        if self.ctx.is_main:
            self._write()

    def nothing_left_to_do(self, steps: int, args) -> bool:
        """Whether --resume has nothing left to do, even if the newest checkpoint is an older one.

        This is so if the earlier run stopped early with the same --early_stopping_patience, or made
        all steps and --load_best_at_end keeps only the best weights.

        Args:
            steps: optimizer steps of the whole run.
        """
        if not self.was_complete or args.resume != "":
            return False
        stops_early = (
            bool(args.early_stopping_patience)
            and self.before.get("stopped_early") == args.early_stopping_patience
        )
        return stops_early or (args.load_best_at_end and self.before["steps"] >= steps)

    def preempted(self, counters: dict) -> None:
        """Write the progress of a run that a signal stopped (rank 0).

        Args:
            counters: see Meter.counters.
        """
        reason = "stopped by a signal; a checkpoint was saved"
        self.facts.update(status="preempted", reason=reason, **progress(counters))
        if self.ctx.is_main:
            self._write()

    def fail(self, error: UserError) -> bool:
        """Write why the run failed, unless the file already says how it ended; for any rank.

        An earlier run's file that is still kept is not changed.

        Returns:
            False if another rank has already written an error.
        """
        if self.kept:
            return True
        with locked(self.path.parent):
            recorded, _ = read_results(self.path)
            is_this_run = (
                recorded is not None and recorded.get("started_at") == self.facts["started_at"]
            )
            if is_this_run and recorded["status"] != "running":
                return recorded["status"] in ("completed", "preempted")
            self.facts.update(status=error.status, reason=str(error), error_kind=error.kind)
            try:
                self._write()
            except OSError:  # a full disk; a rename needs space for a second file
                overwrite(self.path, self._text())
        return True

    def _text(self) -> str:
        return json.dumps(only_finite(self.facts), indent=2) + "\n"

    def _write(self) -> None:
        write_text(self.path, self._text())


@contextlib.contextmanager
def locked(folder: Path):
    """Hold a lock on a folder, so that one process writes at a time, if the disk supports locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_results(path: Path) -> tuple[dict | None, str]:
    """Read an earlier run's results.json.

    Returns:
        (results, ""); (None, "") if there is no file; (None, reason) if it cannot be read, or is
        not valid.
    """
    if not os.path.lexists(path):
        return None, ""
    try:
        results = read_json(path)
    except OSError as error:
        return None, error.strerror
    except ValueError as error:
        return None, str(error)
    if not isinstance(results, dict) or not isinstance(results.get("status"), str):
        return None, "it has no status"
    if results["status"] == "completed" and type(results.get("steps")) is not int:
        return None, "it has no number of steps"
    return results, ""


def progress(counters: dict) -> dict:
    """Return the meter's counters under the keys of results.json."""
    return {
        "steps": counters["step"],
        "samples": counters["samples"],
        "tokens": counters["tokens"],
        "training_seconds": counters["training_seconds"],
        "train_loss_first": counters["first_loss"],
        "train_loss_last": counters["last_loss"],
    }


def hardware(device: torch.device) -> dict:
    """Describe this rank's machine: names, the cores it may use, and bytes of memory.

    The GPU keys are None without a GPU.
    """
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "host": platform.node(),
        "cpu": cpu_name(),
        "cores": available_cores(),
        "ram_bytes": psutil.virtual_memory().total,
        "gpu": gpu.name if gpu else None,
        "gpu_memory_bytes": gpu.total_memory if gpu else None,
    }


def cpu_name() -> str:
    """Return the processor's name from /proc/cpuinfo, or else from Python's platform module."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


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


def say_setup(ctx: DistContext) -> None:
    """Print the "Distributed Setup" lines, once, if the run has several ranks."""
    if ctx.world_size == 1:
        return
    gpu = torch.cuda.get_device_name(ctx.device) if ctx.device.type == "cuda" else "none (CPU)"
    ctx.console.print0(
        "=== Distributed Setup ===\n"
        f"Rank: {ctx.rank}/{ctx.world_size - 1}\n"
        f"Local Rank: {ctx.launch.local_rank}\n"
        f"World Size: {ctx.world_size}\n"
        f"Backend: {ctx.backend}\nGPU: {gpu}\n========================="
    )


def place_of(path: Path, ctx: DistContext) -> str:
    """Return a path as the console shows it.

    With several nodes it includes the host's name, because the path may exist on that host only.
    """
    return f"{path} on {platform.node()}" if ctx.nodes > 1 else str(path)


def say_results(ctx: DistContext, facts: dict, args) -> None:
    """Print the results at the end of a run.

    Args:
        facts: the content of results.json.
    """
    if args.profile_memory or ctx.simulated:
        say_memory_profile(ctx, facts["memory"])
    if ctx.simulated:
        ctx.console.print0(
            f"✅ Memory simulation complete: rank 0 of {ctx.world_size}. Nothing was trained."
        )
        return
    ctx.console.print0("✅ Evaluation Complete!" if args.eval_only else "✅ Training Complete!")
    say_memory(ctx, facts["memory"])
    say_throughput(ctx, facts)


def say_memory(ctx: DistContext, memory_by_rank: dict) -> None:
    """Print one line with the largest memory values of any rank.

    Args:
        memory_by_rank: "memory" of results.json.
    """
    allocated, peak = (
        max(memory_by_rank["allocated_bytes"]) / GB,
        max(memory_by_rank["peak_bytes"]) / GB,
    )
    if ctx.device.type == "cuda":
        reserved = max(memory_by_rank["reserved_bytes"]) / GB
        ctx.console.print0(
            f"GPU Memory: {allocated:.2f} GB allocated | {reserved:.2f} GB reserved | "
            f"{peak:.2f} GB peak"
        )
    else:
        ctx.console.print0(f"Process Memory: {allocated:.2f} GB resident | {peak:.2f} GB peak")


def say_memory_profile(ctx: DistContext, found: dict) -> None:
    """Print the lines of --profile_memory: device, phases, kinds of state, host and NVMe.

    With several ranks these show the largest value, and the smallest in brackets if it differs.

    Args:
        found: "memory" of results.json.
    """
    kind = "GPU" if ctx.device.type == "cuda" else "Process"
    names = (("Allocated", "allocated"), ("Reserved", "reserved"), ("Peak", "peak"))
    for rank in range(len(found["peak_bytes"])):
        ctx.console.print0(f"{kind} {rank} Memory:")
        for name, key in names:
            value = found[f"{key}_bytes"][rank]
            ctx.console.print0(
                f"  {name}: " + (f"{value / GB:.2f} GB" if value is not None else "—")
            )
    ctx.console.print0(
        "Memory after each phase "
        "(of the rank that holds most, and of the one that holds least in brackets):"
    )
    for phase, values in found["phases_bytes"].items():
        shown_columns = PHASE_COLUMNS if ctx.device.type == "cuda" else PHASE_COLUMNS[-1:]
        columns = [f"{name} {most_and_least(values[key])}" for name, key in shown_columns]
        ctx.console.print0(f"  {phase:20}" + " | ".join(columns))
    if found["step_bytes_by_rank"][0]:
        ctx.console.print0("Live tensors in the last step:")
        for phase in found["step_bytes_by_rank"][0]:
            steps = [step[phase] for step in found["step_bytes_by_rank"]]
            live, peak = ([step[key] for step in steps] for key in ("live", "peak"))
            ctx.console.print0(
                f"  {phase:20}at its end {most_and_least(live)} | "
                f"at its peak {most_and_least(peak)}"
            )
    ctx.console.print0(
        "Live tensors by kind in the last step "
        "(end of backward; activations and logits: end of forward):"
    )
    for name in found["categories_bytes"] or ():
        total, on_device = (
            [rank[name] for rank in found[key]]
            for key in ("categories_bytes_by_rank", CATEGORIES_ON_DEVICE)
        )
        if total[0] is not None:
            device_text = (
                "" if total == on_device else f" | of it on the device {most_and_least(on_device)}"
            )
            ctx.console.print0(f"  {name:20}{most_and_least(total)}{device_text}")
    host, pinned = (most_and_least(found[key]) for key in ("host_peak_bytes", "pinned_bytes"))
    ctx.console.print0(f"Host: {host} at its peak, {pinned} pinned")
    if found["nvme_bytes"]:
        stored, written = (
            human_bytes(found[key]) for key in ("nvme_bytes", "nvme_written_bytes_per_step")
        )
        ctx.console.print0(f"NVMe: {stored} held, {written} written in a step, by all ranks")
    if found["device_used"][0]:
        used, unseen = ([rank[key] for rank in found["device_used"]] for key in ("used", "unseen"))
        ctx.console.print0(
            f"The device itself: {most_and_least(used)} in use, of it {most_and_least(unseen)} "
            "that PyTorch does not see (CUDA context, libraries, NCCL, other processes)"
        )


PHASE_COLUMNS = (
    ("allocated", "device_allocated"),
    ("reserved", "device_reserved"),
    ("peak", "device_peak"),
    ("host", "host_resident"),
)
CATEGORIES_ON_DEVICE = "device_categories_bytes_by_rank"


def most_and_least(values: list[int]) -> str:
    """Format the most bytes and, if they differ, the least: "1.25 GB" or "1.25 GB (1.10 GB)"."""
    most, least = human_bytes(max(values)), human_bytes(min(values))
    return most if most == least else f"{most} ({least})"


def say_throughput(ctx: DistContext, facts: dict) -> None:
    """Print the throughput on one line; MFU is N/A if the device's peak rate is not known.

    Args:
        facts: the content of results.json.
    """
    if not facts.get("samples_per_second"):
        return
    mfu = "N/A" if facts["mfu"] is None else f"{100 * facts['mfu']:.1f}%"
    per_gpu = "tokens/sec/GPU" if ctx.device.type == "cuda" else "tokens/sec/process"
    ctx.console.print0(
        f"Throughput: {facts['samples_per_second']:,.1f} samples/sec | "
        f"{facts['tokens_per_second']:,.0f} tokens/sec | "
        f"{facts['tokens_per_second_per_gpu']:,.0f} {per_gpu} | MFU {mfu} "
        f"(first {facts['warmup_steps_excluded']} of {facts['steps']} steps left out)"
    )
