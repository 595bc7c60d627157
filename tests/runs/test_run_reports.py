"""Reports on finished runs: scripts/compare_runs.py, which finds why two runs differ, and the page of
scripts/report.py.
"""

import html
import json
import re
import shutil
import sys

import pytest
from conftest import PROJECT, finish, skip, start
from markupsafe import escape

from support.report.causes import EFFECT_OF, SIGNATURE_NAMES

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


MEASURE = """<pre id="out"></pre><script>onload = () => {
  document.getElementById("out").textContent = JSON.stringify(
    [...document.querySelectorAll("iframe")].map(({contentDocument, contentWindow}) => [
      contentDocument.documentElement.scrollWidth - contentDocument.documentElement.clientWidth,
      contentWindow.executed ?? false]))}</script>"""


def measure(frames, folder):
    """Show each (page, width) in a frame in Chromium; return for each the pixels that it is too
    wide, and whether a script set `executed`.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        skip("needs a browser: apt install chromium")
    frames = [
        f'<iframe srcdoc="{html.escape(page)}" style="width:{width}px; height:800px"></iframe>'
        for page, width in frames
    ]
    (folder / "frames.html").write_text(f"<!DOCTYPE html>{''.join(frames)}{MEASURE}")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}"]
    out, err = finish(start([*command, f"file://{folder / 'frames.html'}"]), 120)
    found = re.search(r'<pre id="out">(.+?)</pre>', out)
    assert found, err
    return json.loads(found[1])


def test_pages_fit_phones_and_execute_nothing(runs, report, tmp_path):
    """A run whose files try to execute a script, a comparison, and a page that does both wrong."""
    hostile = shutil.copytree(runs["rate"].folder, tmp_path / "hostile")
    attack = "</title><script>executed = true</script>"
    facts = runs["rate"].results | {"model": attack, "sample": attack, "status": attack}
    (hostile / "results.json").write_text(json.dumps(facts))
    for strategy in ("dp", "zero2"):
        shutil.copytree(runs["plain"].folder, tmp_path / "comparison" / strategy / "1")
    pages = []
    for folder in (hostile, tmp_path / "comparison"):
        code, out, err = report("report.py", folder, "--out", tmp_path / "page.html")
        assert code == 0, out + err
        pages.append((tmp_path / "page.html").read_text())
    assert "zero2" in pages[1] and pages[1].count("<svg") == 3
    wide = '<div style="width: 2000px">wide</div><script>executed = true</script>'
    frames = [(page, width) for page in pages for width in (390, 1280)]
    found = measure([*frames, (wide, 390)], tmp_path)
    assert found[:-1] == [[0, False]] * 4
    assert found[-1][0] > 1000 and found[-1][1]
