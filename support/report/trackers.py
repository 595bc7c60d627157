"""--report_to: the numbers of metrics.jsonl in TensorBoard and in Weights & Biases."""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

from support.cli.paths import EVENT_FILES
from support.cluster.context import DistContext
from support.errors import UserError, explain
from support.files.atomic import open_regular, set_aside, write_text
from support.redaction import redact
from support.units import GB

# Name of a curve -> key of a record in metrics.jsonl.
CURVES = {
    "train/loss": "loss",
    "train/lr": "lr",
    "train/grad_norm": "grad_norm",
    "eval/loss": "eval_loss",
    "train/tokens_per_second": "tokens_per_second",
    "eval/perplexity": "perplexity",
}


class TensorBoard:
    """Event files in a folder; a resumed run continues the curves at its checkpoint.

    Args:
        step: the optimizer step from which the run continues; 0 for a new run.
        arguments: flag -> value, logged as a table.
    """

    def __init__(self, folder: Path, step: int, arguments: dict):
        from torch.utils.tensorboard import SummaryWriter

        if step == 0:  # event files of an earlier run, which --overwrite replaces
            for file in folder.glob(EVENT_FILES):
                file.unlink(missing_ok=True)
        # The steps after the checkpoint are run again. With purge_step TensorBoard hides their
        # first points.
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)
        shown = "\n".join(f"| {name} | {value} |" for name, value in sorted(arguments.items()))
        self._writer.add_text("arguments", f"| flag | value |\n| --- | --- |\n{shown}", step)

    def curves(self, step: int, values: dict[str, float]) -> None:
        """Log one point of each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        """Log a text under a name."""
        self._writer.add_text(name, text, step)

    def flush(self) -> None:
        """Write the buffered points to disk; called when a run fails."""
        self._writer.flush()

    def close(self) -> None:
        """Write the buffered points and close the event file."""
        self._writer.close()


class WandB:
    """A run on wandb.ai, or under <output_dir>/wandb with WANDB_MODE=offline.

    A resumed run continues the same wandb run.

    Args:
        step: the optimizer step from which the run continues; 0 for a new run.
        arguments: flag -> value, shown as the run's configuration.
    Raises:
        UserError: wandb could not start, for example for lack of an account or a network.
    """

    def __init__(self, folder: Path, step: int, arguments: dict):
        import wandb

        identifier = wandb_run_of(folder, step)
        try:
            self._run = wandb.init(
                project="distributed-training",
                id=identifier,
                resume="allow",
                dir=str(folder),
                config=arguments,
                settings=wandb.Settings(silent=True, console="off", login_timeout=30),
            )
        except Exception as error:  # many types, all about the account or the network
            message = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise UserError(
                f"--report_to wandb: {message}. "
                "Log in with `wandb login`, or set WANDB_MODE=offline."
            ) from error

    def curves(self, step: int, values: dict[str, float]) -> None:
        """Log one point of each curve."""
        self._run.log(values, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Store a text under a name in the run's summary."""
        self._run.summary[name] = text

    def flush(self) -> None:
        """Do nothing: wandb's own process already has all that was logged."""

    def close(self) -> None:
        """Send or write the remaining data and end the wandb run."""
        self._run.finish()


def wandb_run_of(folder: Path, step: int) -> str:
    """Return the wandb identifier of an output folder's run: eight hexadecimal digits.

    The identifier is stored in wandb-run.txt. A new one is made for a new run (`step` is 0), and if
    that file is missing or damaged.

    Raises:
        OSError: the file cannot be renamed or written.
    """
    path = folder / "wandb-run.txt"
    try:
        with open_regular(path) as file:
            identifier = file.read(100).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        identifier = ""
    if step == 0 or not re.fullmatch("[0-9a-f]{8}", identifier):
        if os.path.lexists(path) and not path.is_file():
            set_aside(path, f"{path.name}.damaged")
        identifier = uuid.uuid4().hex[:8]
        write_text(path, identifier + "\n")
    return identifier


KINDS = {"tensorboard": TensorBoard, "wandb": WandB}


class Trackers:
    """All trackers that --report_to names.

    They exist on rank 0 only; on the other ranks every method does nothing.

    Args:
        folder: the run's output folder.
        step: the optimizer step from which the run continues; 0 for a new run.
    Raises:
        UserError: wandb could not start.
    Attributes:
        active: whether --report_to names a tracker; the same on every rank.
    """

    def __init__(self, args, ctx: DistContext, folder: Path, step: int):
        arguments = {
            name: redact(value) if isinstance(value, str) else value
            for name, value in vars(args).items()
            if isinstance(value, str | int | float | bool)
        }
        self.active = bool(args.report_to)
        self._console = ctx.console
        folders = {"tensorboard": Path(args.logging_dir or folder / "tensorboard"), "wandb": folder}
        self._all = (
            [KINDS[name](folders[name], step, arguments) for name in args.report_to]
            if ctx.is_main
            else []
        )
        ctx.failures.flushes += [tracker.flush for tracker in self._all]

    def _curves(self, step: int, values: dict[str, float]) -> None:
        for tracker in list(self._all):
            try:
                tracker.curves(step, values)
            except Exception as error:  # a full disk or a lost network does not end the training
                self._all.remove(tracker)
                self._console.warn(
                    f"--report_to {type(tracker).__name__.lower()} gets no more: {explain(error)}"
                )

    def log(self, record: dict) -> None:
        """Log the curves of one record of metrics.jsonl."""
        self._curves(
            record["step"],
            {name: record[key] for name, key in CURVES.items() if record.get(key) is not None},
        )

    def memory(self, step: int, held: list[int]) -> None:
        """Log the memory of each rank's device.

        Args:
            held: bytes by rank.
        """
        self._curves(step, {f"memory_gb/rank{rank}": size / GB for rank, size in enumerate(held)})

    def sample(self, step: int, text: str) -> None:
        """Log the text that --generate produced."""
        for tracker in self._all:
            tracker.text(step, "sample", text)

    def close(self) -> None:
        """Close all trackers."""
        for tracker in self._all:
            tracker.close()
