"""One self-contained HTML page about a run, or about a comparison of strategies.

Every text that comes from a file is escaped and without secrets, and the page's policy allows no
script and no request. So a page can be shared, whatever a run's files contain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from support.checkpoints.format import list_checkpoints, marked
from support.cli.ds_config import lookup
from support.errors import UserError
from support.redaction import redact
from support.report import plots, tables
from support.report.compare import (
    DAMAGE,
    PHASES,
    Comparison,
    read_comparison,
    read_json,
    read_json_lines,
)
from support.report.verdict import explain_traffic, verdict
from support.text_tables import Rows
from support.units import MB, human_bytes, human_rate

STYLE = """
:root { color-scheme: light dark }
body { background: Canvas; color: CanvasText; font: 1rem/1.5 system-ui, sans-serif;
  margin: 0 auto; max-width: 75rem; padding: 1rem; overflow-wrap: anywhere }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
.problem { border-left: .3rem solid #d55e00; padding: .3rem .8rem }
.facts { display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 9.5rem), 1fr)) }
.facts div { border: 1px solid #8886; border-radius: .5rem; padding: .4rem .7rem }
.facts span { display: block; font-size: .8rem; opacity: .75 }
.charts { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)) }
figure { margin: 0; overflow-x: auto } figcaption { font-weight: 600 }
svg { display: block; fill: currentColor; height: auto; width: 100% }
.wide svg { min-width: 34rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .875rem }
th, td { border-bottom: 1px solid #8886; padding: .25rem .75rem .25rem 0; text-align: left;
  vertical-align: top; white-space: nowrap } th { white-space: pre }
pre { border: 1px solid #8886; border-radius: .5rem; max-height: 25rem; overflow: auto;
  padding: .7rem; white-space: pre-wrap }
"""
# No script, no request: the page needs only its own style.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
MOST_RANKS = 16  # whose memory is drawn
PHASE_NAMES = {"libraries_imported": "libraries", "optimizer_step": "update"}


def clean(value: object) -> str:
    """Return a value of a file as text without secrets."""
    # JSON may contain halves of surrogate pairs, which have no form in UTF-8.
    return redact(str(value)).encode("utf-8", "replace").decode()


def text(value: object) -> str:
    """Return a value as HTML text, without secrets; None as a dash."""
    return "—" if value is None else escape(clean(value))


def table(rows: Rows, headers: Sequence[str]) -> str:
    """Return a table that scrolls in a box of its own."""
    head = "".join(f"<th>{text(cell)}</th>" for cell in headers)
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def pairs(mapping: dict) -> str:
    """Return a table of names and values."""
    return table([[name, value] for name, value in mapping.items()], ["", ""])


def bullets(lines: list[str]) -> str:
    """Return a list of sentences."""
    return f"<ul>{''.join(f'<li>{text(line)}</li>' for line in lines)}</ul>"


def charts(drawings: dict[str, str], wide: bool = False) -> str:
    """Return figures next to each other; a wide one scrolls in a narrow window.

    Args:
        drawings: SVG by caption.
    """
    figures = "".join(
        f"<figure><figcaption>{text(caption)}</figcaption>{drawing}</figure>"
        for caption, drawing in drawings.items()
    )
    return f'<div class="charts{" wide" * wide}">{figures}</div>' if figures else ""


def document(title: str, parts: list[str]) -> str:
    """Return the page."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def page_of(folder: Path) -> str:
    """Return the page about an output folder, or about a folder of compare_strategies.sh."""
    if any((folder / name).exists() for name in ("results.json", "metrics.jsonl")):
        return run_page(folder)
    comparison = read_comparison(folder)
    if not any(row.attempts for row in comparison.rows):
        raise UserError(
            f"{folder} holds no run: name an output folder with results.json, or the folder of a "
            "comparison, comparison_runs/NAME."
        )
    return comparison_page(comparison)


# ------------------------------------------------------------------------------------------ one run


@dataclass
class Shown:
    """A run: its folder, results.json and the records of metrics.jsonl."""

    folder: Path
    results: dict
    records: list[dict]

    def get(self, key: str):
        """Return the value at a dotted key of results.json, or None."""
        return lookup(self.results, key)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return the steps that recorded a number under a key, and the numbers."""
        points = [
            (record["step"], record[key])
            for record in self.records
            if type(record.get("step")) is int and type(record.get(key)) in (int, float)
        ]
        return [step for step, _ in points], [value for _, value in points]


def run_page(folder: Path) -> str:
    """Return the page about one run; what its files lack is left out, or named as missing."""
    results = read_json(folder / "results.json")
    run = Shown(folder, results, read_json_lines(folder / "metrics.jsonl"))
    name = folder.resolve().name
    parts = [f"<h1>{text(name)}</h1>", _status(run)]
    for title, section in SECTIONS.items():
        try:
            body = section(run)
        except DAMAGE:
            body = "<p>This part cannot be shown: results.json is damaged, or was edited.</p>"
        if body:
            parts.append(f"<section><h2>{title}</h2>\n{body}</section>")
    return document(name, parts)


def _status(run: Shown) -> str:
    """Return a paragraph on how the run ended."""
    if not run.results:
        return '<p class="problem">results.json is missing or damaged.</p>'
    status, started = run.get("status"), run.get("started_at")
    line = f"<p>{text(status)}, started {text(started)}</p>"
    if status == "completed":
        return line
    reason = run.get("reason") or (
        "It has not ended, or it was killed." if status == "running" else "The reason is not known."
    )
    return f'{line}<p class="problem">{text(reason)}</p>'


def _facts(run: Shown) -> str:
    def number(key: str, form: Callable[[float], str]) -> str | None:
        return None if run.get(key) is None else form(run.get(key))

    device = run.get("hardware.gpu") or run.get("device")
    losses = [number(f"train_loss_{end}", "{:.4f}".format) for end in ("first", "last")]
    peaks = run.get("memory.peak_bytes")
    facts = {
        "model": run.get("model"),
        "parameters": number("parameters", "{:,}".format),
        "strategy": run.get("strategy"),
        "ranks": number("world_size", lambda ranks: f"{ranks} × {device or 'unknown device'}"),
        "precision": run.get("precision"),
        "sequences per step": run.get("global_batch_size"),
        "tokens in a sequence": run.get("seq_length"),
        "steps": number("steps", "{:,}".format),
        "tokens": number("tokens", "{:,}".format),
        "training loss": " → ".join(map(str, losses)) if None not in losses else None,
        "evaluation loss": number("eval_loss", "{:.4f}".format),
        "perplexity": number("perplexity", "{:,.2f}".format),
        "tokens per second": number("tokens_per_second", "{:,.0f}".format),
        "MFU": number("mfu", "{:.1%}".format),
        "peak memory of a rank": human_bytes(max(peaks)) if peaks else None,
        "time in steps": number("training_seconds", "{:,.1f} s".format),
    }
    cells = "".join(
        f"<div><span>{name}</span>{text(value)}</div>"
        for name, value in facts.items()
        if value is not None
    )
    return f'<div class="facts">{cells}</div>'


def _curves(run: Shown) -> str:
    keys = ("loss", "eval_loss", "lr", "grad_norm", "tokens_per_second")
    loss, eval_loss, lr, norm, speed = (run.series(key) for key in keys)
    drawings = {
        "Loss (nats per token)": {"training": loss, "evaluation": eval_loss},
        "Learning rate": {"": lr},
        "Norm of the gradient before clipping": {"": norm},
        "Tokens per second": {"": speed},
    }
    drawn = {
        caption: plots.svg_of(functools.partial(plots.draw_lines, lines=lines))
        for caption, lines in drawings.items()
        if any(steps for steps, _ in lines.values())
    }
    return charts(drawn) if drawn else "<p>No step was recorded in metrics.jsonl.</p>"


def _memory(run: Shown) -> str:
    drawings = {}
    if phases := run.get("memory.phases_bytes"):
        on_gpu = run.get("device") == "cuda"
        kinds = ("device_allocated", "device_peak") if on_gpu else ("host_resident", "host_peak")
        names = [clean(PHASE_NAMES.get(name, name.replace("_", " "))) for name in phases]
        captions = ("at the end of the phase", "highest up to then")
        bars = {
            caption: [max((size or 0) / MB for size in phase[kind]) for phase in phases.values()]
            for caption, kind in zip(captions, kinds, strict=True)
        }
        caption = f"{'GPU' if on_gpu else 'Process'} memory by phase (MB, the largest rank)"
        drawings[caption] = plots.svg_of(lambda axes: plots.draw_bars(axes, names, bars))
    by_rank = [rank for rank in run.get("memory.categories_bytes_by_rank") or () if rank]
    by_rank = by_rank[:MOST_RANKS]
    if by_rank:
        parts_of_all = [kind for kind in by_rank[0] if any(rank[kind] for rank in by_rank)]
        parts = {
            redact(kind): [(rank[kind] or 0) / MB for rank in by_rank] for kind in parts_of_all
        }
        names = [f"rank {number}" for number in range(len(by_rank))]
        drawings["Memory by category at the end of backward (MB)"] = plots.svg_of(
            lambda axes: plots.draw_bars(axes, names, parts, stacked=True)
        )
    return charts(drawings)


def _time(run: Shown) -> str:
    phases = run.get("step_phases_seconds")
    if not phases:
        return ""
    bars = {"": [1000 * phases[name] for name in PHASES]}
    drawing = plots.svg_of(lambda axes: plots.draw_bars(axes, list(PHASES), bars))
    durations = (run.get("step_seconds") or {}).items()
    step = {f"{name} of a step": f"{1000 * seconds:,.1f} ms" for name, seconds in durations}
    return charts({"Mean time of each phase of a step (ms)": drawing}) + pairs(step)


def _communication(run: Shown) -> str:
    collectives = run.get("communication_per_step")
    if collectives is None:
        return ""
    if not collectives:
        return "<p>One rank sends nothing.</p>" if run.get("world_size") == 1 else ""
    rows = []
    for name, entry in collectives.items():
        sizes = [human_bytes(entry[key]) for key in ("message_bytes", "sent_bytes")]
        rows.append([name, human_rate(entry["calls"]), *sizes])
    total = human_bytes(run.get("communication_bytes_per_step"))
    headers = ["collective", "calls per step", "size", "sent by rank 0"]
    sent = f"<p>A rank sends {text(total)} in a step (mean over the ranks).</p>"
    return sent + table(rows, headers)


def _checkpoints(run: Shown) -> str:
    folder = run.folder / "checkpoints"
    marks = {marked(folder, mark): mark for mark in ("best", "latest")}
    rows = []
    for path in list_checkpoints(folder):
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        rows.append([path.name, human_bytes(size), marks.get(path.name, "")])
    exported = run.get("export.folder")
    return (table(rows, ["checkpoint", "size", ""]) if rows else "") + (
        f"<p>The trained model: {text(exported)}</p>" if exported else ""
    )


def _sample(run: Shown) -> str:
    return f"<pre>{text(run.get('sample'))}</pre>" if run.get("sample") else ""


def _data(run: Shown) -> str:
    dataset = run.get("dataset") or {}
    simple = {name: value for name, value in dataset.items() if isinstance(value, str | int)}
    return pairs(simple) if simple else ""


def _machine(run: Shown) -> str:
    hardware = {**(run.get("hardware") or {}), **(run.get("versions") or {})}
    sizes = {
        name.removesuffix("_bytes"): human_bytes(hardware.pop(name))
        for name in ("ram_bytes", "gpu_memory_bytes")
        if hardware.get(name)
    }
    shown = {name: value for name, value in hardware.items() if value is not None}
    return pairs({**sizes, **shown}) if shown else ""


def _command(run: Shown) -> str:
    command = f"<pre>{text(run.get('command'))}</pre>" if run.get("command") else ""
    flags = pairs(run.get("flags")) if run.get("flags") else ""
    return command + (f"<details><summary>All flags</summary>{flags}</details>" if flags else "")


SECTIONS: dict[str, Callable[[Shown], str]] = {
    "Results": _facts,
    "Curves": _curves,
    "Memory": _memory,
    "Time of a step": _time,
    "Communication": _communication,
    "Checkpoints and the trained model": _checkpoints,
    "Generated text": _sample,
    "Data": _data,
    "Hardware and versions": _machine,
    "Command": _command,
}


# ---------------------------------------------------------------------------- several strategies


def comparison_page(comparison: Comparison) -> str:
    """Return the page about all strategies of a comparison."""
    parts = [
        f"<h1>{text(comparison.name)}</h1><p>{text(tables.title(comparison))}</p>",
        table(*tables.first_table(comparison)),
        bullets(verdict(comparison)),
    ]
    if comparison.reference:
        charts_of = plots.charts_of(comparison).items()
        drawings = {caption: plots.svg_of(draw, (6.5, 4.2)) for caption, draw in charts_of}
        parts += ["<h2>Memory, speed and losses</h2>", charts(drawings, wide=True)]
    if comparison.trained:
        parts += ["<h2>Time of a step, and communication</h2>"]
        parts += [table(*tables.why_table(comparison)), bullets(explain_traffic(comparison))]
    commands = text("\n".join(comparison.commands))
    origin = "".join(f"<p>{text(line)}</p>" for line in tables.provenance(comparison))
    parts += ["<h2>Hardware, versions and commands</h2>", origin, f"<pre>{commands}</pre>"]
    return document(f"Comparison of strategies: {comparison.name}", parts)
