"""The generated sections of the documents are what the code generates."""

import pytest
from documents import PROJECT, pages

from tools.docs.sections import generated


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_generated_parts_are_current(page):
    text = (PROJECT / page.name).read_text("utf-8")
    assert generated(text) == text, "stale: run python scripts/generate_docs.py"
