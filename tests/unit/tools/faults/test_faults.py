"""The fault museum: its catalogue and patches, its verdicts, and the page made of its results."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from distributed_training import PROJECT
from distributed_training.errors import TrainingError, UserError
from distributed_training.files.atomic import read_json
from tools.faults import deepspeed_release, page, run
from tools.faults.bench import apply_patch, copy_project
from tools.faults.catalogue import FAULTS, by_group
from tools.faults.checks import LONG, verdict_of_comparison
from tools.faults.deepspeed_release import DEEPSPEED_RELEASE
from tools.faults.fault import GROUPS, PATCHES, Finding
from tools.faults.run import Outcome, Results

NAMES = [fault.name for fault in FAULTS]
LINES = 12  # that a patch adds and removes, at most


def changed(text: str) -> list[str]:
    """The lines that a patch adds and removes."""
    return re.findall(r"^[+-](?![+-]{2} ).*$", text, re.MULTILINE)


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_a_fault_is_a_small_patch_of_the_present_code(fault):
    apply_patch(fault.patch, PROJECT, "--check")
    lines = changed(fault.patch.read_text("utf-8"))
    assert 0 < len(lines) <= LINES
    assert fault.title.endswith(".")


def test_the_patched_code_compiles(tmp_path):
    clean = copy_project(tmp_path / "clean")
    for fault in FAULTS:
        apply_patch(fault.patch, clean)
        for name in re.findall(
            r"^\+\+\+ b/(.+\.py)$", fault.patch.read_text("utf-8"), re.MULTILINE
        ):
            compile((clean / name).read_text("utf-8"), name, "exec")
        apply_patch(fault.patch, clean, "--reverse")


def test_a_patch_that_does_not_fit_is_an_error(tmp_path):
    patch = tmp_path / "old.patch"
    patch.write_text("--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-no such line\n+another\n")
    with pytest.raises(UserError, match=r"old\.patch does not apply"):
        apply_patch(patch, PROJECT, "--check")


def test_names_are_unique_and_each_patch_has_a_fault():
    assert len(set(NAMES)) == len(NAMES)
    assert {path.stem for path in PATCHES.glob("*")} == {*NAMES, DEEPSPEED_RELEASE.name}
    apply_patch(DEEPSPEED_RELEASE.patch, PROJECT, "--check")


@pytest.mark.parametrize("group", GROUPS)
def test_each_group_has_enough_faults(group):
    assert len(by_group()[group]) >= GROUPS[group]


def test_each_fault_is_in_a_group_of_the_page():
    assert sum(map(len, by_group().values())) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_each_fault_has_a_public_report(fault):
    assert fault.reports
    for report in fault.reports:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", report.repository) and report.number > 0
        assert len(report.says.split()) <= 15 and not report.says.endswith(".")


COMPARED = """
✅ Equal losses: the losses of B agree with those of A in 10 steps. The largest
   relative difference is 1.2e-07 (B, step 10); tolerance 0.0001.

"""
DIFFERENT = """
❌ B: the losses differ from those of A from step 3 (6.1063 and 6.1124). The gradient
   norms differ from step 2 (1.8025 and 1.8439). Likely cause: lr.

"""


def test_the_exit_code_of_the_comparison_is_the_verdict():
    assert not verdict_of_comparison(0, COMPARED).caught
    found = verdict_of_comparison(1, DIFFERENT)
    assert found.caught and found.step == 2 and found.evidence.startswith("❌ B: the losses")
    for code, output in ((2, DIFFERENT), (1, COMPARED), (1, "Traceback")):
        with pytest.raises(TrainingError):
            verdict_of_comparison(code, output)


def outcome(name: str, *caught: bool, problem: str = "") -> Outcome:
    """What the checks of a job found; each check is a number."""
    findings = {number: Finding(each, "a check") for number, each in enumerate(caught)}
    return Outcome(name, findings, problem=problem)


def test_a_missed_fault_and_an_alarm_are_named():
    first, second, third = FAULTS[:3]
    results = Results([first, second, third])
    results.with_fault[first.name] = outcome(first.name, True)
    results.with_fault[second.name] = outcome(second.name, False)
    results.with_fault[third.name] = outcome(third.name, problem="a run failed")
    results.without = {
        1: outcome("one", False),
        2: outcome("two", True),
        3: outcome("three", problem="x"),
    }
    assert results.missed == [second.name, third.name]
    assert results.alarms == ["two", "three"]
    assert results.alarms_of(0) == 2  # a check that could not be run is not silent


def test_a_check_or_a_curve_that_cannot_run_is_a_problem_of_its_fault(tmp_path, monkeypatch):
    """The others go on."""

    def lacks_a_number(_):
        raise KeyError("eval_loss")

    def does_not_apply(patch):
        if patch.stem == names[0]:
            raise UserError("It does not apply.")
        return tmp_path / patch.stem / "project"

    def finds(_):
        return Finding(True, "a check", 2)

    plain = [replace(fault, check=finds, also=(), curve=None) for fault in FAULTS[:4]]
    names = [fault.name for fault in plain]
    planted = [plain[0], replace(plain[1], check=lacks_a_number)]
    planted += [replace(plain[2], curve=LONG), replace(plain[3], also=(lambda _: finds(_),))]
    text = "a few words " * 100
    workshop = SimpleNamespace(folder=tmp_path, clean=tmp_path, text=text, plant=does_not_apply)
    monkeypatch.setattr(run.Bench, "train", lambda *_: tmp_path)  # has no metrics.jsonl
    results = run.run_all(planted, 0, workshop)
    problems = [results.with_fault[name].problem for name in names]
    assert problems[:2] == ["not judged: It does not apply.", "not judged: KeyError: 'eval_loss'"]
    assert problems[2].startswith("not judged: FileNotFoundError: ") and not problems[3]
    assert results.missed == names[:3] and run.as_table(results).count("❌ not judged") == 3


def test_an_error_of_the_museum_itself_is_raised():
    with pytest.raises(AttributeError), run.judging(Outcome("a fault")):
        _ = None.text


def test_all_checks_of_a_fault_must_catch_it():
    planted = replace(FAULTS[0], check=0, also=(1,))
    results = Results([planted], {planted.name: outcome(planted.name, True, False)})
    assert results.missed == [planted.name] and "❌ missed" in run.as_table(results)
    results.without = {1: outcome("one", False, True), 2: outcome("two", False, False)}
    assert results.alarms_of(*planted.checks) == 1 and results.alarms_of(0) == 0
    results.with_fault[planted.name] = outcome(planted.name, True, True)
    found = run.as_json(results)["faults"][planted.name]
    assert not results.missed and found["alarms"] == 1 and found["also"][0]["by"] == "a check"


@pytest.mark.parametrize("caught_with", [[], ["0.18.2", "0.19.8"], ["0.19.8"]])
def test_the_check_must_show_the_fault_of_one_release_only(tmp_path, monkeypatch, caught_with):
    wrong = deepspeed_release.Release("0.18.2", tmp_path)
    installed = deepspeed_release.Release("0.19.8", None)
    workshop = SimpleNamespace(folder=tmp_path, text="a few words " * 100)

    def show(names):
        check = SimpleNamespace(
            patch=None, check=lambda bench: Finding(bench.release.name in names, "a check")
        )
        monkeypatch.setattr(deepspeed_release, "DEEPSPEED_RELEASE", check)
        workshop.plant = lambda _: tmp_path / f"copy of {names}" / "project"
        return deepspeed_release.check_without_refusal(wrong, installed, workshop, 0)

    assert show(["0.18.2"])["by"] == "a check"
    with pytest.raises(TrainingError, match="Without the refusal, DeepSpeed"):
        show(caught_with)


def test_the_page_shows_all_checks_of_a_fault():
    [planted] = [fault for fault in FAULTS if fault.also]
    found = {"step": 1, "evidence": "first line"}
    text = "\n".join(page.section(planted, found | {"also": [{"evidence": "second line"}]}))
    assert re.search(r"first line\n.*Also shown by `\S+ \S+ --prove`.*second line", text, re.DOTALL)


def test_without_a_network_the_page_says_so(tmp_path, monkeypatch):
    published = read_json(page.RESULTS)["release"]
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(page, "write_page", lambda: None)
    offline = {"release": {"skipped": "no network"}}
    for kept in (None, {}, {"release": {}}, {"release": offline["release"]}):
        if kept is not None:
            page.RESULTS.write_text(json.dumps(kept))
        page.write(dict(offline))
        written = read_json(page.RESULTS)["release"]
        assert written == offline["release"]
        assert "pip could not download" in " ".join(page.section_of_release(written))
    page.RESULTS.write_text(json.dumps({"release": published}))
    page.write(dict(offline))
    written = read_json(page.RESULTS)["release"]
    assert written == published | offline["release"]
    said = " ".join(page.section_of_release(written))
    assert "of an earlier run" in said and published["refusal"][:40] in said
    assert "earlier run" not in " ".join(page.section_of_release(published))


def test_the_page_is_what_the_results_and_the_catalogue_generate():
    results = read_json(page.RESULTS)
    assert page.PAGE.read_text("utf-8") == page.page(results), "stale: python -m tools.faults.page"
    assert list(results["faults"]) == NAMES, "stale: make faults"


def test_the_published_results_have_all_faults_and_no_alarm():
    results = read_json(page.RESULTS)
    assert results["clean_runs"] >= 20 and results["seconds"] <= 15 * 60
    assert all(found["alarms"] == 0 and found["evidence"] for found in results["faults"].values())
    assert results["release"]["evidence"]
    assert sum("curves" in found for found in results["faults"].values()) == 4


def test_wrong_usage_is_one_line():
    for words, says in (
        ("no_such", "--list prints the names"),
        ("mean_of_means --write", "--write"),
    ):
        command = [sys.executable, "-m", "tools.faults", *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, timeout=60)
        assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1
