"""What a run tells: console lines, metrics.jsonl, results.json, and the clocks behind the numbers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import platform
import re
import shlex
import statistics
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import psutil
import torch

from support import data, memory, preflight, tracing
from support.communication import Traffic
from support.comparison import human_bytes
from support.distributed import Run, versions
from support.errors import TrainingError, UserError, explain
from support.files import write_text
from support.launch import available_cores
from support.trackers import Trackers

PROCESS_STARTED = psutil.Process().create_time()
GB = 2**30  # as nvidia-smi and DeepSpeed count
PHASES = ("data", "forward", "backward", "update")

# Peak dense TFLOP/s in 16 bit and in TF32 (fp32 before Ampere), from NVIDIA's data sheets. Names as torch reports them.
PEAK_TFLOPS = {
    "B200": (2250, 1125), "H200": (989, 494), "H100 PCIe": (756, 378), "H100 NVL": (835, 417), "H100": (989, 494),
    "A100": (312, 156),
    "A40": (149.7, 74.8), "A30": (165, 82), "A10": (125, 62.5), "L40S": (362, 183), "L4": (121, 60), "T4": (65, 8.1),
    "V100": (125, 15.7), "RTX 4090": (165.2, 82.6), "RTX 3090": (71, 35.6),
}  # fmt: skip


def human_count(number: int) -> str:
    """124439808 -> "124M"; below ten millions with one decimal, from a billion on in B."""
    if number >= 1e9:
        return f"{number / 1e9:.1f}B"
    return f"{number / 1e6:.0f}M" if number >= 1e7 else f"{number / 1e6:.1f}M"


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's peak FLOP/s at this precision; None where it is not known, and so no MFU is given."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).replace("-", " ")  # whole words: an A10G is no A10, an L40 no L4
    known = (peaks for key, peaks in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", name) and "Laptop" not in name)
    found = next(known, None)
    return None if found is None else found[precision == "fp32"] * 1e12


def flops_per_token(matmul_parameters: int, layers: int, hidden: int, seq_length: int) -> float:
    """Floating-point operations per token of forward and backward: 6N + 12·L·H·T (PaLM, 2204.02311, appendix B).

    Args:
        matmul_parameters: parameters that take part in matrix multiplications (not position or untied input embeddings).
        layers, hidden, seq_length: of the model and the block.
    """
    return 6 * matmul_parameters + 12 * layers * hidden * seq_length


class StepTimer:
    """Seconds of each phase of each step. On a GPU it records events and reads them only when asked.

    Reading a clock after launching GPU work would time the launch, and waiting for the work would slow training
    down; an event is a mark in the GPU's own queue of work.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self._marks: list[tuple[str | None, object]] = []
        self.steps: list[dict[str, float]] = []

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, phase: str | None) -> None:
        """The time since the last mark belongs to `phase`; None leaves it out (a pause, or the start of a step)."""
        self._marks.append((phase, self._now()))

    def end_step(self) -> None:
        """Close the step whose marks were made since the last one."""
        self._marks.append(("end", None))

    def read(self) -> None:
        """Turn marks into seconds, in `steps`. On a GPU this waits for the work so far: call it where lines are logged."""
        if self.cuda and self._marks:
            torch.cuda.synchronize()
        step, before = dict.fromkeys(PHASES, 0.0), None
        for phase, moment in self._marks:
            if phase == "end":
                self.steps.append(step)
                step, before = dict.fromkeys(PHASES, 0.0), None
                continue
            if phase is not None and before is not None:
                step[phase] += before.elapsed_time(moment) / 1000 if self.cuda else moment - before
            before = moment
        self._marks.clear()


class Meter:
    """Follows training step by step and keeps every number on the device until a line is logged."""

    def __init__(self, run: Run, folder: Path, total_steps: int, logging_steps: int, before: dict, footprint, step_memory):
        """
        Args:
            before: the counters to go on from, of a checkpoint (see `counters`) or of a new run.
            footprint: memory.Phases, which learns of the first step's phases.
            step_memory: memory.StepMemory, which measures the last step.
        """
        self.run, self.total_steps, self.logging_steps = run, total_steps, logging_steps
        self.footprint, self.step_memory = footprint, step_memory
        self.trace = None  # of --profile
        self.trackers = None  # of --report_to
        self._bar = None
        self.timer = StepTimer(run.device)
        self.traffic = Traffic()
        self.before = before
        self.step = self.before["step"]  # optimizer steps done
        self.samples_done = self.before["samples"]  # blocks that they saw, over all ranks
        self.samples: list[int] = []  # of each step of this process
        self.losses: list[float] = []
        self.first_step_at: float | None = None
        self._rate: float | None = None  # tokens per second of the last step that was read
        self._pending: list[dict] = []
        self._path = folder / "metrics.jsonl" if run.is_main else None
        if self._path:
            self._keep_lines_before()

    def _keep_lines_before(self) -> None:
        """Let metrics.jsonl end where the checkpoint was made: what came after it is made again."""
        kept = []
        for line in self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a run that was killed
                record = json.loads(line)
                # A checkpoint at an epoch's end comes before that epoch's evaluation.
                if record["step"] < self.step or (record["step"] == self.step and "loss" in record):
                    kept.append(line + "\n")
        write_text(self._path, "".join(kept))

    def counters(self) -> dict:
        """Counts since the very start, for a checkpoint: step, samples, training_seconds, first_loss, last_loss."""
        self.flush()
        first, last = self.before["first_loss"], self.before["last_loss"]
        return {
            "step": self.step,
            "samples": self.samples_done,
            "training_seconds": self.before["training_seconds"] + sum(sum(step.values()) for step in self.timer.steps),
            "first_loss": self.losses[0] if first is None and self.losses else first,
            "last_loss": self.losses[-1] if self.losses else last,
        }

    @property
    def warmup_steps(self) -> int:
        """First steps that no average counts: compilation, first allocations, DeepSpeed's first look at the model."""
        return min(5, (self.step - self.before["step"]) // 4)

    @property
    def at_end_of_epoch(self) -> bool:
        """Whether all of the epoch's blocks are behind the last step."""
        return self.position == self._blocks

    @property
    def finished(self) -> bool:
        return self.step >= self.total_steps

    @property
    def _in_last_step(self) -> bool:
        return self.step + 1 == self.total_steps

    def mark(self, phase: str) -> None:
        """The time and the memory since the last mark belong to this phase of the step; see PHASES."""
        self.timer.mark(phase)
        name = "optimizer_step" if phase == "update" else phase
        self.footprint.doing = memory.AFTER[name]
        first = self.step == self.before["step"] and phase != "data"
        if first or self._in_last_step:
            self.footprint.peak.mark()
        if first:
            self.footprint.note(name, mark=False)
        if not self._in_last_step:
            return
        if phase == "data":
            self.step_memory.begin()
            self.traffic.aside = self.step_memory.slows_down
        else:
            self.step_memory.mark(phase)
        self.timer.mark(None)

    def after_backward(self) -> None:
        """The last micro-batch is done. At the last step, count live tensors: everything a step needs is there now."""
        self.footprint.doing = "the update"
        if self._in_last_step:
            self.step_memory.after_backward()
            self.timer.mark(None)

    def start_epoch(self, epoch: int, train, args) -> None:
        """Note how the epoch's remaining blocks fall into steps, and start the clock.

        Args:
            epoch: counts from 1.
            train: the training blocks.
            args: batch size and accumulation make the global batch.
        """
        self._epoch, self._blocks, self._seq_length = epoch, train.blocks, train.seq_length
        self._global_batch = args.batch_size * args.gradient_accumulation_steps * self.run.world_size
        self.position = self.samples_done - (epoch - 1) * train.blocks  # 0, unless a resumed run starts in the middle
        self._batch = data.steps_of(self.position, self._global_batch)
        left = data.steps_of(train.blocks - self.position, self._global_batch)
        self._batches = self._batch + min(left, self.total_steps - self.step)
        self._bar = self.run.bar(f"Epoch {epoch}", self._batches, done=self._batch)
        self.restart_clock()

    def restart_clock(self) -> None:
        """What happened since the last step, such as an evaluation or a save, belongs to no step."""
        self.traffic.discard()
        self.timer.mark(None)

    def end_step(self, loss: torch.Tensor, lr: float, grad_norm) -> None:
        """Record one optimizer step.

        Args:
            loss: mean over all tokens of the global batch; a tensor that stays on the device.
            lr: learning rate of this step.
            grad_norm: norm of the whole gradient before clipping; a tensor, a number, or None.
        Raises:
            TrainingError: a loss was not finite. No update was made from it, or after it.
        """
        self.timer.end_step()
        self.traffic.end_step()
        if self._in_last_step:
            self.step_memory.end()
            self.traffic.aside = False
        if self.trace:
            self.trace.end_step()
        batch, batches = self._batch, self._batches
        self._batch += 1
        self.step += 1
        # The last step of an epoch may see fewer blocks.
        self.samples.append(min(self._global_batch, self._blocks - self.position))
        self.samples_done += self.samples[-1]
        self.position += self.samples[-1]
        self._pending.append({"step": self.step, "epoch": self._epoch, "loss": loss.detach().clone(), "lr": lr,
                              "grad_norm": grad_norm, "tokens": self.samples[-1] * self._seq_length})  # fmt: skip
        shown = batch % self.logging_steps == 0 or self._batch == batches or self.finished
        # On a CPU nothing runs ahead, so a look at every loss costs nothing.
        if shown or self.run.device.type == "cpu":
            self.flush()
        if self.run.simulated:
            self.run.say(f"Step {self.step}/{self.total_steps} of the memory simulation")
        elif shown:
            self.run.say(f"Epoch {self._epoch} | Batch {batch}/{batches} | Loss: {self.losses[-1]:.4f} | LR: {lr:.2e}")
        if shown and self.trackers and self.trackers.active:
            held = self.footprint.device_bytes()["allocated"]
            self.trackers.memory(self.step, self.run.gather(held))
            self.traffic.discard()  # of this gather
        self._advance_bar(lr)
        self.timer.mark(None)

    def _advance_bar(self, lr: float) -> None:
        if self._bar.active and self.losses and self._rate:
            held = human_bytes(self.footprint.device_bytes()["allocated"])
            self._bar.show(f"loss {self.losses[-1]:.3f}, lr {lr:.1e}, {self._rate:,.0f} tok/s, {held}")
        self._bar.advance()
        if self._batch == self._batches or self.finished:
            self._bar.close()

    def flush(self) -> None:
        """Bring the numbers of the steps so far to the host and write them."""
        self.timer.read()
        if self.first_step_at is None and self.timer.steps:
            self.first_step_at = time.time() - sum(sum(step.values()) for step in self.timer.steps[1:])
        pending, self._pending = self._pending, []
        for record in () if self.run.simulated else pending:
            tokens, seconds = record.pop("tokens"), sum(self.timer.steps[record["step"] - 1 - self.before["step"]].values())
            record["loss"] = float(record["loss"])
            record["grad_norm"] = None if record["grad_norm"] is None else float(record["grad_norm"])
            if not math.isfinite(record["loss"]):
                raise TrainingError(
                    f"The loss is {record['loss']} at step {record['step']}: the run stops before that update. Try a lower "
                    "--lr, --warmup_steps, or --precision fp32, and look at the data of that step."
                )
            self.losses.append(record["loss"])
            self._rate = tokens / seconds if seconds else None
            self._write({**record, "tokens_per_second": self._rate, "seconds": seconds})

    def log_evaluation(self, loss: float, perplexity: float) -> None:
        """Record an evaluation after the current step."""
        self._write({"step": self.step, "eval_loss": loss, "perplexity": perplexity})

    def _write(self, record: dict) -> None:
        if self.trackers:
            self.trackers.log(record)
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(only_finite(record)) + "\n")

    def close(self, sample: str | None = None) -> None:
        """Finish what other tools will read: a trace, a snapshot, curves and the sample text.

        What fails here is said and no more: the training itself is done.
        """
        if self._bar:
            self._bar.close()
        trackers = [lambda: self.trackers.sample(self.step, sample)] if sample else []
        for finish in ([self.trace.stop] if self.trace else []) + [*self.run.at_end, *trackers, self.trackers.close]:
            try:
                finish()
            except Exception as error:
                self.run.warn(str(explain(error)))

    def speed(self, seq_length: int) -> dict:
        """Throughput and step times of this rank, without the first steps (compilation, first allocations)."""
        excluded = self.warmup_steps
        if self.run.simulated:
            return {"warmup_steps_excluded": 0}
        until = len(self.samples)
        if self.step_memory.slows_down and until > excluded + 1:
            until -= 1
        steps = self.timer.steps[excluded:until]
        seconds = sorted(sum(step.values()) for step in steps)
        if not seconds:
            return {"warmup_steps_excluded": 0}
        per_second = sum(self.samples[excluded:until]) / sum(seconds)
        return {
            "warmup_steps_excluded": excluded,
            "samples_per_second": per_second,
            "tokens_per_second": per_second * seq_length,
            "step_seconds": {
                "median": statistics.median(seconds),
                "p10": seconds[int(0.1 * (len(seconds) - 1))],
                "p90": seconds[math.ceil(0.9 * (len(seconds) - 1))],
            },
            "step_phases_seconds": {name: statistics.mean(step[name] for step in steps) for name in PHASES},
        }


def open_meter(args, run: Run, folder: Path, model, optimizer, blueprint, steps: int, before: dict, footprint) -> Meter:
    """A `Meter` with all that --profile_memory, --profile and --report_to add to it."""
    logits = 4 * args.batch_size * args.seq_length * blueprint.text_config.vocab_size  # in fp32, what the loss keeps
    detailed = args.profile_memory or run.simulated
    step_memory = memory.StepMemory(getattr(model, "module", model), optimizer, footprint.peak, detailed, logits)
    run.memory_facts.append(step_memory.describe)
    meter = Meter(run, folder, 0 if args.eval_only else steps, args.logging_steps, before, footprint, step_memory)
    meter.trackers = Trackers(args, run, folder, before["step"])
    if args.profile:
        meter.trace = tracing.Trace(args.profile, run)
    return meter


def new_output_dir(args, run: Run) -> Path:
    """The folder of results.json: as named, or a new one that rank 0 names for all."""
    name = args.output_dir or f"runs/{Path(args.model).name}-{args.strategy}-{time.strftime('%Y%m%d-%H%M%S')}"
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
    """Every rank writes its part of a checkpoint: find out now, and not hours later, that a node has another disk.

    Raises:
        UserError: names the hosts that do not see the folder.
    """
    until = time.monotonic() + 10  # NFS shows a new folder late
    while not (folder / ".lock").exists() and time.monotonic() < until:
        time.sleep(0.1)
    blind = sorted({host for host in run.gather("" if (folder / ".lock").exists() else platform.node()) if host})
    if blind:
        raise UserError(f"--output_dir {folder} is on no disk that {', '.join(blind)} shares with rank 0: name one that all "
                        "nodes see, or use --no_save --no_export.")  # fmt: skip


def lock_folder(folder: Path):
    """Keep other runs out of an output folder for as long as this process lives.

    Returns:
        The open file that holds the lock.
    Raises:
        UserError: another run has it.
    """
    file = open(folder / ".lock", "w")  # noqa: SIM115 (it stays open)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"--output_dir {folder} is in use by another run: wait for it, or name another folder.") from None
    except OSError:  # a file system without locks
        pass
    return file


class Results:
    """results.json: written at the start with status "running", and at the end, whichever end it is."""

    def __init__(self, run: Run, folder: Path, facts: dict, resuming: bool):
        self.run, self.path = run, folder / "results.json"
        self.facts = {
            "schema_version": 1,
            "status": "running",
            "reason": None,
            "error_kind": None,
            "started_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join([Path(sys.executable).name, *sys.argv]),
            "versions": versions(),
            "hardware": hardware(run.device),
            **facts,
        }
        # A run that was complete keeps its results until the resumed one has begun.
        kept = resuming and run.is_main and self.path.exists() and '"status": "completed"' in self.path.read_text("utf-8")
        self.was_complete = run.from_main(kept)
        if not self.was_complete:
            self.begin()
        run.on_failure.append(self.fail)

    def begin(self) -> None:
        """From here on the file tells of this run (rank 0)."""
        self.was_complete = False
        if self.run.is_main:
            self._write()

    def go_on_from_complete(self) -> None:
        """Take over the facts of the run that was complete."""
        self.facts = self.run.from_main(json.loads(self.path.read_text(encoding="utf-8")) if self.run.is_main else None)

    def update(self, **facts) -> None:
        """Add or replace facts; written with the next status."""
        self.facts.update(facts)

    def complete(self) -> None:
        """Write the final results (rank 0)."""
        self.facts["status"] = "completed"
        if self.run.is_main:
            self._write()

    def preempted(self, counters: dict, seq_length: int) -> None:
        """Write how far the run came until a signal stopped it (rank 0)."""
        reason = "stopped by a signal; a checkpoint was saved"
        self.facts.update(status="preempted", reason=reason, **progress(counters, seq_length))
        if self.run.is_main:
            self._write()

    def fail(self, error: UserError) -> None:
        """Write why the run ended; called on the one rank that failed first, whichever it is."""
        if self.was_complete:
            return
        self.facts.update(status=error.status, reason=str(error), error_kind=error.kind)
        self._write()

    def _write(self) -> None:
        write_text(self.path, json.dumps(only_finite(self.facts), indent=2) + "\n")


def progress(counters: dict, seq_length: int) -> dict:
    """The meter's counters under the names of results.json."""
    return {
        "steps": counters["step"],
        "samples": counters["samples"],
        "tokens": counters["samples"] * seq_length,
        "training_seconds": counters["training_seconds"],
        "train_loss_first": counters["first_loss"],
        "train_loss_last": counters["last_loss"],
    }


def only_finite(value):
    """JSON has no word for infinity or not-a-number: null stands for them."""
    if isinstance(value, dict):
        return {key: only_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [only_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def hardware(device: torch.device) -> dict:
    """The machine of this rank: names, cores this process may use, bytes of memory; GPU keys are null without one."""
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
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def summarize(run: Run, meter: Meter, footprint: memory.Phases, evaluation: tuple | None, args, blueprint, precision) -> dict:
    """The measured part of results.json: gathered from all ranks; throughput and times are means over them."""
    counters, steps = meter.counters(), meter.step - meter.before["step"]
    mine = {"memory": memory.of_this_rank(footprint, meter.step_memory, args.nvme_folder, run.launch.is_node_leader),
            "speed": meter.speed(args.seq_length)}  # fmt: skip
    traffic = meter.traffic.per_step(meter.warmup_steps)
    mine["sent"] = sum(collective["sent_bytes"] for collective in traffic.values())
    ranks = run.gather(mine)
    facts = {
        **progress(counters, args.seq_length),
        "eval_loss": evaluation[0] if evaluation else None,
        "perplexity": evaluation[1] if evaluation else None,
        "seconds_to_first_step": meter.first_step_at - PROCESS_STARTED if meter.first_step_at else None,
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
        if peak := peak_flops(run.device, precision):
            text = blueprint.text_config
            flops = flops_per_token(blueprint.matmul_parameters, text.num_hidden_layers, text.hidden_size, args.seq_length)
            facts["mfu"] = facts["tokens_per_second_per_gpu"] * flops / peak
    if steps and Traffic.complete(run.device, args.ds_config_dict is not None):
        facts["communication_bytes_per_step"] = statistics.mean(rank["sent"] for rank in ranks)
        facts["communication_per_step"] = traffic
    facts["memory"] = memory.over_ranks([rank["memory"] for rank in ranks])
    if run.simulated and not facts["memory"]["moments_bytes"] and facts["memory"]["placement"]["optimizer"] != "nvme":
        raise TrainingError("The simulated steps updated nothing, so Adam's states are missing in what was measured.")
    facts["memory"]["predicted_bytes"] = preflight.predicted_bytes(args, run, precision, blueprint)
    return facts


def mean_over_ranks(values: list[dict]) -> dict:
    """The mean of each number over the ranks, also inside nested dicts."""
    columns = {key: [value[key] for value in values] for key in values[0]}
    return {
        key: mean_over_ranks(column) if isinstance(column[0], dict) else statistics.mean(column)
        for key, column in columns.items()
    }


def say_setup(run: Run) -> None:
    """The block that a run on several ranks shows once."""
    if run.world_size == 1:
        return
    gpu = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "none (CPU)"
    run.say(
        "=== Distributed Setup ===\n"
        f"Rank: {run.rank}\nLocal Rank: {run.launch.local_rank}\nWorld Size: {run.world_size}\n"
        f"Backend: {run.backend}\nGPU: {gpu}\n========================="
    )


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
    allocated, peak = max(memory_by_rank["allocated_bytes"]) / GB, max(memory_by_rank["peak_bytes"]) / GB
    if run.device.type == "cuda":
        reserved = max(memory_by_rank["reserved_bytes"]) / GB
        run.say(f"GPU Memory: {allocated:.2f} GB allocated | {reserved:.2f} GB reserved | {peak:.2f} GB peak")
    else:
        run.say(f"Process Memory: {allocated:.2f} GB resident | {peak:.2f} GB peak")


def say_memory_profile(run: Run, found: dict) -> None:
    """--profile_memory: the device's numbers, then each phase, each kind of state, the host and NVMe.

    Of several ranks the most is shown, and the least beside it where it is less.
    """
    kind = "GPU" if run.device.type == "cuda" else "Process"
    names = (("Allocated", "allocated"), ("Reserved", "reserved"), ("Peak", "peak"))
    for rank in range(len(found["peak_bytes"])):
        run.say(f"{kind} {rank} Memory:")
        for name, key in names:
            value = found[f"{key}_bytes"][rank]
            run.say(f"  {name}: " + (f"{value / GB:.2f} GB" if value is not None else "—"))
    run.say("Memory after each phase (of the rank that holds most, and of the one that holds least in brackets):")
    for phase, values in found["phases_bytes"].items():
        shown = PHASE_COLUMNS if run.device.type == "cuda" else PHASE_COLUMNS[-1:]
        columns = [f"{name} {most_and_least(values[key])}" for name, key in shown]
        run.say(f"  {phase:20}" + " | ".join(columns))
    if found["step_bytes_by_rank"][0]:
        run.say("Live tensors in the last step:")
        for phase in found["step_bytes_by_rank"][0]:
            steps = [step[phase] for step in found["step_bytes_by_rank"]]
            live, peak = ([step[key] for step in steps] for key in ("live", "peak"))
            run.say(f"  {phase:20}at its end {most_and_least(live)} | at its peak {most_and_least(peak)}")
    run.say("Live tensors by kind in the last step (end of backward; activations and logits: end of forward):")
    for name in found["categories_bytes"] or ():
        whole, on_device = ([rank[name] for rank in found[key]] for key in ("categories_bytes_by_rank", CATEGORIES_ON_DEVICE))
        if whole[0] is not None:
            elsewhere = "" if whole == on_device else f" | of it on the device {most_and_least(on_device)}"
            run.say(f"  {name:20}{most_and_least(whole)}{elsewhere}")
    host, pinned = (most_and_least(found[key]) for key in ("host_peak_bytes", "pinned_bytes"))
    run.say(f"Host: {host} at its peak, {pinned} pinned")
    if found["nvme_bytes"]:
        held, written = (human_bytes(found[key]) for key in ("nvme_bytes", "nvme_written_bytes_per_step"))
        run.say(f"NVMe: {held} held, {written} written in a step, by all ranks")
    if found["device_used"][0]:
        used, unseen = ([rank[key] for rank in found["device_used"]] for key in ("used", "unseen"))
        run.say(f"The device itself: {most_and_least(used)} in use, of it {most_and_least(unseen)} that PyTorch does not "
                "see (CUDA context, libraries, NCCL, other processes)")  # fmt: skip


PHASE_COLUMNS = (("allocated", "device_allocated"), ("reserved", "device_reserved"), ("peak", "device_peak"),
                 ("host", "host_resident"))  # fmt: skip
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
