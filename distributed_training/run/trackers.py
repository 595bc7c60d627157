"""--report_to: the numbers of metrics.jsonl in TensorBoard and in Weights & Biases."""

import os
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from distributed_training import console
from distributed_training.errors import UserError, explain, first_line, redact_value
from distributed_training.files.atomic import DISK_ERRORS, write_text
from distributed_training.files.json_types import JsonObject
from distributed_training.records.metrics_file import FILE
from distributed_training.records.metrics_reader import kept_at, read_metrics
from distributed_training.run.prompts import GeneratedText
from distributed_training.settings.output import OutputSettings
from distributed_training.strategies.strategy import FlagValues

DEFAULT_PROJECT = "distributed-training"  # on wandb
# Name of a curve -> key of a record.
CURVES = {
    "train/loss": "loss",
    "train/lr": "lr",
    "train/grad_norm": "grad_norm",
    "eval/loss": "eval_loss",
    "train/tokens_per_second": "tokens_per_second",
    "eval/perplexity": "perplexity",
    "eval/bits_per_byte": "bits_per_byte",
}


class Tracker(NamedTuple):
    """A program that shows curves."""

    log: Callable[[int, dict[str, float]], object]  # logs one point of each curve at a step
    log_texts: Callable[[int, list[GeneratedText]], object]  # of --generate_every_eval
    close: Callable[[], object]


def tensorboard(folder: Path, step: int, arguments: dict, made: list[dict]) -> Tracker:
    """Write event files into a folder; a resumed run continues the curves at its checkpoint.

    Args:
        made: the last records of metrics.jsonl, which are logged again (see last_records).
    """
    from torch.utils.tensorboard import SummaryWriter

    # The records that are logged again hide the points of discarded steps: TensorBoard's default
    # loader ignores purge_step, but a point removes the later ones of its curve. The other loaders
    # use purge_step, if each file has one (findings/torch_purge_step_hides_nothing.sh).
    first = made[0]["step"] if made else step + 1 if step else 0
    writer = SummaryWriter(str(folder), purge_step=first)
    table = "\n".join(f"| {name} | {value} |" for name, value in sorted(arguments.items()))
    writer.add_text("arguments", f"| flag | value |\n| --- | --- |\n{table}", step)

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # a killed run loses nothing

    def log_texts(step: int, generated: list[GeneratedText]) -> None:
        for number, entry in enumerate(generated, 1):
            text = f"{entry['prompt']}\n\n{entry['text']}"
            # As a block of code, because TensorBoard renders Markdown.
            writer.add_text(f"generated/{number}", textwrap.indent(text, "    "), step)
        writer.flush()

    for record in made:
        if "generated" in record:
            log_texts(record["step"], record["generated"])
        else:
            log(record["step"], curves_of(record))
    return Tracker(log, log_texts, writer.close)


def curves_of(record: JsonObject) -> dict[str, float]:
    """Return the points of a record of metrics.jsonl, by the names of their curves."""
    return {name: record[key] for name, key in CURVES.items() if record.get(key) is not None}


def last_records(folder: Path, step: int) -> list[dict]:
    """Return the records that a resumed run keeps, from its last evaluation's step on.

    Without an evaluation they are those of the last step. So each curve has its last point here.
    """
    path = folder / FILE
    records = kept_at(read_metrics(path)[0], step) if path.is_file() else []
    evaluated = [r["step"] for r in records if "eval_loss" in r]
    first = max(evaluated or [r["step"] for r in records], default=0)
    return [r for r in records if r["step"] >= first]


def wandb(folder: Path, step: int, arguments: dict, output: OutputSettings) -> Tracker:
    """Start a run on wandb.ai, or under <output_dir>/wandb with WANDB_MODE=offline.

    A resumed run continues the one whose id is in wandb-run.txt in the output folder.

    Raises:
        UserError: wandb could not start, for example for lack of an account or a network.
    """
    import wandb

    stored = folder / "wandb-run.txt"
    resumed = step and stored.is_file()
    identifier = stored.read_text().split()[0] if resumed else uuid.uuid4().hex[:8]
    write_text(stored, f"{identifier}\n")
    try:
        run = wandb.init(
            id=identifier,
            project=output.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            name=output.run_name,
            tags=output.tags or None,
            resume="allow",
            dir=str(folder),
            config=arguments,
            settings=wandb.Settings(silent=True, console="off", login_timeout=30),
        )
    except Exception as error:  # not all of wandb's are of one class
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise
        raise UserError(
            f"--report_to wandb: {first_line(error).rstrip('.')}. "
            "Log in with `wandb login`, or set WANDB_MODE=offline."
        ) from error

    def log_texts(step: int, generated: list[GeneratedText]) -> None:
        rows = [[step, entry["prompt"], entry["text"]] for entry in generated]
        run.log({"generated": wandb.Table(["step", "prompt", "text"], rows)}, step=step)

    return Tracker(lambda step, values: run.log(values, step=step), log_texts, run.finish)


class Trackers:
    """The trackers that --report_to names, for a run from a step on (rank 0).

    One that fails, for example on a full disk, is dropped with a notice, and training continues.
    """

    def __init__(self, output: OutputSettings, flags: FlagValues, folder: Path, step: int):
        datasets = " ".join(map(str, flags["dataset"]))
        values = {**flags, "dataset": datasets, "tags": ", ".join(output.tags)}
        values["generate"] = " | ".join(output.generate)
        shown = {k: v for k, v in values.items() if isinstance(v, str | int | float | bool)}
        arguments = redact_value(shown)
        self.started: dict[str, Tracker] = {}
        events = Path(output.logging_dir or folder / "tensorboard")
        starts: dict[str, Callable[[], Tracker]] = {
            "tensorboard": lambda: tensorboard(events, step, arguments, last_records(folder, step)),
            "wandb": lambda: wandb(folder, step, arguments, output),
        }
        for name in (name for name in starts if name in output.report_to):
            try:
                self.started[name] = starts[name]()
            except OSError as error:
                console.warn(f"--report_to {name} cannot be used: {explain(error)}")

    def log(self, record: dict) -> None:
        """Log the curves or the texts of one record of metrics.jsonl."""
        step = record["step"]
        if "generated" in record:
            self._each(lambda tracker: tracker.log_texts(step, record["generated"]))
            return
        self._each(lambda tracker: tracker.log(step, curves_of(record)))

    def close(self) -> None:
        """Close all trackers."""
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self.started.items()):
            try:
                call(tracker)
            except Exception as error:  # a full disk, a lost connection
                del self.started[name]
                failed = f"--report_to {name} failed, and is not used any more"
                console.warn(f"{failed}: {explain(error)}")
