"""One self-contained HTML page about a run, or about a comparison of strategies (page.html).

Texts of files are escaped and without secrets, and the page allows no script and no request.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from distributed_training.checkpoints.format import list_checkpoints
from distributed_training.console import visible
from distributed_training.errors import UserError, redact
from distributed_training.files.json_types import JsonObject, lookup
from distributed_training.records import replayed
from distributed_training.records.compare import read_comparison
from distributed_training.records.loss_figure import why_no_figure
from distributed_training.records.metrics_file import FILE
from distributed_training.records.metrics_reader import unreadable_lines
from distributed_training.records.recorded_run import read_folder
from distributed_training.units import MB, human_bytes, human_rate
from tools.plotting import draw_bars
from tools.runs import comparison_text, outliers, plots
from tools.runs.plots import Chart

# Key of results.json, and format of the numbers at the top of a run's page.
FACTS = """
    model {} | parameters {:,} | strategy {} | world_size {} | device {} | precision {}
    | global_batch_size {} | seq_length {} | steps {:,} | tokens {:,} | train_loss_first {:.4f}
    | train_loss_last {:.4f} | eval_loss {:.4f} | perplexity {:,.2f} | bits_per_byte {:.4f}
    | tokens_per_second {:,.0f} | mfu {:.1%} | training_seconds {:,.1f}
"""
OUTLIERS = "Steps that stand out"  # heading of a section
CURVES = {
    "Loss (nats per token)": {"training": "loss", "evaluation": "eval_loss"},
    "Learning rate": {"": "lr"},
    "Norm of the gradient before clipping": {"": "grad_norm"},
    "Tokens per second": {"": "tokens_per_second"},
}


class Page(NamedTuple):
    """A page, and what a program prints when it has written it."""

    text: str  # HTML
    notices: list[str]  # what it lacks: lines that cannot be read, or the charts
    outliers: list[str]  # lines about the steps that stand out, the last one a command
    is_run: bool = True  # False: a comparison, whose runs have pages of their own


def page_of(folder: Path) -> Page:
    """Return the page about an output folder, or about a folder of compare_strategies.sh.

    Raises:
        UserError: the folder holds no run.
    """
    is_run = any((folder / name).exists() for name in ("results.json", "metrics.jsonl"))
    values = (_run if is_run else _comparison)(folder)
    if problem := why_no_figure():
        values["notices"].append(f"The page has no charts: {problem}")
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, finalize=_clean)
    text = environment.get_template("page.html").render(**values)
    marked = values["sections"].get(OUTLIERS) or {}
    lines = [*marked["lines"], marked["text"]] if marked else []
    return Page(text, values["notices"], lines, is_run)


def _clean(value: object) -> str:
    """Return a value of a file as visible text without secrets; charts are left as they are."""
    if isinstance(value, Markup):
        return value
    return visible(redact("—" if value is None else str(value)))


def _drawn(charts: Mapping[str, Chart]) -> dict[str, Markup]:
    """Return charts as SVG; none without matplotlib."""
    if why_no_figure():
        return {}
    return {name: Markup(plots.svg_of(chart, (4.6, 3.0))) for name, chart in charts.items()}


def _comparison(folder: Path) -> JsonObject:
    """Return the values of the template for a comparison."""
    comparison = read_comparison(folder)
    if all(run.status == "not run" for run in comparison.runs):
        known = "an output folder with results.json, or a comparison, comparison_runs/NAME"
        raise UserError(f"{folder} holds no run: name {known}.")
    sections = {
        "Results": {"tables": comparison_text.tables_of(comparison, wide=True)},
        "Conclusions": {"lines": comparison_text.sentences_of(comparison)},
        "Charts": {"charts": _drawn(plots.charts_of(comparison))},
        "Origin": {"lines": comparison_text.provenance(comparison)},
        "Commands": {"text": "\n".join(map(comparison_text.command_of, comparison.runs))},
    }
    subtitle = comparison_text.title(comparison)
    return {
        "title": comparison.name,
        "subtitle": subtitle,
        "sections": sections,
        "notices": [],  # the conclusions name the lines that cannot be read
    }


def _run(folder: Path) -> JsonObject:
    """Return the values of the template for a run; what its files lack is left out."""
    run = read_folder(folder)
    results, problem = run.results, run.results.get("reason")
    if not results or results.get("status") == "running":
        problem = "It has not ended, or it was killed, and results.json may be missing or damaged."
    facts = {}
    for key, text in (entry.split() for entry in FACTS.split("|")):
        if results.get(key) is not None:
            facts[key.replace("_", " ")] = text.format(results[key])
    collectives = [
        [name, human_rate(entry["calls"]), human_bytes(entry["sent_bytes"])]
        for name, entry in (results.get("communication_per_step") or {}).items()
    ]
    found = outliers.outliers_of(run.records)
    curves = _curves(run.records, found)
    no_step = [] if curves else ["metrics.jsonl has no step."]
    damage = [unreadable_lines(folder / FILE, run.unreadable)] if run.unreadable else []
    sections: dict[str, JsonObject] = {
        "Results": {"facts": facts},
        "Curves": {"charts": _drawn(curves), "lines": no_step},
        OUTLIERS: _outliers(found, results, folder),
        **{f"Replay of step {one['step']}": _replay(one) for one in replayed.read_replays(folder)},
        "Memory and time of a step": {"charts": _drawn(_charts_of_step(results))},
        "Communication": {"tables": [(collectives, ["collective", "calls", "sent bytes"])]},
        "Checkpoints": {"lines": [path.name for path in list_checkpoints(folder / "checkpoints")]},
        "Generated text": {"text": _generated(results)},
        "Command": {"text": results.get("command")},
    }
    for key in ("export", "push", "dataset", "hardware", "versions", "flags"):
        values = (results.get(key) or {}).items()
        rows = [[name, value] for name, value in values if isinstance(value, str | int | float)]
        sections[key.capitalize()] = {"tables": [(rows, ["", ""])]}
    return {
        "title": _title(results) or folder.resolve().name,
        "subtitle": f"{folder}: {results.get('status')}, started {results.get('started_at')}",
        "problem": problem,
        "sections": sections,
        "notices": damage,
    }


def _title(results: dict) -> str:
    """Return the model, strategy and ranks of a run; "" if its file does not name them.

    The name of the folder says little: in a comparison it is the number of the repeat.
    """
    if not (results.get("model") and results.get("strategy")):
        return ""
    ranks = results.get("simulated_world_size") or results.get("world_size") or 1
    simulated = ", simulated" if results.get("simulated_world_size") else ""
    title = f"{results['model']} under {results['strategy']}"
    return f"{title}, {ranks} rank{'s' * (ranks > 1)}{simulated}"


def _generated(results: dict) -> str | None:
    """Return the texts of --generate; each has its prompt before it, unless it begins with it."""
    if not (entries := results.get("generated")):
        return results.get("sample")  # of an earlier version, or None
    return "\n\n".join(
        entry["text"]
        if entry["text"].startswith(entry["prompt"])
        else f"{entry['prompt']}\n{entry['text']}"
        for entry in entries
    )


def _outliers(found: list[outliers.Outlier], results: dict, folder: Path) -> JsonObject:
    """Return the section about the steps that stand out, and how to repeat the first one."""
    if not found:
        return {}
    more = len(found) - outliers.MOST
    lines = [one.text for one in found[: outliers.MOST]]
    lines += [f"and {more} more"] if more > 0 else []
    return {"lines": lines, "text": outliers.replay_command(results, folder, found[0].step)}


def _replay(record: replayed.Replayed) -> JsonObject:
    """Return the section about a step that --replay has repeated."""
    sequences = replayed.sequence_rows(record)[: replayed.MOST_ROWS]
    layers = replayed.layer_rows(record)
    tables = [(sequences, replayed.SEQUENCE_HEADERS), (layers, replayed.LAYER_HEADERS)]
    texts = [
        f"{replayed.origin_of(one)}\n{replayed.marked_text(one)}"
        for one in record["sequences"][: replayed.MOST_TEXTS]
    ]
    return {
        "lines": replayed.headline(record),
        "tables": [table for table in tables if table[0]],
        "text": "\n\n".join(texts),
    }


def _curves(records: list[dict], found: list[outliers.Outlier]) -> dict[str, Chart]:
    curves: dict[str, Chart] = {}
    for caption, keys in CURVES.items():
        lines = {
            label: [(r["step"], r[key]) for r in records if r.get(key) is not None]
            for label, key in keys.items()
        }
        if drawn := {label: points for label, points in lines.items() if points}:
            marked = [(one.step, one.value) for one in found if one.key in keys.values()]
            curves[caption] = partial(plots.draw_lines, lines=drawn, marked=marked)
    return curves


def _charts_of_step(results: dict) -> dict[str, Chart]:
    """Return the charts of the memory of each rank and of the time of each phase."""
    bars = {}  # names and values by caption
    if ranks := list(filter(None, lookup(results, "memory.categories_bytes_by_rank") or [])):
        kinds = {kind: [(rank.get(kind) or 0) / MB for rank in ranks] for kind in ranks[0]}
        names = [f"rank {number}" for number in range(len(ranks))]
        bars["Memory by category at the end of backward (MB)"] = names, kinds
    if phases := results.get("step_phases_seconds"):
        times = {"": [1000 * seconds for seconds in phases.values()]}
        bars["Mean time of each phase of a step (ms)"] = [*phases], times
    return {
        caption: partial(draw_bars, names=names, bars=values)
        for caption, (names, values) in bars.items()
    }
