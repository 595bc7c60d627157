"""Task 6: the solution passes, and each wrong step, row and run is named."""

import json

import pytest
from written_runs import RESULTS, save, steps

from tools.lab.task import Place
from tools.lab.tasks.spike import rows
from tools.lab.tasks.spike.check import check
from tools.lab.verdict import passed

SEED = 7
BAD = rows.bad_line(SEED)
STEP = rows.step_of(BAD)
SAME_STEP = next(n for n in range(1, rows.ROWS + 1) if rows.step_of(n) == STEP and abs(n - BAD) > 1)
FAR = next(n for n in range(1, rows.ROWS + 1) if rows.step_of(n) == 1 and abs(n - BAD) > 1)


def without(*lines):
    """The rows without some lines."""
    kept = [row for n, row in enumerate(rows.make_rows(SEED), 1) if n not in lines]
    return rows.as_lines(kept)


@pytest.fixture
def names(tmp_path):
    """names(...) writes what is handed in, and returns the names of the findings."""

    def write(
        *, step=STEP, line=BAD, replay=True, clean=(), records=(), data=None, has_clean=True, **own
    ):
        rows.prepare(Place(tmp_path, SEED))
        (tmp_path / "answer.json").write_text(json.dumps({"step": step, "line": line}))
        save(tmp_path / "run", RESULTS, steps())
        if replay is not None:
            (tmp_path / "run" / f"replay-{STEP}.json").write_text(json.dumps({"equal": replay}))
        file = tmp_path / rows.FILE
        if data is not None:
            file = tmp_path / "clean.jsonl"
            file.write_text(data)
        flags = {"dataset": str(file)} | own.pop("flags", {})
        own |= {"skipped_steps": [*clean], "flags": flags}
        if has_clean:
            save(tmp_path / "clean", RESULTS | own, [{"step": n, "loss": 1.0} for n in records])
        findings = check(Place(tmp_path, SEED))
        assert passed(findings) is not any(finding.name for finding in findings)
        return [finding.name for finding in findings]

    return write


def test_both_solutions_pass(names):
    assert names(clean=[STEP], records=[STEP - 1, STEP + 1]) == [""] * 4
    assert names(data=without(BAD)) == [""] * 4


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"step": STEP - 1}, "step_from_0"),
        ({"step": STEP + 1}, "step_after"),
        ({"step": 3}, "another_step"),
        ({"replay": None}, "not_replayed"),
        ({"replay": False}, "replay_differs"),
        ({"line": BAD - 1}, "neighbor_line"),
        ({"line": SAME_STEP}, "row_of_same_step"),
        ({"line": FAR}, "row_of_another_step"),
        ({"line": 1000}, "no_such_line"),
        ({"has_clean": False}, "not_trained_without"),
        ({"clean": [STEP + 1]}, "skipped_another_step"),
        ({"clean": [STEP, STEP + 1]}, "skipped_too_much"),
        ({"clean": [STEP], "records": [STEP]}, "trained_on_it"),
        ({}, "trained_on_it"),
        ({"data": without(BAD, FAR)}, "removed_too_much"),
        ({"data": without(FAR)}, "trained_on_it"),
        ({"data": without(BAD) + "{}\n"}, "changed_rows"),
        ({"data": "x"}, "data_unreadable"),
        ({"data": without(BAD), "steps": 3}, "another_work"),
        ({"clean": [STEP], "records": [STEP - 1], "steps": 3}, "another_work"),
        ({"data": without(BAD), "flags": {"lr": 1e-9}}, "another_work"),
    ],
)
def test_a_mistake_is_named(names, given, name):
    assert names(**given)[-1] == name or name in names(**given)


def test_a_student_gets_a_row_that_comes_late():
    lines = {rows.bad_line(seed) for seed in range(100)}
    assert len(lines) > 30
    assert {rows.step_of(line) for line in lines} <= set(range(rows.FIRST, rows.LAST + 1))
