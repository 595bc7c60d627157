"""Reports on finished runs: scripts/compare_runs.py, which finds why two runs differ, and the page of
scripts/report.py.
"""

import json
import shutil
import sys

import pytest
from conftest import PROJECT, finish
from markupsafe import escape

from distributed_training.records.causes import EFFECT_OF, SIGNATURE_NAMES

WORK = ["--seq_length", "32", "--max_steps", "6", "--precision", "fp32", "--num_samples", "32"]
WORK += ["--eval_samples", "8", "--no_export", "--run_name"]


@pytest.fixture(scope="module")
def runs(script):
    """The same work three times: as it is, with the batch split in two, with a higher rate."""
    return {
        "plain": script(*WORK, "a"),
        "split": script(*WORK, "b", "--batch_size", "2", "--gradient_accumulation_steps", "2"),
        "rate": script(*WORK, "c", "--lr", "1e-3", "--save_every", "6", "--generate", "The"),
    }


@pytest.fixture(scope="module")
def report(begin):
    """report(name, *args) runs a script of scripts/; returns the exit code, stdout and stderr."""

    def run(name, *args):
        process = begin([sys.executable, PROJECT / "scripts" / name, *args])
        out, err = finish(process, 60)
        assert "Traceback" not in err
        return process.returncode, out, err

    return run


def test_a_split_batch_gives_equal_losses(runs, report):
    places = [runs["plain"].folder, runs["split"].folder]
    code, out, err = report("compare_runs.py", *places, "--tolerance", "1e-5")
    assert code == 0, out + err
    (figure,) = runs["plain"].folder.glob("difference_from_*.png")
    assert figure.stat().st_size > 10_000


def test_another_learning_rate_is_found(runs, report, tmp_path):
    """Its effect begins with the second loss."""
    figure = tmp_path / "figure.svg"
    places = [runs["plain"].folder, runs["rate"].folder]
    code, out, err = report("compare_runs.py", *places, "--json", "--plot", figure)
    assert code == 1, out + err
    found = json.loads(out)["runs"][1]
    assert found["first_difference"]["last"] == 2 and found["compared_steps"] == 6
    first = (runs["plain"].losses[1], runs["rate"].losses[1])
    assert (found["first_difference"]["a"], found["first_difference"]["b"]) == first
    assert found["likely_causes"] == ["lr"]
    assert [entry["name"] for entry in found["differences"]] == ["lr"]
    assert figure.read_text().startswith("<?xml")


def test_every_entry_of_the_run_signature_is_compared(runs):
    parts = runs["plain"].results["run_signature"]
    names = {SIGNATURE_NAMES.get(key, key) for part in parts.values() for key in part}
    assert "data digest" in names and not names - EFFECT_OF.keys()


def test_runs_without_a_report(report, tmp_path):
    failed = tmp_path / "failed"
    failed.mkdir()
    (failed / "results.json").write_text(json.dumps({"status": "failed", "reason": "no room"}))
    places = [failed, tmp_path / "missing"]
    for code, _, err in (report("compare_runs.py", *places), report("report.py", places[1])):
        assert code == 2 and err.startswith("❌") and len(err.splitlines()) == 1
    code, out, _ = report("compare_runs.py", failed, failed)
    assert code == 1 and "no room" in " ".join(out.split())
    assert [path.name for path in failed.iterdir()] == ["results.json"]


# -------------------------------------------------------------------------------------- report.py


def test_page_of_a_run(runs, report):
    folder = runs["rate"].folder
    code, out, err = report("report.py", folder)
    assert code == 0, out + err
    page = (folder / "report.html").read_text()
    results = runs["rate"].results
    for value in (results["versions"]["torch"], results["hardware"]["cpu"], "step-00000006"):
        assert escape(value) in page
    assert escape(results["sample"]) in page and escape(results["command"]) in page
    assert page.count("<svg") == 6
    assert runs["rate"].out.splitlines()[-1].endswith(f"scripts/report.py {folder}")


def test_page_of_a_comparison(runs, report, tmp_path):
    for strategy in ("dp", "zero2"):
        shutil.copytree(runs["plain"].folder, tmp_path / "runs" / strategy / "1")
    code, out, err = report("report.py", tmp_path / "runs", "--out", tmp_path / "page.html")
    assert code == 0, out + err
    page = (tmp_path / "page.html").read_text()
    assert "zero2" in page and page.count("<svg") == 4
