"""replay-STEP.json: a step of a run that --replay has repeated; and its text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypedDict

from distributed_training.files.atomic import read_json
from distributed_training.files.checked_types import Count, Number, has_type
from distributed_training.text_tables import text_table

NAME = re.compile(r"replay-(\d+)\.json")
MOST_ROWS, MOST_TEXTS = 10, 3  # of the tables and of the texts
MARKS = "⟦⟧"  # around the tokens with the largest losses
EXCERPT = 320  # characters of a text


class LargestLoss(TypedDict):
    """A token with one of the largest losses of its sequence."""

    position: Count  # of the token in the sequence, from 0
    start: Count  # of its characters in the text
    end: Count
    loss: Number | None  # None: not finite


class ReplayedOrigin(TypedDict):
    """Where a document is from."""

    dataset: str
    row: str | None  # None: not found


class _Layer(TypedDict):
    name: str
    gradient_norm: Number | None
    update_ratio: Number | None  # the norm of the update / that of the weights


class ReplayedLayer(_Layer, total=False):
    """What the step did to the weights of a layer."""

    weight_norm: Number | None


class ReplayedSequence(TypedDict):
    """A sequence of the step."""

    rank: Count
    micro_batch: Count
    row: Count  # in the micro-batch
    origins: list[ReplayedOrigin]  # of each of its documents
    targets: Count  # tokens with a loss
    loss: Number | None  # their mean, in nats per token, without dropout; None: not finite
    gradient_norm: Number | None  # of its part of the step's gradient
    gradient_share: Number | None  # of the sum of these norms
    text: str
    largest_losses: list[LargestLoss]


class Replayed(TypedDict):
    """The content of replay-STEP.json."""

    step: Count
    run: dict[str, object]  # strategy, world_size, device, precision of the run
    repeated: dict[str, object]  # the same of the replay, and the checkpoint that it started from
    loss: Number | None
    recorded_loss: Number | None  # in metrics.jsonl
    equal: bool | None  # whether both are equal bit for bit; None: not recorded
    lr: Number | None
    grad_norm: Number | None  # before clipping
    recorded_grad_norm: Number | None
    clip_factor: Number | None
    loss_scale: Number | None
    outcome: str
    reason: str | None
    changed_settings: list[str]  # that may change the loss: a clause about each
    sequences: list[ReplayedSequence]  # the largest share of the gradient first
    layers: list[ReplayedLayer]


def read_replays(folder: Path) -> list[Replayed]:
    """Return the replays of a run, in the order of their steps; damaged files are left out."""
    found = {}
    for path in folder.glob("replay-*.json"):
        if match := NAME.fullmatch(path.name):
            try:
                content = read_json(path)
            except (OSError, ValueError):
                continue
            if has_type(content, Replayed):
                found[int(match[1])] = content
    return [found[step] for step in sorted(found)]


def headline(replayed: Replayed) -> list[str]:
    """Return the lines about the step as a whole."""
    run, now = replayed["run"], replayed["repeated"]
    ways = [f"{way.get('strategy')} on {_ranks(way.get('world_size'))}" for way in (run, now)]
    start = now.get("checkpoint") or "the first step, without a checkpoint"
    lines = [f"Step {replayed['step']}, repeated from {start} ({ways[1]})"]
    loss, recorded = replayed["loss"], replayed["recorded_loss"]
    # Without an update of PyTorch's fused optimizer, an error ends the step before it is logged.
    unknown = "not finite" if replayed["lr"] is not None else "not known"
    text = f"Loss: {_number(loss, '.7f', unknown)}"
    if recorded is None:
        text += ", not in metrics.jsonl"
    elif replayed["equal"]:
        text += ", equal to metrics.jsonl bit for bit"
    elif loss is not None:
        text += f"; in metrics.jsonl {recorded:.7f}, a difference of {abs(loss - recorded):.1e}"
        text += f" (the run: {ways[0]}, {run.get('device')}, {run.get('precision')})"
    lines.append(text)
    norm = f"Norm of the gradient: {_number(replayed['grad_norm'], '.4g', unknown)}"
    factor = replayed["clip_factor"]
    if factor is not None and factor < 1:
        norm += f", clipped by the factor {factor:.3g}"
    norm += f"; learning rate: {_number(replayed['lr'], '.3e', unknown)}"
    if replayed["loss_scale"] is not None:
        norm += f"; loss scale: {replayed['loss_scale']:g}"
    reason = f": {replayed['reason']}" if replayed["reason"] else ""
    if replayed["changed_settings"]:
        lines.append(f"Other settings: {'; '.join(replayed['changed_settings'])}")
    return [*lines, norm, f"Outcome: {replayed['outcome']}{reason}"]


def _ranks(count: object) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _number(value: float | None, form: str, missing: str = "not finite") -> str:
    return missing if value is None else format(value, form)


SEQUENCE_HEADERS = ["share of the\ngradient", "loss", "targets", "rank", "from"]
LAYER_HEADERS = ["layer", "norm of the\ngradient", "update /\nweights"]


def sequence_rows(replayed: Replayed) -> list[list[str]]:
    """Return the rows of the table of the sequences."""
    return [
        [
            "–" if one["gradient_share"] is None else f"{one['gradient_share']:.1%}",
            _number(one["loss"], ".4f"),
            str(one["targets"]),
            str(one["rank"]),
            origin_of(one),
        ]
        for one in replayed["sequences"]
    ]


def origin_of(sequence: ReplayedSequence) -> str:
    """Return where a sequence is from; of several documents the first and the last."""
    rows = [
        origin["row"] or f"{origin['dataset']}, row not found" for origin in sequence["origins"]
    ]
    if len(rows) > 2:
        return f"{rows[0]} … {rows[-1]} ({len(rows)} documents)"
    return "; ".join(rows)


def layer_rows(replayed: Replayed) -> list[list[str]]:
    """Return the rows of the table of the layers."""
    return [
        [
            layer["name"],
            "–" if layer["gradient_norm"] is None else f"{layer['gradient_norm']:.4g}",
            _number(layer["update_ratio"], ".2e"),
        ]
        for layer in replayed["layers"]
    ]


def marked_text(sequence: ReplayedSequence) -> str:
    """Return the text around the token with the largest loss, with marks around such tokens."""
    text, marks = sequence["text"], sequence["largest_losses"]
    middle = marks[0]["start"] if marks else 0
    begin = max(0, min(middle - EXCERPT // 2, len(text) - EXCERPT))
    end = begin + EXCERPT
    for mark in sorted(marks, key=lambda one: one["start"], reverse=True):
        if begin <= mark["start"] and mark["end"] <= end:
            token = text[mark["start"] : mark["end"]]
            shown = f"{MARKS[0]}{token}{MARKS[1]}"
            text = text[: mark["start"]] + shown + text[mark["end"] :]
            end += len(shown) - len(token)
    return f"{'… ' if begin else ''}{text[begin:end]}{' …' if end < len(text) else ''}"


def console_text(replayed: Replayed) -> str:
    """Return what --replay prints."""
    parts = ["\n".join(headline(replayed))]
    if rows := sequence_rows(replayed):
        more = len(rows) - MOST_ROWS
        parts.append(text_table(rows[:MOST_ROWS], SEQUENCE_HEADERS))
        parts += [f"and {more} more sequences in the file"] if more > 0 else []
    for one in replayed["sequences"][:MOST_TEXTS]:
        losses = ", ".join(_number(mark["loss"], ".1f") for mark in one["largest_losses"])
        title = f"{origin_of(one)}; largest losses of a token: {losses}"
        parts.append(f"{title}\n{marked_text(one)}")
    if rows := layer_rows(replayed):
        parts.append(text_table(rows, LAYER_HEADERS))
    return "\n\n".join(parts)
