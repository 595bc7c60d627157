"""The command line of the lab: pages, progress, report, and what is refused."""

import json
import re

import pytest

from distributed_training.errors import UserError
from tools.lab import __main__ as lab
from tools.lab.catalogue import TASKS
from tools.lab.progress import Progress
from tools.lab.task import TASKS as FOLDER
from tools.lab.verdict import right, wrong


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run("start", "1") calls the program in a folder of its own; it returns (code, output)."""

    def call(*argv):
        monkeypatch.setattr("sys.argv", ["lab", *argv, "--folder", str(tmp_path / "lab")])
        code = lab.main()
        return code, capsys.readouterr().out

    return call


def test_a_lab_from_start_to_report(run, tmp_path):
    assert "0 of" in run()[1]
    assert run("start", "4")[0] == 0
    folder = tmp_path / "lab"
    page = (folder / "4" / "page.md").read_text()
    assert f"check 4 --folder {folder}" in page and str(folder / "4") in page
    file = folder / "4" / "answer.json"
    guess = {"strategy": "dp", "batch_size": 1, "accumulation": 1, "hours": 1, "price": 1}
    with pytest.raises(UserError, match="needs one of"):  # it is no attempt
        run("check", "4")
    file.write_text(json.dumps({"A": guess, "B": guess, "C": guess, "choice": "B"}))
    assert run("check", "4")[0] == 1
    assert run("start", "4")[0] == 0 and json.loads(file.read_text())["A"] == guess  # kept
    code, out = run("report")
    assert code == 0 and "| 1. Predict" in out and "global_batch" in out
    assert (folder / "report.md").read_text().strip() in out
    progress = json.loads((folder / "progress.json").read_text())
    (attempt,) = progress["tasks"]["4"]["attempts"]
    assert len(attempt["wrong"]) == 6 and progress["tasks"]["4"]["passed_at"] is None


def test_a_report_counts_attempts_until_one_passes_and_explains_names(run, tmp_path):
    assert run("start", "5")[0] == 0
    folder = tmp_path / "lab"
    progress = Progress.read(folder)
    twice = [wrong("megabytes", f"{name}: other\nbytes") for name in ("dp", "zero1")]
    for findings in (twice, twice, [right("good")], [wrong("later", "for fun")]):
        progress.add(5, findings)
    progress.write(folder)
    lines = run("report", "--name", "Ada Lovelace")[1].splitlines()
    assert lines[0] == "# Lab of Ada Lovelace" and str(folder) in lines[2]
    [row] = [line for line in lines if line.startswith("| 5. ")]
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[2:4] == ["yes", "3"] and cells[6] == "megabytes (2)"
    attempts = [line.split(": attempt ")[1] for line in lines if ": attempt " in line]
    assert attempts == [
        *("1: megabytes (2)", "2: megabytes (2)", "3: passed"),
        "4 (after the task was passed): later",
    ]
    assert "- **megabytes**: zero1: other bytes" in lines and "- **later**: for fun" in lines
    assert run("report")[1].startswith(f"# Lab of {lab.user_and_host()}\n")


def test_a_report_names_a_user_without_a_name(monkeypatch):
    def fail():
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr("getpass.getuser", fail)
    assert lab.user_and_host().startswith("unknown@")


def test_progress_of_an_earlier_version_is_read(tmp_path):
    (tmp_path / "progress.json").write_text(
        '{"schema_version": 1, "seed": 1, "tasks": {"1": {"started_at": "2026-11-29T10:00:00+00:00",'
        ' "attempts": [{"at": "2026-11-29T10:01:00+00:00", "wrong": ["a"]}], "passed_at": null}}}'
    )
    assert Progress.read(tmp_path).tasks[1].attempts[0].texts == {}


def test_the_seed_stays(run, tmp_path):
    run("start", "1")
    seed = Progress.read(tmp_path / "lab").seed
    run("start", "4")
    assert Progress.read(tmp_path / "lab").seed == seed


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["check", "1"], "has not been started"),
        (["check"], "needs the number of a task"),
        (["start", "99"], "needs the number of a task"),
        (["report"], "No task has been started"),
        (["report", "1"], "about all tasks"),
        (["wrong"], "invalid choice"),
    ],
)
def test_wrong_usage_is_refused(run, argv, said):
    with pytest.raises(UserError, match=said):
        run(*argv)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"schema_version": 2, "seed": 1, "tasks": {}}',
        '{"schema_version": 1, "seed": 1, "tasks": {"1": {}}}',
        '{"schema_version": 1, "seed": 1, "tasks": {"1": {"started_at": "x", "attempts": [], '
        '"passed_at": "y"}}}',
    ],
)
def test_damaged_progress_is_refused_and_kept(run, tmp_path, content):
    file = tmp_path / "lab" / "progress.json"
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(UserError, match=r"progress\.json"):
        run("start", "1")
    assert file.read_text() == content


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_each_task_has_a_page_that_fits_on_a_screen(task, tmp_path):
    page = task.page(tmp_path / "lab" / str(task.number))
    assert page.startswith(f"# Task {task.number}: ") and "Hand in: " in page
    assert "FOLDER" not in page and "CHECK" not in page and f"check {task.number}" in page
    assert len(page.splitlines()) <= 60
    assert not re.search(r"^.{101,}$", (FOLDER / task.name / "page.md").read_text(), re.MULTILINE)


def test_the_lab_takes_a_hundred_minutes():
    assert [task.number for task in TASKS] == sorted(task.number for task in TASKS)
    assert sum(task.minutes for task in TASKS) <= 100
