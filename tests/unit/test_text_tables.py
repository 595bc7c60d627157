"""The tables of plan_memory.py and compare_runs.py."""

from support.text_tables import markdown_table, text_table

ROWS, HEADERS = [["dp", "1.00×"], ["infinity", "—"]], ["\nstrategy", "speed\nvs dp"]


def test_headers_of_several_lines_are_one_line_in_markdown():
    lines = ["            speed", "strategy    vs dp", "----------  -------"]
    assert text_table(ROWS, HEADERS).splitlines()[:3] == lines
    lines = [
        "| strategy | speed vs dp |",
        "|----------|-------------|",
        "| dp       | 1.00×       |",
    ]
    assert markdown_table(ROWS, HEADERS).splitlines()[:3] == lines
