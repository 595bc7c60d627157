"""scripts/report.py: what is in a run's files never becomes a script or a request of the page."""

import json
import re

import pytest

from support.report.page import page_of

HOSTILE = "</title></pre><script>alert(1)</script><img src=//x.y onerror=alert(2)>'\"$\\q$"
RESULTS = {
    **{"status": "completed", "model": "m", "strategy": "dp", "world_size": 2, "device": "cpu"},
    **{"parameters": 10, "steps": 2, "train_loss_first": 8.0, "train_loss_last": 7.0},
    **{"sample": "once", "command": "python x", "started_at": "2026-01-01", "reason": "why"},
    "communication_per_step": {
        "all_reduce float32": {"calls": 1, "message_bytes": 4, "sent_bytes": 8}
    },
    "step_phases_seconds": {"data": 1.0, "forward": 1.0, "backward": 1.0, "update": 1.0},
    "memory": {"categories_bytes_by_rank": [{"parameters": 1}, {"parameters": 2}]},
    **{"dataset": {"name": "d"}, "versions": {"torch": "2"}, "hardware": {"cpu": "c"}},
    **{"flags": {"lr": 1e-3, "note": "n"}, "export": {"folder": "f"}},
}
RECORDS = [
    {"step": 1, "loss": 8.0, "lr": 1e-3},
    {"step": 2, "loss": 7.0},
    {"step": 2, "eval_loss": 7.1},
]


def with_text(value, text):
    """A JSON value with `text` after every text."""
    if isinstance(value, dict):
        return {key: with_text(item, text) for key, item in value.items()}
    return value + text if isinstance(value, str) else value


@pytest.fixture
def run(tmp_path):
    def write(results=RESULTS, records=RECORDS, name="run"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps(results))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return folder

    return write


def test_everything_is_shown(run):
    page = page_of(run())
    shown = ("Memory", "time of a step", "Communication", "Generated text", "all_reduce float32")
    for word in (*shown, "once", "python x", "8.0000", "7.0000"):
        assert word in page
    assert page.count("<svg") == 4


def test_text_of_files_is_escaped(run):
    page = page_of(run(with_text(RESULTS, HOSTILE), name="<script>alert(3)<"))
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 10
    assert not re.search("<(script|img|link|iframe|object|a|base|form)[ >]", page)


def test_secrets_are_replaced(run, monkeypatch):
    monkeypatch.setenv("MY_KEY", "the-canary-of-my-key")
    page = page_of(run(with_text(RESULTS, " https://me:the-canary-of-my-key@host/ ")))
    assert "canary" not in page and "***" in page


@pytest.mark.parametrize("missing", ["results.json", "metrics.jsonl"])
def test_missing_and_truncated_files(run, missing):
    folder = run()
    (folder / missing).write_bytes((folder / missing).read_bytes()[:20])
    assert missing in page_of(folder)
    (folder / missing).unlink()
    assert missing in page_of(folder)


def test_a_run_that_failed_says_why(run):
    page = page_of(run({"status": "oom", "reason": "no memory left"}, []))
    assert "no memory left" in page and "metrics.jsonl has no step" in page
