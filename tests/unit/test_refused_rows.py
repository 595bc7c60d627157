"""Rows as other programs write them: nulls, answers that are not to be imitated, tools under another
key, tables of pandas, lines of CSV files with more commas.
"""

import json
import re

import pytest

from distributed_training.data.row_files import rows_of_file
from distributed_training.data.rows import (
    BadRow,
    Row,
    RowOptions,
    columns_of_table,
    columns_to_read,
    read_row,
)
from distributed_training.errors import UserError

ASKED = {"role": "user", "content": "a"}
SAID = {"role": "assistant", "content": "b"}
CHAT = {"messages": [ASKED, SAID]}
SHAREGPT = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
PAIR, TEXT = {"prompt": "a", "completion": "b"}, {"text": "a"}
ALPACA = {"instruction": "a", "output": "b"}
TRL = {"prompt": [ASKED], "completion": [SAID]}
ROWS = {"messages": CHAT, "ShareGPT": SHAREGPT, "pair": PAIR, "TRL": TRL, "text": TEXT}
ROWS["Alpaca"] = ALPACA
COLUMNS = dict.fromkeys(
    "messages conversations prompt completion instruction output input system tools text label "
    "chosen rejected functions score".split()
)


def read(row, **columns):
    """The row, or why it is refused."""
    found = read_row(row, "line 1", RowOptions(tuple(columns.items()), "a template"))
    return str(found) if isinstance(found, BadRow) else found


def refused(row, **columns):
    found = read(row, **columns)
    assert isinstance(found, str), found
    return found


# --------------------------------------------------------------------------------------------- nulls


@pytest.mark.parametrize("null", [None, float("nan")])
@pytest.mark.parametrize("name", ROWS)
def test_a_null_is_an_absent_column(name, null):
    row = ROWS[name]
    assert isinstance(read(row), Row)
    assert read({**dict.fromkeys(COLUMNS, null), **row}) == read(row)


def test_rows_without_a_value():
    assert "all its values are null (messages, prompt)" in refused(
        {"messages": None, "prompt": None}
    )
    assert "but prompt: rename a key" in refused({"messages": None, "prompt": "a"})
    assert list(read({"text": None}).pieces) == [""]  # an empty document, as before
    assert list(read({"content": None}, text="content").pieces) == [""]
    assert "'prompt'" in refused({"messages": None, "completion": "b"})


def test_a_table_with_the_columns_of_all_formats(tmp_path):
    """Each row has the values of one format; a table of one format is read as before."""
    import pyarrow
    import pyarrow.parquet

    rows = [{**COLUMNS, **row} for row in ROWS.values()]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:  # a column of Parquet has one type
        for key in ("prompt", "completion"):
            row[key] = json.dumps(row[key]) if isinstance(row[key], list) else row[key]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    kinds = [["chat", "chat", "pair", kind, "text", "pair"] for kind in ("chat", "pair")]
    for name, wanted in zip(("a.jsonl", "a.parquet"), kinds, strict=True):
        found = list(rows_of_file(tmp_path / name, RowOptions()))
        assert [row.kind for row in found] == wanted
    options = RowOptions()
    names = ["text", "label", "id", *PAIR]
    assert columns_of_table(names, options, "x") == ["prompt", "completion"]  # part of a digest
    assert columns_to_read(names, options, "x") == ["prompt", "completion", "text", "label"]
    assert columns_to_read(["text", "label"], options, "x") == ["text"]


# ---------------------------------------------------------------- answers that are not to be imitated

BAD = [
    ({**PAIR, "label": False}, "'label' is false.*KTOTrainer.*leave such rows out"),
    ({**TRL, "label": False}, "KTOTrainer"),
    ({**CHAT, "kto_tag": False}, "'kto_tag' is false"),
    ({**SHAREGPT, "label": False}, "KTOTrainer"),
    ({**ALPACA, "rejected": True}, "'rejected' is true"),
    ({**CHAT, "train": False}, "'train' is false, so the row is not"),
    ({**CHAT, "weight": 0}, "'weight' is 0"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "'rejected'.*DPOTrainer.*'completion'"),
    ({"chosen": [ASKED, SAID], "rejected": [ASKED, SAID]}, "DPOTrainer"),
    ({"messages": [ASKED], "chosen": SAID, "rejected": SAID}, "DPOTrainer"),
    ({"conversations": SHAREGPT["conversations"][:1], "rejected": {"from": "gpt"}}, "DPOTrainer"),
    ({**PAIR, "chosen": "c", "rejected": "b"}, "DPOTrainer"),
    (
        {"input": CHAT, "preferred_output": [SAID], "non_preferred_output": [SAID]},
        "'non_preferred_output'.*DPOTrainer",
    ),
    ({"prompt": "a", "completions": ["b", "c"], "labels": [True, False]}, "PRMTrainer"),
]


@pytest.mark.parametrize("row, said", BAD)
def test_an_answer_that_is_not_to_be_imitated_is_refused(row, said):
    text = refused(row)
    assert re.search(said, text) and "assistant says nothing" not in text and "\n" not in text


GOOD = [
    {**PAIR, "label": True},
    {**PAIR, "label": 0},  # a class
    {**PAIR, "label": "negative"},
    {**PAIR, "label": "false"},
    {**PAIR, "label": ["false"]},
    {"prompt": "Is it so?", "completion": "False", "label": False},  # the class is the answer
    {"text": "a", "label": False},
    {"text": "a", "chosen": "b", "rejected": "c"},
    {**CHAT, "score": 0.0},  # of toxicity, for example
    {**PAIR, "chosen": "", "rejected": ""},
    {**CHAT, "correct": 0},  # the number of the right choice
    {**CHAT, "chosen": CHAT["messages"], "rejected": [ASKED]},  # ultrafeedback_binarized
    {**PAIR, "rejected_model": "x", "is_reasoning_complete": False, "weight": 1, "train": True},
]


@pytest.mark.parametrize("row", GOOD)
def test_columns_that_mark_nothing(row):
    assert isinstance(read(row), Row)


def test_named_columns_and_tables():
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert read(row, prompt="prompt", completion="chosen").completion == "b"
    assert "KTOTrainer" in refused({"q": "a", "b": "c", "label": False}, prompt="q", completion="b")
    with pytest.raises(UserError, match=r"x: 'rejected'.*DPOTrainer"):
        columns_of_table(list(row), RowOptions(), "x")
    names = [*CHAT, "label", "rejected", "chosen", "tool_defs", "id"]
    assert columns_to_read(names, RowOptions(), "x") == [name for name in names if name != "id"]


def test_marks_of_a_csv_file(tmp_path):
    """Its cells are texts."""
    (tmp_path / "a.csv").write_text(
        "prompt,completion,label,bad\na,b,False,\na,b,True,\na,b,0,\na,b,true,true\n"
    )
    found = list(rows_of_file(tmp_path / "a.csv", RowOptions()))
    assert [isinstance(row, BadRow) for row in found] == [True, False, False, True]
    options = RowOptions((("prompt", "prompt"), ("completion", "label")))
    found = list(rows_of_file(tmp_path / "a.csv", options))[:2]
    assert [row.completion for row in found] == ["False", "True"]


# ------------------------------------------------------------------------ tools under another key

SCHEMA = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": SCHEMA}
TOOLS = [
    {"functions": [SCHEMA]},
    {"tool_defs": [TOOL]},
    {"available_tools": ["f"]},
    {"available_tools": json.dumps([TOOL])},
    {"api_list": [SCHEMA]},
    {"api_list": json.dumps([TOOL, TOOL])},
    {"mcp": [{"name": "f", "input_schema": {"type": "object"}}]},
]


@pytest.mark.parametrize("tools", TOOLS)
def test_tools_under_another_key_are_refused(tools):
    for row in (CHAT, SHAREGPT, TRL, PAIR, ALPACA):
        [key] = tools
        assert f"{key!r} has tools, which are read from 'tools' only: rename it" in refused(
            {**row, **tools}
        )


def test_tools_of_a_message_are_refused():
    for key in ("tools", "functions", "tool_defs"):
        system = {"role": "system", "content": "a", key: [TOOL]}
        assert f"a message has {key!r}" in refused({"messages": [system, ASKED, SAID]})
    for value in (None, [], ""):
        system = {"role": "system", "content": "a", "tools": value}
        assert isinstance(read({"messages": [system, ASKED, SAID]}), Row)


def test_keys_that_have_no_tools():
    others = {"parallel_tool_calls": False, "tool_choice": "auto", "function": "search"}
    others |= {"functions": None, "tool_defs": [], "available_tools": "", "num_tools": 3}
    others |= {"tags": '["name"]', "people": [{"name": "Ann"}], "choice": '[{"name": 1'}
    assert isinstance(read({**CHAT, **others, "tools": [TOOL]}), Row)


# ---------------------------------------------------------------------- tables of other programs

RECORDS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "2024-01-01"}]


@pytest.mark.parametrize("orient", ["list", "columns", "index", "split", "table"])
def test_the_line_that_converts_a_table_of_pandas(tmp_path, orient):
    pandas = pytest.importorskip("pandas")
    frame, file = pandas.DataFrame(RECORDS), tmp_path / "a.json"
    if orient == "list":
        file.write_text(json.dumps(frame.to_dict("list")))
    else:
        frame.to_json(file, orient=orient)
    [row] = rows_of_file(file, RowOptions())
    assert isinstance(row, BadRow) and f"orient='{orient}'" in str(row)
    program = re.search('python -c "(.*)"', str(row))[1]
    new = tmp_path / "new.jsonl"
    program = program.replace("FILE", str(file)).replace("NEW.jsonl", str(new))
    exec(program)
    found = list(rows_of_file(new, RowOptions()))
    assert [{"prompt": row.prompt, "completion": row.completion} for row in found] == RECORDS


def test_columns_of_texts_and_of_conversations():
    for row in (
        {"text": ["a", "b"]},
        {"messages": [[ASKED, SAID]]},
        {"text": {"0": "a", "1": "b"}},
    ):
        assert "It is a table as pandas writes it" in refused(row)
    for row in ({"messages": [{"role": "x", "content": "a"}]}, {**TRL, "completion": [ASKED]}):
        assert "pandas" not in str(read(row))


CSV = {
    "an empty line at the end": ("prompt,completion\na,b\n\n", 1),
    "empty cells at the end": ("prompt,completion\na,b\n,\n , \n", 1),
    "a line of spaces": ("prompt,completion\na,b\n  \n", 1),
    "commas at the end": ("prompt,completion\na,b,\nc,d,,\n", 2),
    "a comma at the end of the first line": ("prompt,completion,\na,b\nc,d,\n", 2),
    "two of them": ("prompt,completion,,\na,b,,\n", 1),
    "empty cells of another format": ("prompt,completion,text\na,b,\nc,d,\n", 2),
    "an index": (",prompt,completion\n0,a,b\n", 1),
}


@pytest.mark.parametrize("name", CSV)
def test_lines_of_a_csv_file(tmp_path, name):
    content, count = CSV[name]
    (tmp_path / "a.csv").write_text(content)
    found = list(rows_of_file(tmp_path / "a.csv", RowOptions()))
    assert [row.kind for row in found] == ["pair"] * count, found


def test_lines_of_a_csv_file_that_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,completion\na,b,c\na\na,b\n")
    found = list(rows_of_file(tmp_path / "a.csv", RowOptions()))
    assert ["cells" in str(row) for row in found] == [True, True, False]
    (tmp_path / "a.csv").write_text("prompt,completion,text\n,,a\n,b,c\n")
    document, pair = rows_of_file(tmp_path / "a.csv", RowOptions())
    assert (document.pieces, pair.kind) == (["a"], "pair")
