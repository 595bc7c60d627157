"""Reports on finished runs: scripts/compare_runs.py, which finds why two runs differ, and the page of
scripts/report.py.
"""

import html
import json
import re
import shutil
import sys
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler

import pytest
from conftest import PROJECT, finish, skip, start
from markupsafe import escape

WORK = ["--seq_length", "32", "--max_steps", "6", "--precision", "fp32", "--num_samples", "32"]
WORK += ["--eval_samples", "8", "--no_export", "--run_name"]


@pytest.fixture(scope="module")
def runs(script):
    """The same work three times: as it is, with the batch split in two, with a higher rate."""
    return {
        "plain": script(*WORK, "a"),
        "split": script(*WORK, "b", "--batch_size", "2", "--gradient_accumulation_steps", "2"),
        "rate": script(
            *(*WORK, "c", "--lr", "1e-3", "--save_every", "6", "--generate", "The"),
            env={"MY_SECRET": "the-canary-of-my-secret"},
        ),
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
    code, out, err = report(
        "compare_runs.py", runs["plain"].folder, runs["split"].folder, "--tolerance", "1e-5"
    )
    assert code == 0, out + err
    (figure,) = runs["plain"].folder.glob("difference_from_*.png")
    assert figure.stat().st_size > 10_000


def test_another_learning_rate_is_found(runs, report, tmp_path):
    """Its effect begins with the second loss. The name of a run has none."""
    figure = tmp_path / "figure.svg"
    places = [runs["plain"].folder, runs["rate"].folder / "metrics.jsonl"]
    code, out, err = report("compare_runs.py", *places, "--json", "--plot", figure)
    assert code == 1, out + err
    found = json.loads(out)["runs"][1]
    assert found["first_difference"]["last"] == 2
    first = (runs["plain"].losses[1], runs["rate"].losses[1])
    assert (found["first_difference"]["a"], found["first_difference"]["b"]) == first
    assert found["likely_causes"] == ["lr"]
    changes = {entry["name"]: entry["changes"] for entry in found["differences"]}
    assert changes["lr"] == "losses" and changes["run_name"] == "nothing"
    assert "effect not known" not in out
    assert found["compared_steps"] == 6
    assert figure.read_text().startswith("<?xml")


def test_every_entry_of_the_run_signature_has_an_effect(runs):
    from support.report.causes import EFFECTS, SIGNATURE_NAMES

    parts = runs["plain"].results["run_signature"]
    names = {SIGNATURE_NAMES.get(key, key) for part in parts.values() for key in part}
    assert "data digest" in names and not names - EFFECTS.keys()


def test_two_runs_that_cannot_be_compared(report, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    failed = {"status": "failed", "reason": "no room"}
    (tmp_path / "a" / "results.json").write_text(json.dumps(failed))
    code, _, err = report("compare_runs.py", tmp_path / "a", tmp_path / "b")
    assert code == 2 and err.startswith("❌") and len(err.splitlines()) == 1
    code, out, _ = report("compare_runs.py", tmp_path / "a", tmp_path / "a")
    assert code == 1 and "no room" in " ".join(out.split())
    assert not list((tmp_path / "a").glob("*.png"))


# -------------------------------------------------------------------------------------- report.py

MEASURE = """<pre id="out"></pre><script>onload = () => {
  document.getElementById("out").textContent = JSON.stringify(
    [...document.querySelectorAll("iframe")].map(({contentDocument, contentWindow}) => [
      contentDocument.documentElement.scrollWidth - contentDocument.documentElement.clientWidth,
      contentWindow.performance.getEntriesByType("resource").length,
      contentWindow.executed ?? false]))}</script>"""


class Server(SimpleHTTPRequestHandler):
    """Serves a folder, and records what is requested."""

    paths: list = []  # noqa: RUF012

    def log_request(self, *_):
        self.paths.append(self.path)


@pytest.fixture(scope="module")
def measure(tmp_path_factory):
    """measure(frames) shows each (page, width) in a frame in Chromium. It returns for each page the
    pixels that it is too wide, the number of its requests, and whether a script set `executed`; and
    the paths that were requested from the server of the frames.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        skip("needs a browser: apt install chromium")

    def run(frames):
        folder = tmp_path_factory.mktemp("chromium")
        frames = [
            f'<iframe srcdoc="{html.escape(page)}" style="width:{width}px; height:800px"></iframe>'
            for page, width in frames
        ]
        (folder / "frames.html").write_text(f"<!DOCTYPE html>{''.join(frames)}{MEASURE}")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += ["--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}"]
        with HTTPServer(("127.0.0.1", 0), partial(Server, directory=folder)) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_port}/frames.html"
            out, err = finish(start([*command, address]), 120)
            server.shutdown()
        found = re.search(r'<pre id="out">(.+?)</pre>', out)
        assert found, err
        return json.loads(found[1]), {*Server.paths} - {"/favicon.ico"}

    return run


def test_page_of_a_run(runs, report):
    folder = runs["rate"].folder
    code, out, err = report("report.py", folder)
    assert code == 0, out + err
    page = (folder / "report.html").read_text()
    results = runs["rate"].results
    for value in (results["versions"]["torch"], results["hardware"]["cpu"], "step-00000006"):
        assert escape(value) in page
    assert escape(results["sample"]) in page and escape(results["command"]) in page
    assert page.count("<svg") == 7
    assert runs["rate"].out.splitlines()[-1].endswith(f"scripts/report.py {folder}")


def test_pages_fit_phones_and_make_no_request(runs, report, measure, tmp_path):
    """A run that tries to execute a script, a comparison, and two pages that do what they must not."""
    hostile = shutil.copytree(runs["rate"].folder, tmp_path / "hostile")
    attack = "</title><script>executed = true</script><img src=/attack onerror='executed=true'>"
    facts = runs["rate"].results | {"model": attack, "sample": attack, "status": attack}
    (hostile / "results.json").write_text(json.dumps(facts))
    for strategy in ("dp", "zero2"):
        attempt = tmp_path / "comparison" / strategy / "1"
        shutil.copytree(runs["plain"].folder, attempt)
        (attempt / "command.txt").write_text(attack)
    pages = []
    for folder in (hostile, tmp_path / "comparison"):
        code, out, err = report("report.py", folder, "--out", tmp_path / "page.html")
        assert code == 0, out + err
        pages.append((tmp_path / "page.html").read_text())
    assert "zero2" in pages[1] and pages[1].count("<svg") == 4
    shown = re.sub("<!--.*?-->", "", pages[1])
    assert "math" not in shown  # the labels of a logarithmic axis
    wide = '<div style="width: 2000px">wide</div><script>executed = true</script>'
    frames = [(page, width) for page in pages for width in (390, 1280)]
    found, requests = measure([*frames, (wide, 390), ('<img src="/control">', 390)])
    assert found[:-2] == [[0, 0, False]] * 4
    assert found[-2][0] > 1000 and found[-2][2] and found[-1][1] == 1
    assert requests == {"/frames.html", "/control"}


def test_a_folder_without_a_run_has_no_page(report, tmp_path):
    code, _, err = report("report.py", tmp_path)
    assert code == 2 and err.startswith("❌") and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
