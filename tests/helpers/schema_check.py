"""Comparison of results.json and metrics.jsonl with support/report/schema.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from support.report import schema
from support.report.schema import Key

SIMPLE: dict[str, Any] = {
    "int": int,
    "number": (int, float),
    "text": str,
    "bool": bool,
    "any": object,
}


BEFORE_END = schema.AT_START + schema.BEFORE_END
REQUIRED = {"completed": BEFORE_END + schema.AT_END, "preempted": BEFORE_END}


def problems_of_results(results: dict) -> Iterator[str]:
    """Yield what in results.json does not agree with the schema, given how the run ended."""
    required = REQUIRED.get(str(results.get("status")), schema.AT_START)
    yield from (f"{key.name} is missing" for key in required if key.name not in results)
    yield from _problems(results, (replace(key, optional=True) for key in schema.RESULTS), "")


def problems_of_metrics(record: dict) -> Iterator[str]:
    """Yield what in a line of metrics.jsonl does not agree with the schema."""
    yield from _problems(record, schema.EVALUATION if "eval_loss" in record else schema.STEP, "")


def _problems(value: dict, keys: Iterable[Key], where: str) -> Iterator[str]:
    by_name = {key.name: key for key in keys}
    for key in by_name.values():
        if not key.optional and key.name not in value:
            yield f"{where}{key.name} is missing"
    for name, inner in value.items():
        if name not in by_name:
            yield f"{where}{name} is not in the schema"
        else:
            yield from _type_problems(inner, by_name[name].type, by_name[name], f"{where}{name}")


def _type_problems(value, kind: str, key: Key, where: str) -> Iterator[str]:
    kind, nullable = (kind[:-8], True) if kind.endswith(" or null") else (kind, False)
    inner = kind.split(" ", 2)[-1].removeprefix("(").removesuffix(")")
    if value is None and nullable:
        return
    if kind == "object" and isinstance(value, dict):
        yield from _problems(value, key.keys, f"{where}.")
    elif kind.startswith("map to ") and isinstance(value, dict):
        for name, item in value.items():
            yield from _type_problems(item, inner, key, f"{where}.{name}")
    elif kind.startswith("list of ") and isinstance(value, list):
        for number, item in enumerate(value):
            yield from _type_problems(item, inner, key, f"{where}[{number}]")
    elif not isinstance(value, SIMPLE.get(kind, ())) or (
        kind in ("int", "number") and value is True
    ):
        yield f"{where} is {value!r}, not {kind}"
