"""replay-STEP.json of a repeated step: next to what the run recorded, with its rows and texts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from distributed_training import console
from distributed_training.data.opening import Datasets
from distributed_training.data.sequences import Sequences
from distributed_training.errors import UserError, redact_value
from distributed_training.files import atomic
from distributed_training.records.metrics_file import FILE
from distributed_training.records.metrics_reader import read_metrics
from distributed_training.records.replayed import (
    LargestLoss,
    Replayed,
    ReplayedOrigin,
    ReplayedSequence,
    console_text,
)
from distributed_training.settings.data import DataSettings
from tools.replay.origins import origins_in_stream, origins_of
from tools.replay.repeat import Repeated
from tools.replay.run_settings import RunSettings
from tools.replay.sequences import TokenLosses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKED = 5  # tokens of a sequence with the largest losses
WAY = ("strategy", "world_size", "device", "precision")  # keys of results.json


def write_record(replayed: Replayed, folder: Path) -> None:
    """Write replay-STEP.json to the output folder of the run, and print its content.

    Raises:
        UserError: the file cannot be written.
    """
    path = folder / f"replay-{replayed['step']}.json"
    content = atomic.only_finite(redact_value(replayed))
    try:
        atomic.write_text(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error
    console.print0(f"{console.RULE}\n{console_text(content)}\n\n📁 {path}")


def record_of(
    repeated: Repeated,
    sequences: list[ReplayedSequence],
    now: dict,
    changed_settings: list[str],
    recorded: RunSettings,
    max_grad_norm: float,
) -> Replayed:
    """Return the content of replay-STEP.json.

    Args:
        now: strategy, ranks, device, precision and checkpoint of the replay.
        recorded: the settings of the run at the step.
    """
    earlier = recorded_step(repeated.step, recorded.folder / FILE)
    numbers = repeated.numbers
    loss = numbers.loss if numbers else None
    norm = numbers.grad_norm if numbers else None
    if norm is not None and norm < 0:  # DeepSpeed's norm of a gradient that overflowed in fp16
        norm = None
    factor = None
    if max_grad_norm and norm is not None and math.isfinite(norm):
        factor = min(1.0, max_grad_norm / (norm + 1e-6))
    if not changed_settings and numbers and earlier.get("lr") not in (None, numbers.lr):
        # An earlier version resumed the run, and did not record the settings before.
        changed_settings = [f"lr of the step {earlier['lr']:.3e} in that run, {numbers.lr:.3e} now"]
    return Replayed(
        step=repeated.step,
        run={key: recorded.way.get(key) for key in WAY},
        repeated=now,
        loss=loss,
        recorded_loss=earlier.get("loss"),
        equal=None if earlier.get("loss") is None else loss == earlier["loss"],
        lr=numbers.lr if numbers else None,
        grad_norm=norm,
        recorded_grad_norm=earlier.get("grad_norm"),
        clip_factor=factor,
        loss_scale=repeated.loss_scale,
        outcome=repeated.outcome,
        reason=repeated.reason,
        changed_settings=changed_settings,
        sequences=sequences,
        layers=[{**layer} for layer in repeated.layers],
    )


def recorded_step(step: int, file: Path) -> dict:
    """Return the record of a step in metrics.jsonl; {} if there is none."""
    if not file.is_file():
        return {}
    records, _ = read_metrics(file)
    return next((one for one in records if one["step"] == step and "loss" in one), {})


def sequences_of(
    repeated: Repeated, datasets: Datasets, data: DataSettings, tokenizer: PreTrainedTokenizerBase
) -> list[ReplayedSequence]:
    """Return the sequences of the step, the largest share of the gradient first."""
    places = [*repeated.tokens]
    described = [described_tokens(repeated.tokens[place], tokenizer) for place in places]
    if isinstance(datasets.train, Sequences):
        numbers = [repeated.numbers_of[place] for place in places]
        origins = origins_of(numbers, datasets.train, data, datasets.facts, tokenizer)
    else:
        texts, rows = [text for text, _ in described], datasets.train.rows_until_now()
        origins = origins_in_stream(texts, rows, data.dataset_name, tokenizer.eos_token)
    targets = {place: len(repeated.tokens[place].known) for place in places}
    whole = sum(targets.values())
    # The loss of the step is a mean over all its tokens.
    norms = {place: norm * targets[place] / whole for place, norm in repeated.norms.items()}
    total = sum(norms.values())
    found = [
        ReplayedSequence(
            rank=place.rank,
            micro_batch=place.micro_batch,
            row=place.row,
            origins=[ReplayedOrigin(dataset=one.dataset, row=one.row) for one in own],
            targets=targets[place],
            loss=math.fsum(repeated.tokens[place].known) / targets[place],
            gradient_norm=norms.get(place),
            gradient_share=norms[place] / total if total and place in norms else None,
            text=text,
            largest_losses=marks,
        )
        for place, own, (text, marks) in zip(places, origins, described, strict=True)
    ]

    def weight(one: ReplayedSequence) -> tuple[float, float]:
        loss = one["loss"]  # one that is not finite comes first
        return (
            one["gradient_share"] or 0.0,
            loss if loss is not None and math.isfinite(loss) else math.inf,
        )

    return sorted(found, key=weight, reverse=True)


def described_tokens(
    tokens: TokenLosses, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[LargestLoss]]:
    """Return the text of a sequence, and its tokens with the largest losses."""
    finite = {
        n: loss if math.isfinite(loss) else math.inf  # a loss that is not finite comes first
        for n, loss in enumerate(tokens.losses)
        if loss is not None
    }
    by_loss = sorted(finite, key=lambda n: -finite[n])

    text = tokenizer.decode(tokens.ids)

    def length(count: int) -> int:
        """Return the whole characters of the first tokens; a character may have several."""
        return min(len(text) - 1, len(tokenizer.decode(tokens.ids[:count]).rstrip("\ufffd")))

    marks = []
    for n in by_loss[:MARKED]:
        start = length(n)
        end = max(start + 1, length(n + 1))
        marks.append(LargestLoss(position=n, start=start, end=end, loss=finite[n]))
    return text, marks
