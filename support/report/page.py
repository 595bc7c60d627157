"""One self-contained HTML page about a run, or about a comparison of strategies (page.html).

Texts of files are escaped and without secrets, and the page allows no script and no request.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from support.checkpoints.format import list_checkpoints
from support.errors import UserError, redact
from support.report import comparison_text, plots
from support.report.compare import lookup, read_comparison, read_folder
from support.units import MB, human_bytes, human_rate

# Label, key of results.json, and format of the numbers at the top of a run's page.
FACTS = """
    model, model, {} | parameters, parameters, {:,} | strategy, strategy, {} | ranks, world_size, {}
    | device, device, {} | precision, precision, {} | sequences per step, global_batch_size, {}
    | tokens in a sequence, seq_length, {} | steps, steps, {:,} | tokens, tokens, {:,}
    | first loss, train_loss_first, {:.4f} | last loss, train_loss_last, {:.4f}
    | evaluation loss, eval_loss, {:.4f} | perplexity, perplexity, {:,.2f}
    | tokens per second, tokens_per_second, {:,.0f} | MFU, mfu, {:.1%}
    | seconds in steps, training_seconds, {:,.1f} | median step (s), step_seconds.median, {:.3f}
"""
CURVES = {
    "Loss (nats per token)": {"training": "loss", "evaluation": "eval_loss"},
    "Learning rate": {"": "lr"},
    "Norm of the gradient before clipping": {"": "grad_norm"},
    "Tokens per second": {"": "tokens_per_second"},
}
MOST_RANKS = 16  # whose memory is drawn


def page_of(folder: Path) -> str:
    """Return the page about an output folder, or about a folder of compare_strategies.sh.

    Raises:
        UserError: the folder holds no run.
    """
    is_run = any((folder / name).exists() for name in ("results.json", "metrics.jsonl"))
    values = (_run if is_run else _comparison)(folder)
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, finalize=_clean)
    return environment.get_template("page.html").render(**values)


def _clean(value: Any) -> Any:
    """Return a value of a file as text without secrets; charts are left as they are."""
    if isinstance(value, Markup):
        return value
    # JSON may contain halves of surrogate pairs, which have no form in UTF-8.
    return redact("—" if value is None else str(value)).encode("utf-8", "replace").decode()


def _svg(chart: plots.Chart, size: tuple[float, float] = (4.6, 2.7)) -> Markup:
    return Markup(plots.svg_of(chart, size))


def _comparison(folder: Path) -> dict[str, Any]:
    """Return the values of the template for a comparison."""
    comparison = read_comparison(folder)
    if not any(row.runs for row in comparison.rows):
        known = "an output folder with results.json, or a comparison, comparison_runs/NAME"
        raise UserError(f"{folder} holds no run: name {known}.")
    charts = plots.charts_of(comparison).items()
    commands = "\n".join(comparison_text.commands_of(comparison))
    sections = {
        "Results": {"tables": comparison_text.tables_of(comparison, wide=True)},
        "Conclusions": {"lines": comparison_text.sentences_of(comparison)},
        "Charts": {"charts": {caption: _svg(chart, (4.8, 3.6)) for caption, chart in charts}},
        "Origin": {"lines": comparison_text.provenance(comparison), "text": commands},
    }
    subtitle = comparison_text.title(comparison)
    return {"title": comparison.name, "subtitle": subtitle, "sections": sections}


def _run(folder: Path) -> dict[str, Any]:
    """Return the values of the template for a run; what its files lack is left out."""
    run = read_folder(folder)
    results, status, problem = run.results, run.results.get("status"), run.results.get("reason")
    if not results or status == "running":
        killed = "It has not ended, or it was killed."
        problem = killed if results else "results.json is missing or damaged."
    curves = {}
    for caption, keys in CURVES.items():
        lines = {
            label: [(r["step"], r[key]) for r in run.records if r.get(key) is not None]
            for label, key in keys.items()
        }
        if any(lines.values()):
            curves[caption] = _svg(partial(plots.draw_lines, lines=lines))
    collectives = [
        [name, human_rate(entry["calls"]), human_bytes(entry["sent_bytes"])]
        for name, entry in (results.get("communication_per_step") or {}).items()
    ]
    headers = ["collective", "calls", "sent bytes"]
    sections: dict[str, dict[str, Any]] = {
        "Results": {"facts": _facts(results)},
        "Curves": {"charts": curves, "lines": [] if curves else ["metrics.jsonl has no step."]},
        "Memory and time of a step": {"charts": _charts_of_step(results)},
        "Communication": {"tables": [(collectives, headers)] if collectives else []},
        "Checkpoints": {"lines": [path.name for path in list_checkpoints(folder / "checkpoints")]},
        "The trained model": _table(results, "export", "push"),
        "Generated text": {"text": results.get("sample")},
        "Data": _table(results, "dataset"),
        "Hardware and versions": _table(results, "hardware", "versions"),
        "Command": {"text": results.get("command")},
        "Flags": _table(results, "flags"),
    }
    return {
        "title": folder.resolve().name,
        "subtitle": f"{status}, started {results.get('started_at')}",
        "problem": problem,
        "sections": {name: part for name, part in sections.items() if any(part.values())},
    }


def _facts(results: dict) -> dict[str, str]:
    entries = [entry.strip().split(", ") for entry in FACTS.split("|")]
    values = [(label, lookup(results, key), form) for label, key, form in entries]
    return {label: form.format(value) for label, value, form in values if value is not None}


def _charts_of_step(results: dict) -> dict[str, Markup]:
    charts, memory = {}, results.get("memory") or {}
    if phases := memory.get("phases_bytes"):
        kind = "device_peak" if results.get("device") == "cuda" else "host_peak"
        sizes = [max((size or 0) / MB for size in phase[kind]) for phase in phases.values()]
        charts["Highest memory up to each phase (MB)"] = _bars([*phases], {"": sizes})
    ranks = [rank for rank in memory.get("categories_bytes_by_rank") or () if rank][:MOST_RANKS]
    if ranks:
        used = [kind for kind in ranks[0] if any(rank[kind] for rank in ranks)]
        parts = {_clean(kind): [(rank[kind] or 0) / MB for rank in ranks] for kind in used}
        names = [f"rank {number}" for number in range(len(ranks))]
        charts["Memory by category at the end of backward (MB)"] = _bars(names, parts)
    if phases := results.get("step_phases_seconds"):
        milliseconds = [1000 * seconds for seconds in phases.values()]
        charts["Mean time of each phase of a step (ms)"] = _bars([*phases], {"": milliseconds})
    return charts


def _bars(names: list[str], bars: dict[str, list[float]]) -> Markup:
    names = [_clean(name.replace("_", " ")) for name in names]
    return _svg(partial(plots.draw_bars, names=names, bars=bars))


def _table(results: dict, *keys: str) -> dict[str, Any]:
    values = {name: v for key in keys for name, v in (results.get(key) or {}).items()}
    simple = [[name, v] for name, v in values.items() if isinstance(v, str | int | float)]
    return {"tables": [(simple, ["", ""])] if simple else []}
