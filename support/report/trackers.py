"""--report_to: the numbers of metrics.jsonl in TensorBoard and in Weights & Biases."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from support.cli.arguments import Arguments
from support.cli.checks import EVENT_FILES
from support.cluster.context import DistContext
from support.console import Console
from support.errors import UserError, explain, first_line, redact_value
from support.files.atomic import write_text
from support.units import GB

DEFAULT_PROJECT = "distributed-training"  # on wandb
# Name of a curve -> key of a record in metrics.jsonl.
CURVES = {
    "train/loss": "loss",
    "train/lr": "lr",
    "train/grad_norm": "grad_norm",
    "eval/loss": "eval_loss",
    "train/tokens_per_second": "tokens_per_second",
    "eval/perplexity": "perplexity",
}


class Tracker(NamedTuple):
    """A program that shows curves."""

    name: str
    errors: tuple[type[Exception], ...]  # a full disk, a lost connection
    curves: Callable[[int, dict[str, float]], object]  # logs one point of each curve at a step
    text: Callable[[int, str, str], object]  # logs a text under a name at a step
    close: Callable[[], object]


def tensorboard(folder: Path, step: int, arguments: dict, ctx: DistContext) -> Tracker:
    """Write event files into a folder; a resumed run continues the curves at its checkpoint."""
    from torch.utils.tensorboard import SummaryWriter

    # The steps after the checkpoint are run again. With purge_step TensorBoard hides the points
    # that earlier event files have of them; of a run that starts at step 0, all points.
    writer = SummaryWriter(str(folder), purge_step=step + 1)
    ctx.failures.flushes.append(writer.flush)
    table = "\n".join(f"| {name} | {value} |" for name, value in sorted(arguments.items()))
    writer.add_text("arguments", f"| flag | value |\n| --- | --- |\n{table}", step)

    def curves(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    def text(step: int, name: str, text: str) -> None:
        writer.add_text(name, text, step)

    return Tracker("tensorboard", (OSError,), curves, text, writer.close)


def wandb(folder: Path, arguments: dict, labels: dict) -> Tracker:
    """Start a run on wandb.ai, or under <output_dir>/wandb with WANDB_MODE=offline.

    Raises:
        UserError: wandb could not start, for example for lack of an account or a network.
    """
    import wandb

    errors = (Exception,)  # not all of wandb's are of one class
    try:
        settings = wandb.Settings(silent=True, console="off", login_timeout=30)
        run = wandb.init(
            **labels, resume="allow", dir=str(folder), config=arguments, settings=settings
        )
    except errors as error:
        raise UserError(
            f"--report_to wandb: {first_line(error).rstrip('.')}. "
            "Log in with `wandb login`, or set WANDB_MODE=offline."
        ) from error

    def text(step: int, name: str, text: str) -> None:
        run.summary[name] = text

    return Tracker("wandb", errors, lambda step, v: run.log(v, step=step), text, run.finish)


def wandb_run_of(folder: Path, step: int, project: str | None) -> tuple[str, str]:
    """Return the wandb identifier and project of an output folder's run, from wandb-run.txt.

    A new run (`step` is 0) gets a new identifier, and without --project that of WANDB_PROJECT.
    """
    path = folder / "wandb-run.txt"
    if step and path.is_file() and len(stored := path.read_text().split("\n")) >= 2:
        identifier, project = stored[0], project or stored[1]
    else:
        identifier = uuid.uuid4().hex[:8]
        project = project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT
    write_text(path, f"{identifier}\n{project}\n")
    return identifier, project


def start_trackers(args: Arguments, ctx: DistContext, folder: Path, step: int) -> Trackers:
    """Start the trackers that --report_to names, on rank 0, for a run from a step on."""
    trackers: list[Tracker] = []
    if ctx.is_main and args.report_to:
        values = {**vars(args), "tags": ", ".join(args.tags)}
        shown = {k: v for k, v in values.items() if isinstance(v, str | int | float | bool)}
        arguments = {name: redact_value(value) for name, value in shown.items()}
        if "tensorboard" in args.report_to:
            events = Path(args.logging_dir or folder / "tensorboard")
            if args.overwrite and args.resume is None:
                for file in events.glob(EVENT_FILES):
                    file.unlink(missing_ok=True)
            trackers.append(tensorboard(events, step, arguments, ctx))
        if "wandb" in args.report_to:
            identifier, project = wandb_run_of(folder, step, args.project)
            labels = {"id": identifier, "project": project, "name": args.run_name}
            trackers.append(wandb(folder, arguments, {**labels, "tags": args.tags or None}))
    return Trackers(trackers, ctx.console, active=bool(args.report_to))


class Trackers:
    """All trackers of a run. One that fails is dropped with a warning, and training continues."""

    # trackers: empty on every rank but rank 0; active: whether --report_to names one, on any rank
    def __init__(self, trackers: list[Tracker], console: Console, active: bool):
        self._trackers, self._console, self.active = trackers, console, active

    def _call(self, method: str, *values) -> None:
        for tracker in list(self._trackers):
            try:
                getattr(tracker, method)(*values)
            except tracker.errors as error:
                self._trackers.remove(tracker)
                failed = f"--report_to {tracker.name} failed, and is not used any more"
                self._console.warn(f"{failed}: {explain(error)}")

    def log(self, record: dict) -> None:
        """Log the curves of one record of metrics.jsonl."""
        values = {name: record[key] for name, key in CURVES.items() if record.get(key) is not None}
        self._call("curves", record["step"], values)

    def memory(self, step: int, allocated: list[int]) -> None:
        """Log the memory of each rank's device, in bytes by rank."""
        values = {f"memory_gb/rank{rank}": size / GB for rank, size in enumerate(allocated)}
        self._call("curves", step, values)

    def close(self, step: int, sample: str | None) -> None:
        """Close all trackers, after the text that --generate produced."""
        if sample:
            self._call("text", step, "sample", sample)
        self._call("close")
