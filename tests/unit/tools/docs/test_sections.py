"""The generated sections of the documents are what the code generates."""

import pytest

from distributed_training import PROJECT
from tools.docs.sections import PAGES, generated


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_generated_parts_are_current(page):
    text = page.read_text("utf-8")
    assert generated(text) == text, "stale: run python scripts/generate_docs.py"
