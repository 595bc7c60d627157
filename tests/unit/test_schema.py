"""The schema of results.json and metrics.jsonl: values that follow it pass, and others do not."""

import pytest
from schema_check import problems_of_metrics, problems_of_results

from support.report import schema
from support.report.compare import PROVENANCE, SAME_WORK

VALUES = {"int": 1, "number": 0.5, "text": "a", "bool": True, "any": [None]}


def example(keys) -> dict:
    return {key.name: example_of(key.type, key) for key in keys}


def example_of(kind: str, key):
    kind = kind.removeprefix("(").removesuffix(")").removesuffix(" or null")
    if kind == "object":
        return example(key.keys)
    if kind.startswith(("list of ", "map to ")):
        inner = example_of(kind.split(" ", 2)[2], key)
        return [inner] if kind.startswith("list") else {"x": inner}
    return VALUES[kind]


@pytest.fixture
def results():
    return {**example(schema.RESULTS), "status": "completed"}


def test_an_example_of_each_type_follows_the_schema(results):
    assert [*problems_of_results(results)] == []
    for record in (schema.STEP, schema.EVALUATION):
        assert [*problems_of_metrics(example(record))] == []
    nulls = {key.name: None for key in schema.RESULTS if key.type.endswith(" or null")}
    assert [*problems_of_results({**results, **nulls})] == []


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda r: r.pop("eval_loss"), "eval_loss is missing"),
        (lambda r: r["dataset"].pop("blocks"), "dataset.blocks is missing"),
        (lambda r: r.update(stepz=1), "stepz is not in the schema"),
        (lambda r: r["memory"].update(peak=1), "memory.peak is not in the schema"),
        (lambda r: r.update(steps=1.5), "steps is 1.5, not int"),
        (lambda r: r.update(steps=True), "steps is True, not int"),
        (lambda r: r.update(model=None), "model is None, not text"),
        (lambda r: r["memory"]["peak_bytes"].append(None), "memory.peak_bytes[1] is None, not int"),
        (lambda r: r["memory"].update(device_used={}), "memory.device_used is {}, not list of "),
        (
            lambda r: r["memory"]["phases_bytes"]["x"]["host_peak"].append("1"),
            "memory.phases_bytes.x.host_peak[1] is '1', not int",
        ),
        (
            lambda r: r["communication_per_step"]["x"].pop("calls"),
            "communication_per_step.x.calls is missing",
        ),
    ],
)
def test_what_does_not_follow_the_schema_is_named(results, change, problem):
    change(results)
    [found] = problems_of_results(results)
    assert found.startswith(problem)


@pytest.mark.parametrize("status, missing", [("failed", 0), ("preempted", 6), ("completed", 6)])
def test_the_end_of_a_run_determines_its_keys(results, status, missing):
    short = {k: v for k, v in results.items() if k not in {x.name for x in schema.AFTER_TRAINING}}
    assert len([*problems_of_results({**short, "status": status})]) == missing


def test_comparisons_read_keys_of_the_schema():
    for name in {**SAME_WORK, **PROVENANCE}:
        keys = schema.RESULTS
        for part in name.split("."):
            [key] = [key for key in keys if key.name == part] if keys else [None]
            keys = key.keys if key else ()
