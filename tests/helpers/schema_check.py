"""Comparison of results.json and metrics.jsonl with the tables of docs/OUTPUTS.md.

A row is `key`, "type, unit", meaning. A type is int, number, text, bool, any, object, "list of …",
"map to …", or "TYPE or null". "Keys: `a` (…), `b`." in a meaning names the keys of an object.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "OUTPUTS.md"
ROW = re.compile(r"^\| `(\w+)` \| ([^|]+?) \| (.+) \|$", re.M)
BY_STATUS = {  # the tables that a file must have
    "completed": ["In every", "Once model", "completed or", "run completed:"],
    "preempted": ["In every", "Once model", "completed or"],
    "preempted before the first step": ["In every"],
}
SIMPLE: dict[str, Any] = {"int": int, "number": (int, float), "text": str, "bool": bool}
SIMPLE |= {"object": dict, "map": dict, "list": list, "any": object}


@functools.cache
def tables() -> dict[str, dict[str, tuple[str, set[str]]]]:
    """{introduction of a table: {key: (type, keys of its objects)}}."""
    found = {}
    text = PAGE.read_text().partition("\n## results.json\n")[2]
    for part in re.split(r"\n\n(?=[^|\n]+:\n\n\| key)", text):
        found[part.strip().partition("\n")[0]] = {
            name: (kind, set(re.findall(r"`(\w+)`(?= \(|,|$)", meaning.partition("Keys: ")[2])))
            for name, kind, meaning in ROW.findall(part)
        }
    return found


def table(*starts: str) -> dict[str, tuple[str, set[str]]]:
    """The keys of all tables whose introduction contains one of the texts."""
    return {
        key: entry
        for introduction, keys in tables().items()
        if any(start in introduction for start in starts)
        for key, entry in keys.items()
    }


def problems_of_results(results: dict) -> Iterator[str]:
    """Yield what in results.json does not agree with the page, given how the run ended."""
    status = str(results.get("status"))
    if status == "preempted" and "steps" not in results:
        status += " before the first step"
    required = table(*BY_STATUS.get(status, ["In every"]))
    yield from (f"{key} is missing" for key in required if key not in results)
    known = table("In every", "Once", "If the run")
    yield from problems_of(results, known, "")
    for name in ("memory", "dataset"):
        if isinstance(results.get(name), dict):
            yield from problems_of(results[name], table(f"of `{name}`"), f"{name}.")


def problems_of_metrics(record: dict) -> Iterator[str]:
    """Yield what in a line of metrics.jsonl does not agree with the page."""
    kinds = {
        "eval_loss": "Of an evaluation",
        "generated": "Of the texts",
        "rank_sequences": "Of the first choice",
    }
    keys = table(next((kinds[key] for key in kinds if key in record), "Of a step"))
    yield from (f"{key} is missing" for key in keys if key not in record)
    yield from problems_of(record, keys, "")


def problems_of(value: dict, keys: dict[str, tuple[str, set[str]]], where: str) -> Iterator[str]:
    for name, item in value.items():
        if name not in keys:
            yield f"{where}{name} is not in {PAGE.name}"
            continue
        kind, inner = keys[name]
        kind = kind.partition(",")[0]
        if item is None and kind.endswith(" or null"):
            continue
        first = kind.split()[0]
        if not isinstance(item, SIMPLE[first]) or (first in ("int", "number") and item is True):
            yield f"{where}{name} is {item!r}, not {kind}"
        for entry in objects_of(item, kind) if inner else ():
            if extra := entry.keys() ^ inner:
                yield f"{where}{name} has other keys than the page: {sorted(extra)}"


def objects_of(value: Any, kind: str) -> Iterator[dict]:
    """The objects in a value of a type such as "list of (map to object or null)"."""
    if isinstance(value, list):
        for item in value:
            yield from objects_of(item, kind.partition("of ")[2])
    elif isinstance(value, dict) and "map to" in kind:
        for item in value.values():
            yield from objects_of(item, kind.partition("map to ")[2])
    elif isinstance(value, dict):
        yield value
