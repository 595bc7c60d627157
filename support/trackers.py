"""--report_to: the numbers of metrics.jsonl for TensorBoard and for Weights & Biases."""

from __future__ import annotations

import uuid
from pathlib import Path

from support.distributed import Run
from support.errors import MissingRequirement, UserError, explain

# Name of a curve -> key of a record in metrics.jsonl.
CURVES = {"train/loss": "loss", "train/lr": "lr", "train/grad_norm": "grad_norm", "eval/loss": "eval_loss",
          "train/tokens_per_second": "tokens_per_second", "eval/perplexity": "perplexity"}  # fmt: skip


class TensorBoard:
    """Event files in <output_dir>/tensorboard; a resumed run goes on with the curves where its checkpoint was made."""

    def __init__(self, folder: Path, step: int, arguments: dict):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingRequirement("--report_to tensorboard needs it: pip install tensorboard.") from error
        # What was logged after the checkpoint is made again: TensorBoard leaves the first version out.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        shown = "\n".join(f"| {name} | {value} |" for name, value in sorted(arguments.items()))
        self._writer.add_text("arguments", f"| flag | value |\n| --- | --- |\n{shown}", step)

    def curves(self, step: int, values: dict[str, float]) -> None:
        """One point of each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        """A piece of text."""
        self._writer.add_text(name, text, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandB:
    """A run on wandb.ai, or under <output_dir>/wandb with WANDB_MODE=offline; resuming goes on with the same one."""

    def __init__(self, folder: Path, step: int, arguments: dict):
        try:
            import wandb
        except ImportError as error:
            raise MissingRequirement("--report_to wandb needs it: pip install wandb.") from error
        name = folder / "wandb-run.txt"
        if step == 0 or not name.exists():
            name.write_text(uuid.uuid4().hex[:8] + "\n")
        try:
            self._run = wandb.init(
                project="distributed-training", id=name.read_text().strip(), resume="allow", dir=str(folder), config=arguments,
                settings=wandb.Settings(silent=True, console="off"),
            )  # fmt: skip
        except Exception as error:  # of many kinds, all of them about the account or the network
            said = explain(error)
            raise UserError(f"--report_to wandb: {said}. Log in with `wandb login`, or set WANDB_MODE=offline.") from error

    def curves(self, step: int, values: dict[str, float]) -> None:
        """One point of each curve."""
        self._run.log(values, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """A piece of text."""
        self._run.summary[name] = text

    def close(self) -> None:
        """Send or write what is left."""
        self._run.finish()


KINDS = {"tensorboard": TensorBoard, "wandb": WandB}


class Trackers:
    """All that --report_to names; on rank 0 only, elsewhere every method does nothing."""

    def __init__(self, args, run: Run, folder: Path, step: int):
        arguments = {name: value for name, value in vars(args).items() if isinstance(value, str | int | float | bool)}
        self.active = bool(args.report_to)
        self._all = [KINDS[name](folder, step, arguments) for name in args.report_to] if run.is_main else []

    def log(self, record: dict) -> None:
        """A record of metrics.jsonl."""
        values = {name: record[key] for name, key in CURVES.items() if record.get(key) is not None}
        for tracker in self._all:
            tracker.curves(record["step"], values)

    def memory(self, step: int, held: list[int]) -> None:
        """Bytes that each rank's device holds."""
        for tracker in self._all:
            tracker.curves(step, {f"memory_gb/rank{rank}": size / 2**30 for rank, size in enumerate(held)})

    def sample(self, step: int, text: str) -> None:
        """What --generate gave."""
        for tracker in self._all:
            tracker.text(step, "sample", text)

    def close(self) -> None:
        """Everything is logged."""
        for tracker in self._all:
            tracker.close()
