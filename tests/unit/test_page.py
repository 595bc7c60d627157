"""scripts/report.py: what is in a run's files never becomes a script or a request of the page."""

import json
from html.parser import HTMLParser

import pytest

from support.errors import UserError
from support.report.page import page_of

HOSTILE = (
    "</title></style></pre><script>alert(1)</script><img src=//x.y onerror=alert(2)>'\"\ud800$\\q$"
)
RESULTS = {
    **{"status": "completed", "model": "m", "strategy": "dp", "world_size": 2, "device": "cpu"},
    **{"parameters": 10, "steps": 2, "train_loss_first": 8.0, "train_loss_last": 7.0},
    **{"sample": "once", "command": "python x", "started_at": "2026-01-01", "reason": "why"},
    "communication_bytes_per_step": 8,
    "communication_per_step": {
        "all_reduce float32": {"calls": 1, "message_bytes": 4, "sent_bytes": 8}
    },
    "step_seconds": {"median": 1.0},
    "step_phases_seconds": {"data": 1.0, "forward": 1.0, "backward": 1.0, "update": 1.0},
    "memory": {
        "peak_bytes": [1, 2],
        "categories_bytes_by_rank": [{"parameters": 1}, {"parameters": 2}],
        "phases_bytes": {"wrapped": {"host_resident": [1, 2], "host_peak": [3, 4]}},
    },
    **{"dataset": {"name": "d"}, "versions": {"torch": "2"}, "hardware": {"cpu": "c"}},
    **{"flags": {"lr": 1e-3}, "export": {"folder": "f"}},
}
RECORDS = [
    {"step": 1, "loss": 8.0, "lr": 1e-3},
    {"step": 2, "loss": 7.0},
    {"step": 2, "eval_loss": 7.1},
]


def replaced(value, by):
    """A JSON value with `by` in place of, or around, every text and key that is not ours."""
    if isinstance(value, dict):
        ours = {"host_resident", "host_peak", "calls", "message_bytes", "sent_bytes", *RESULTS}
        ours |= {"data", "forward", "backward", "update", *RESULTS["memory"], "name"}
        return {
            (key if key in ours else key + by): replaced(item, by) for key, item in value.items()
        }
    if isinstance(value, list):
        return [replaced(item, by) for item in value]
    return value + by if isinstance(value, str) else value


@pytest.fixture
def run(tmp_path):
    def write(results=RESULTS, records=RECORDS, name="run"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps(results))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return folder

    return write


class Page(HTMLParser):
    """The tags, the attributes and the text of a page; tags that need no end are not checked."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = set(), [], "", []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def assert_harmless(page):
    parsed = Page(page)
    assert not parsed.open
    assert not parsed.tags & {"script", "img", "link", "iframe", "object", "a", "base", "form"}
    for name, value in parsed.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "href", "xlink:href") or value.startswith("#")
        assert name != "style" or "url(" not in value.replace("url(#", "")
    assert "@import" not in page and "url(h" not in page
    return parsed


def test_everything_is_shown(run):
    parsed = assert_harmless(page_of(run()))
    shown = ("Memory", "time of a step", "Communication", "Generated text", "all_reduce float32")
    for word in (*shown, "once", "python x", "8.0000", "7.0000"):
        assert word in parsed.text
    assert page_of(run(name="again")).count("<svg") == 5
    assert "cannot be shown" not in parsed.text


def test_text_of_files_is_escaped(run):
    page = page_of(run(replaced(RESULTS, HOSTILE) | {"device": "cpu"}, name="<script>alert(3)<"))
    parsed = assert_harmless(page)
    assert parsed.text.count("<script>alert(1)</script>") >= 14
    assert "cannot be shown" not in page, page
    page.encode()


def test_secrets_are_replaced(run, monkeypatch):
    monkeypatch.setenv("MY_KEY", "the-canary-of-my-key")
    page = page_of(run(replaced(RESULTS, " https://me:the-canary-of-my-key@host/ ")))
    assert "canary" not in page and "***" in page


@pytest.mark.parametrize("missing", ["results.json", "metrics.jsonl"])
def test_missing_and_truncated_files(run, missing):
    folder = run()
    (folder / missing).write_bytes((folder / missing).read_bytes()[:20])
    truncated = page_of(folder)
    (folder / missing).unlink()
    for page in (truncated, page_of(folder)):
        assert_harmless(page)
        assert missing in page


def test_a_run_that_failed_says_why(run):
    page = page_of(run({"status": "oom", "reason": "no memory left"}, []))
    assert "no memory left" in page and "metrics.jsonl has no step" in page


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(UserError):
        page_of(tmp_path)
