"""What a run tells: console lines, metrics.jsonl, results.json, and the clocks behind the numbers."""

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

from support.cli import validate as preflight
from support.cli.flags import global_batch
from support.cluster.comm_volume import Traffic
from support.cluster.context import Run, versions
from support.cluster.launch import available_cores
from support.data import batches as data
from support.data.chat import PLAIN_NOTICE, use_plain_template
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
from support.memory import measure as memory
from support.redaction import redact
from support.report.compare import human_bytes
from support.report.metrics_log import Meter
from support.report.peak_flops import peak_flops

PROCESS_STARTED = psutil.Process().create_time()
GB = 2**30  # as nvidia-smi and DeepSpeed count


def human_count(number: int) -> str:
    """124439808 -> "124M"; below ten millions with one decimal, from a billion on in B."""
    if number >= 1e9:
        return f"{number / 1e9:.1f}B"
    return f"{number / 1e6:.0f}M" if number >= 1e7 else f"{number / 1e6:.1f}M"


def flops_per_token(
    matmul_parameters: int, trained: int, layers: int, hidden: int, seq_length: int
) -> float:
    """Floating-point operations per token of forward and backward: 6N + 12·L·H·T (PaLM, 2204.02311,
    appendix B).

    Of the 6 a parameter 2 are the forward pass, 2 its input's gradient, and 2 its own, which a
    frozen one does not have.

    Args:
        matmul_parameters: parameters that take part in matrix multiplications (not position or
            untied input embeddings).
        trained: how many of them are trained.
        layers, hidden, seq_length: of the model and the block.
    """
    return 4 * matmul_parameters + 2 * trained + 12 * layers * hidden * seq_length


def new_output_dir(args, run: Run) -> Path:
    """The folder of results.json: as named, or a new one that rank 0 names for all."""
    name = (
        args.output_dir
        or f"runs/{Path(args.model).name}-{args.strategy}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    if run.is_main:
        while not args.output_dir and Path(name).exists():  # two runs in one second
            name += "x"
        try:
            Path(name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output_dir {name} cannot be created: {error.strerror}.") from error
        run.lock = lock_folder(Path(name))
    folder = Path(run.from_main(name))
    if run.nodes > 1 and not (args.no_save and args.no_export):
        check_all_see(folder, run)
    return folder


def check_all_see(folder: Path, run: Run) -> None:
    """Every rank writes its part of a checkpoint: find out now, and not hours later, that a node
    has another disk.

    Raises:
        UserError: names the hosts that do not see the folder.
    """
    deadline = time.monotonic() + 10  # NFS shows a new folder late
    while not (folder / ".lock").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    hosts_without_folder = sorted(
        {
            host
            for host in run.gather("" if (folder / ".lock").exists() else platform.node())
            if host
        }
    )
    if hosts_without_folder:
        raise UserError(
            f"--output_dir {folder} is on no disk that {', '.join(hosts_without_folder)} shares with rank 0: name one that all "
            "nodes see, or use --no_save --no_export."
        )


def lock_folder(folder: Path):
    """Keep other runs out of an output folder for as long as this process lives.

    Returns:
        The open file that holds the lock; None on a file system without locks.
    Raises:
        UserError: another run has it, or something else has the lock file's name.
    """
    try:
        return lock(folder / ".lock")
    except BlockingIOError:
        raise UserError(
            f"--output_dir {folder} is in use by another run: wait for it, or name another folder."
        ) from None
    except OSError as error:
        raise UserError(
            f"--output_dir {folder}: its lock file .lock cannot be used ({error.strerror}): remove it."
        ) from error


def open_results(args, run: Run, folder: Path) -> Results:
    """results.json with what is known before anything is loaded."""
    facts = {
        "strategy": args.strategy,
        "model": args.model,
        "world_size": run.real_world_size,
        "simulated_world_size": args.simulate_gpus,
        "device": run.device.type,
        "backend": run.backend,
        "launcher": run.launch.launcher,
        "precision": run.precision,
        "batch_size": args.batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "global_batch_size": global_batch(args, run.world_size),
        "seed": args.seed,
    }
    return Results(run, folder, facts, resuming=args.resume is not None)


class Results:
    """results.json: written at the start with status "running", and at the end, whichever end it
    is.
    """

    def __init__(self, run: Run, folder: Path, facts: dict, resuming: bool):
        self.run, self.path = run, folder / "results.json"
        self.facts = {
            "schema_version": 1,
            "status": "running",
            "reason": None,
            "error_kind": None,
            "started_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": redact(shlex.join([Path(sys.executable).name, *sys.argv])),
            "versions": versions(),
            "hardware": hardware(run.device),
            **facts,
        }
        # What an earlier run says stays until this one has loaded its checkpoint.
        self.before, self._damage = read_results(self.path) if run.is_main else (None, "")
        self.kept = resuming and (self.before is not None or bool(self._damage))
        if run.is_main and not self.kept:
            # before the others continue: they may fail, and then the file must be of this run
            self.begin()
        started = self.facts["started_at"]  # rank 0's stands for the run
        self.before, self.kept, self.facts["started_at"] = run.from_main(
            (self.before, self.kept, started)
        )
        self.was_complete = (
            self.kept and self.before is not None and self.before["status"] == "completed"
        )
        run.on_failure.append(self.fail)

    def begin(self) -> None:
        """From here on the file describes this run (rank 0). A damaged one of an earlier run is
        renamed."""
        self.was_complete = self.kept = False
        if not self.run.is_main:
            return
        if self.run.lock:
            remove_leftovers(self.path.parent)
        if self._damage:
            new_path = set_aside(self.path, f"{self.path.name}.damaged")
            self.run.warn(
                f"{self.path} is damaged ({self._damage}): ignored, and renamed to {new_path.name}."
            )
            self._damage = ""
        self._write()

    def continue_complete_run(self) -> None:
        """Take over the facts of the run that was complete."""
        self.facts |= self.before

    def update(self, **facts) -> None:
        """Add or replace facts; written with the next status."""
        self.facts.update(facts)

    def complete(self) -> None:
        """Write the final results (rank 0)."""
        self.facts["status"] = "completed"
        if self.run.is_main:
            self._write()

    def over(self, steps: int, args) -> bool:
        """Whether --resume finds nothing left to do although its newest checkpoint may be older
        than the run's end: the run stopped early as it would again, or had `steps` steps and kept
        the best weights only.
        """
        if not self.was_complete or args.resume != "":
            return False
        stops_early = (
            bool(args.early_stopping_patience)
            and self.before.get("stopped_early") == args.early_stopping_patience
        )
        return stops_early or (args.load_best_at_end and self.before["steps"] >= steps)

    def preempted(self, counters: dict) -> None:
        """Write how far the run came until a signal stopped it (rank 0)."""
        reason = "stopped by a signal; a checkpoint was saved"
        self.facts.update(status="preempted", reason=reason, **progress(counters))
        if self.run.is_main:
            self._write()

    def fail(self, error: UserError) -> bool:
        """Write why the run ended, unless the file says already how it ended; any rank may call it.

        Returns:
            False if another rank has written an error first.
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
    """One process at a time, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_results(path: Path) -> tuple[dict | None, str]:
    """(an earlier run's results.json, what is wrong with it or ""); without one (None, "")."""
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
    """The meter's counters under the names of results.json."""
    return {
        "steps": counters["step"],
        "samples": counters["samples"],
        "tokens": counters["tokens"],
        "training_seconds": counters["training_seconds"],
        "train_loss_first": counters["first_loss"],
        "train_loss_last": counters["last_loss"],
    }


def hardware(device: torch.device) -> dict:
    """The machine of this rank: names, cores this process may use, bytes of memory; GPU keys are
    null without one.
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
    """The processor as /proc/cpuinfo names it, else as Python knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def summarize(
    run: Run, meter: Meter, footprint: memory.Phases, evaluation: tuple | None, args, blueprint
) -> dict:
    """The measured part of results.json: gathered from all ranks; throughput and times are means
    over them.
    """
    counters, steps = meter.counters(), meter.step - meter.before["step"]
    rank_facts = {
        "memory": memory.of_this_rank(
            footprint, meter.step_memory, args.nvme_folder, run.launch.is_node_leader
        ),
        "speed": meter.speed(),
    }
    traffic = meter.traffic.per_step(meter.warmup_steps)
    rank_facts["sent"] = sum(collective["sent_bytes"] for collective in traffic.values())
    ranks = run.gather(rank_facts)
    facts = {
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
    if facts["tokens_per_second"]:
        facts["tokens_per_second_per_gpu"] = facts["tokens_per_second"] / run.world_size
        if peak := peak_flops(run.device, run.precision):
            text_config, weights = (
                blueprint.text_config,
                (blueprint.matmul_parameters, blueprint.trainable_matmul),
            )
            flops = flops_per_token(
                *weights, text_config.num_hidden_layers, text_config.hidden_size, args.seq_length
            )
            facts["mfu"] = facts["tokens_per_second_per_gpu"] * flops / peak
    if steps and Traffic.complete(run.device, args.ds_config_dict is not None):
        facts["communication_bytes_per_step"] = statistics.mean(rank["sent"] for rank in ranks)
        facts["communication_per_step"] = traffic
    facts["memory"] = memory.over_ranks([rank["memory"] for rank in ranks])
    if (
        run.simulated
        and not facts["memory"]["moments_bytes"]
        and facts["memory"]["placement"]["optimizer"] != "nvme"
    ):
        raise TrainingError(
            "The simulated steps updated nothing, so Adam's states are missing in what was measured."
        )
    facts["memory"]["predicted_bytes"] = preflight.predicted_bytes(args, run, blueprint)
    return facts


def mean_over_ranks(values: list[dict]) -> dict:
    """The mean of each number over the ranks, also inside nested dicts."""
    columns = {key: [value[key] for value in values] for key in values[0]}
    return {
        key: mean_over_ranks(column) if isinstance(column[0], dict) else statistics.mean(column)
        for key, column in columns.items()
    }


def say_dataset(run: Run, args, facts: dict[str, dict], tokenizer) -> None:
    """What the corpus gives: a line for each split.

    Args:
        facts: of each split, see data.open_split.
        tokenizer: gets a chat template if it needs one and has none.
    """
    if "chat" in [split_facts.get("kind") for split_facts in facts.values()] and use_plain_template(
        tokenizer, "chat"
    ):
        run.warn(PLAIN_NOTICE)
    for name, split_facts in facts.items():
        run.say(f"📚 {data.describe_split(name, split_facts, args.seq_length)}")
        if name == "train" and args.num_samples and split_facts["blocks"] < args.num_samples:
            run.warn(
                f"--num_samples {args.num_samples:,} is more than the corpus has: using all {split_facts['blocks']:,} blocks."
            )


def say_setup(run: Run) -> None:
    """The block that a run on several ranks shows once."""
    if run.world_size == 1:
        return
    gpu = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "none (CPU)"
    run.say(
        "=== Distributed Setup ===\n"
        f"Rank: {run.rank}/{run.world_size - 1}\nLocal Rank: {run.launch.local_rank}\nWorld Size: {run.world_size}\n"
        f"Backend: {run.backend}\nGPU: {gpu}\n========================="
    )


def place_of(path: Path, run: Run) -> str:
    """A path as the console shows it; of several machines also the host, which may be the only one
    that has it.
    """
    return f"{path} on {platform.node()}" if run.nodes > 1 else str(path)


def say_results(run: Run, facts: dict, args) -> None:
    """What a run that has come to its end says of it."""
    if args.profile_memory or run.simulated:
        say_memory_profile(run, facts["memory"])
    if run.simulated:
        run.say(f"✅ Memory simulation complete: rank 0 of {run.world_size}. Nothing was trained.")
        return
    run.say("✅ Evaluation Complete!" if args.eval_only else "✅ Training Complete!")
    say_memory(run, facts["memory"])
    say_throughput(run, facts)


def say_memory(run: Run, memory_by_rank: dict) -> None:
    """One line: the most that any rank held."""
    allocated, peak = (
        max(memory_by_rank["allocated_bytes"]) / GB,
        max(memory_by_rank["peak_bytes"]) / GB,
    )
    if run.device.type == "cuda":
        reserved = max(memory_by_rank["reserved_bytes"]) / GB
        run.say(
            f"GPU Memory: {allocated:.2f} GB allocated | {reserved:.2f} GB reserved | {peak:.2f} GB peak"
        )
    else:
        run.say(f"Process Memory: {allocated:.2f} GB resident | {peak:.2f} GB peak")


def say_memory_profile(run: Run, found: dict) -> None:
    """--profile_memory: the device's numbers, then each phase, each kind of state, the host and
    NVMe.

    Of several ranks the most is shown, and the least beside it where it is less.
    """
    kind = "GPU" if run.device.type == "cuda" else "Process"
    names = (("Allocated", "allocated"), ("Reserved", "reserved"), ("Peak", "peak"))
    for rank in range(len(found["peak_bytes"])):
        run.say(f"{kind} {rank} Memory:")
        for name, key in names:
            value = found[f"{key}_bytes"][rank]
            run.say(f"  {name}: " + (f"{value / GB:.2f} GB" if value is not None else "—"))
    run.say(
        "Memory after each phase (of the rank that holds most, and of the one that holds least in brackets):"
    )
    for phase, values in found["phases_bytes"].items():
        shown_columns = PHASE_COLUMNS if run.device.type == "cuda" else PHASE_COLUMNS[-1:]
        columns = [f"{name} {most_and_least(values[key])}" for name, key in shown_columns]
        run.say(f"  {phase:20}" + " | ".join(columns))
    if found["step_bytes_by_rank"][0]:
        run.say("Live tensors in the last step:")
        for phase in found["step_bytes_by_rank"][0]:
            steps = [step[phase] for step in found["step_bytes_by_rank"]]
            live, peak = ([step[key] for step in steps] for key in ("live", "peak"))
            run.say(
                f"  {phase:20}at its end {most_and_least(live)} | at its peak {most_and_least(peak)}"
            )
    run.say(
        "Live tensors by kind in the last step (end of backward; activations and logits: end of forward):"
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
            run.say(f"  {name:20}{most_and_least(total)}{device_text}")
    host, pinned = (most_and_least(found[key]) for key in ("host_peak_bytes", "pinned_bytes"))
    run.say(f"Host: {host} at its peak, {pinned} pinned")
    if found["nvme_bytes"]:
        stored, written = (
            human_bytes(found[key]) for key in ("nvme_bytes", "nvme_written_bytes_per_step")
        )
        run.say(f"NVMe: {stored} held, {written} written in a step, by all ranks")
    if found["device_used"][0]:
        used, unseen = ([rank[key] for rank in found["device_used"]] for key in ("used", "unseen"))
        run.say(
            f"The device itself: {most_and_least(used)} in use, of it {most_and_least(unseen)} that PyTorch does not "
            "see (CUDA context, libraries, NCCL, other processes)"
        )


PHASE_COLUMNS = (
    ("allocated", "device_allocated"),
    ("reserved", "device_reserved"),
    ("peak", "device_peak"),
    ("host", "host_resident"),
)
CATEGORIES_ON_DEVICE = "device_categories_bytes_by_rank"


def most_and_least(values: list[int]) -> str:
    """Bytes of several ranks: "1.25 GB", or "1.25 GB (1.10 GB)" with the least in brackets."""
    most, least = human_bytes(max(values)), human_bytes(min(values))
    return most if most == least else f"{most} ({least})"


def say_throughput(run: Run, facts: dict) -> None:
    """One line; MFU is N/A where the device's peak is not known."""
    if not facts.get("samples_per_second"):
        return
    mfu = "N/A" if facts["mfu"] is None else f"{100 * facts['mfu']:.1f}%"
    per_gpu = "tokens/sec/GPU" if run.device.type == "cuda" else "tokens/sec/process"
    run.say(
        f"Throughput: {facts['samples_per_second']:,.1f} samples/sec | {facts['tokens_per_second']:,.0f} tokens/sec | "
        f"{facts['tokens_per_second_per_gpu']:,.0f} {per_gpu} | MFU {mfu}"
        f" (first {facts['warmup_steps_excluded']} of {facts['steps']} steps left out)"
    )
