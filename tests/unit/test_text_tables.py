"""The tables of plan_memory.py and compare_runs.py."""

from support.console import markdown_table, text_table

ROWS = [["dp", "1.00×"], ["infinity", "—"]]


def test_table_for_a_terminal_has_headers_of_several_lines():
    assert text_table(ROWS, ["\nstrategy", "speed\nvs dp"]).splitlines() == [
        "            speed",
        "strategy    vs dp",
        "----------  -------",
        "dp          1.00×",
        "infinity    —",
    ]


def test_markdown_table_has_each_header_on_one_line():
    assert markdown_table(ROWS, ["\nstrategy", "speed\nvs dp"]).splitlines() == [
        "| strategy | speed vs dp |",
        "|----------|-------------|",
        "| dp       | 1.00×       |",
        "| infinity | —           |",
    ]
