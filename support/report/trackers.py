"""--report_to: the numbers of metrics.jsonl for TensorBoard and for Weights & Biases."""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

from support.cli.validate import EVENT_FILES
from support.cluster.context import Run
from support.errors import UserError, explain
from support.files.atomic import open_regular, set_aside, write_text
from support.redaction import redact

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
    """Event files in a folder; a resumed run continues the curves at its checkpoint."""

    def __init__(self, folder: Path, step: int, arguments: dict):
        from torch.utils.tensorboard import SummaryWriter

        if step == 0:  # another run's, which --overwrite replaces
            for file in folder.glob(EVENT_FILES):
                file.unlink(missing_ok=True)
        # What was logged after the checkpoint is made again: TensorBoard leaves the first version
        # out.
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)
        shown = "\n".join(f"| {name} | {value} |" for name, value in sorted(arguments.items()))
        self._writer.add_text("arguments", f"| flag | value |\n| --- | --- |\n{shown}", step)

    def curves(self, step: int, values: dict[str, float]) -> None:
        """One point of each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        """A piece of text."""
        self._writer.add_text(name, text, step)

    def flush(self) -> None:
        """Write what is waiting, for a run that fails."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandB:
    """A run on wandb.ai, or under <output_dir>/wandb with WANDB_MODE=offline; a resumed run
    continues the same one.
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
        except Exception as error:  # of many kinds, all of them about the account or the network
            said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise UserError(
                f"--report_to wandb: {said}. Log in with `wandb login`, or set WANDB_MODE=offline."
            ) from error

    def curves(self, step: int, values: dict[str, float]) -> None:
        """One point of each curve."""
        self._run.log(values, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """A piece of text."""
        self._run.summary[name] = text

    def flush(self) -> None:
        """Its own process has all that was logged."""

    def close(self) -> None:
        """Send or write what is left."""
        self._run.finish()


def wandb_run_of(folder: Path, step: int) -> str:
    """The identifier of an output folder's run on wandb.ai; a new one for a new run, or if the file
    is damaged."""
    path = folder / "wandb-run.txt"
    try:
        with open_regular(path) as file:
            found = file.read(100).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        found = ""
    if step == 0 or not re.fullmatch("[0-9a-f]{8}", found):
        if os.path.lexists(path) and not path.is_file():
            set_aside(path, f"{path.name}.damaged")
        found = uuid.uuid4().hex[:8]
        write_text(path, found + "\n")
    return found


KINDS = {"tensorboard": TensorBoard, "wandb": WandB}


class Trackers:
    """All that --report_to names; on rank 0 only, elsewhere every method does nothing."""

    def __init__(self, args, run: Run, folder: Path, step: int):
        arguments = {
            name: redact(value) if isinstance(value, str) else value
            for name, value in vars(args).items()
            if isinstance(value, str | int | float | bool)
        }
        self.active = bool(args.report_to)
        self._run = run
        folders = {"tensorboard": Path(args.logging_dir or folder / "tensorboard"), "wandb": folder}
        self._all = (
            [KINDS[name](folders[name], step, arguments) for name in args.report_to]
            if run.is_main
            else []
        )
        run.flushes += [tracker.flush for tracker in self._all]

    def _curves(self, step: int, values: dict[str, float]) -> None:
        for tracker in list(self._all):
            try:
                tracker.curves(step, values)
            except Exception as error:  # a full disk, a lost network: no reason to end the training
                self._all.remove(tracker)
                self._run.warn(
                    f"--report_to {type(tracker).__name__.lower()} gets no more: {explain(error)}"
                )

    def log(self, record: dict) -> None:
        """A record of metrics.jsonl."""
        self._curves(
            record["step"],
            {name: record[key] for name, key in CURVES.items() if record.get(key) is not None},
        )

    def memory(self, step: int, held: list[int]) -> None:
        """Bytes that each rank's device holds."""
        self._curves(
            step, {f"memory_gb/rank{rank}": size / 2**30 for rank, size in enumerate(held)}
        )

    def sample(self, step: int, text: str) -> None:
        """What --generate gave."""
        for tracker in self._all:
            tracker.text(step, "sample", text)

    def close(self) -> None:
        """Everything is logged."""
        for tracker in self._all:
            tracker.close()
