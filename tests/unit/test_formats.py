"""The formats of rows: what each becomes, and which rows are refused because they would lose
something.
"""

import json
from copy import copy

import numpy as np
import pytest
from tokenizer_zoo import tokenizer_of

from support.cli.parse import parse_arguments
from support.data.chat import Encoder
from support.data.formats import (
    BadRow,
    Document,
    Example,
    OneKind,
    RowOptions,
    columns_of_table,
    read_row,
)
from support.data.rows import contents_of_file, open_source
from support.data.tokenize import tokenize_once
from support.errors import UserError
from support.files.cache import Cache

PARTS = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a list?"}]
ALPACA = {"instruction": "Add the numbers.", "input": "1, 2", "output": "3", "text": "all of it"}
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd the numbers.\n\n### Input:\n1, 2\n\n### Response:"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\nAdd the numbers.\n\n### Response:"
)
QUESTION, ANSWER = ("user", "What is a list?"), ("assistant", "A sequence.")


def turns(*pairs, keys=("role", "content")):
    return [dict(zip(keys, pair, strict=True)) for pair in pairs]


def sharegpt(*pairs):
    return turns(*pairs, keys=("from", "value"))


HUMAN, GPT = ("human", QUESTION[1]), ("gpt", ANSWER[1])
# A row, the flags' columns, and the (role, content) of its messages with the number of those that
# are context.
CONVERSATIONS = {
    "messages": ({"messages": turns(QUESTION, ANSWER)}, {}, [QUESTION, ANSWER], 0),
    "parts": ({"messages": turns(("user", PARTS), ANSWER)}, {}, [QUESTION, ANSWER], 0),
    "ShareGPT": ({"conversations": sharegpt(HUMAN, GPT)}, {}, [QUESTION, ANSWER], 0),
    "ShareGPT with a system prompt": (
        {"conversations": sharegpt(HUMAN, GPT), "system": "Be short.", "tools": ""},
        {},
        [("system", "Be short."), QUESTION, ANSWER],
        0,
    ),
    "conversations with roles": (
        {"conversations": turns(QUESTION, ANSWER)},
        {},
        [QUESTION, ANSWER],
        0,
    ),
    "TRL": (
        {"prompt": turns(QUESTION, ANSWER, QUESTION), "completion": turns(ANSWER)},
        {},
        [QUESTION, ANSWER, QUESTION, ANSWER],
        3,
    ),
    "TRL in other columns": (
        {"q": turns(QUESTION), "a": turns(ANSWER), "messages": []},
        {"prompt": "q", "completion": "a"},
        [QUESTION, ANSWER],
        1,
    ),
    "Alpaca": (ALPACA, {}, [("user", "Add the numbers.\n1, 2"), ("assistant", "3")], 0),
    "Alpaca without an input": (
        {**ALPACA, "input": "", "history": []},
        {},
        [("user", "Add the numbers."), ("assistant", "3")],
        0,
    ),
}


@pytest.mark.parametrize(
    "row, columns, messages, context", CONVERSATIONS.values(), ids=CONVERSATIONS
)
def test_rows_that_become_a_conversation(row, columns, messages, context):
    found = read_row(row, "line 1", RowOptions(tuple(columns.items())))
    assert isinstance(found, Example)
    assert [(m["role"], m["content"]) for m in found.messages] == messages
    assert found.context == context


PAIRS = [
    ({"prompt": "a", "completion": " b", "text": "c"}, {}, ("a", " b")),
    ({"question": "a", "answer": "b"}, {"prompt": "question", "completion": "answer"}, ("a", "b")),
    ({"prompt": "a", "answer": "b", "text": "c"}, {"completion": "answer"}, ("a", "b")),
    (ALPACA, {}, (WITH_INPUT, "3")),
    ({**ALPACA, "input": None}, {}, (WITHOUT_INPUT, "3")),
    (
        {**ALPACA, "input": "", "system": "Be exact."},
        {},
        ("Be exact.\n\n### Instruction:\nAdd the numbers.\n\n### Response:", "3"),
    ),
]


@pytest.mark.parametrize("row, columns, pair", PAIRS)
def test_rows_that_become_a_prompt_and_a_completion(row, columns, pair):
    """Alpaca's rows do for a model without a chat template."""
    found = read_row(row, "line 1", RowOptions(tuple(columns.items()), chat_template=False))
    assert (found.messages, found.prompt, found.completion) == (None, *pair)


@pytest.mark.parametrize(
    "content, texts",
    [
        ('{"text": "a"}\n\n{"text": "b"}\n', ["a", "b"]),  # a row on each line
        ('{"text": "a"}\n', ["a"]),
        ('{"data": [{"text": "a"}, {"text": "b"}]}\n\n', ["a", "b"]),
        ('{\n"text": "a"\n}', ["a"]),
        ('[{"text": "a"},\n{"text": "b"}]', ["a", "b"]),
    ],
)
def test_rows_of_a_json_file(tmp_path, content, texts):
    (tmp_path / "rows.json").write_text(content)
    rows = list(contents_of_file(tmp_path / "rows.json", RowOptions()))
    assert [row.pieces for row in rows] == [[text] for text in texts]


def test_a_bad_line_of_a_json_file_is_named(tmp_path):
    (tmp_path / "rows.json").write_text('{"text": "a"}\n{"text"\n')
    _, flaw = contents_of_file(tmp_path / "rows.json", RowOptions())
    assert isinstance(flaw, BadRow) and "rows.json, line 2, column" in str(flaw)


def test_a_named_column_decides():
    options = RowOptions((("text", "output"),))
    found = read_row(ALPACA, "line 1", options)
    assert isinstance(found, Document) and found.pieces == ["3"]
    assert columns_of_table(list(ALPACA), options, "x") == ["output"]
    assert columns_of_table([*ALPACA, "images"], RowOptions(), "x") == [
        *("instruction", "output", "input", "images")
    ]


IMAGE = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
REFUSED = [
    ({"messages": turns(("user", IMAGE), ANSWER)}, "'image'"),
    ({"messages": turns(("user", ["text"]), ANSWER)}, "'text'"),
    ({"messages": turns(QUESTION, ANSWER), "images": ["a.png"]}, "'images'"),
    ({"messages": turns(QUESTION, ANSWER), "tools": [{"name": "f"}]}, "'tools'"),
    ({"prompt": "a", "completion": "b", "image": "a.png"}, "'image'"),
    ({"conversations": sharegpt(HUMAN, ("function_call", "{}"), GPT)}, "'function_call'"),
    ({"conversations": sharegpt(HUMAN, GPT), "tools": "[{}]"}, "'tools'"),
    ({"conversations": sharegpt(HUMAN, ("gpt", None))}, "'value' is not a text"),
    ({"conversations": [{"value": "a"}]}, "'role'"),
    ({"messages": [{"role": "assistant", "content": "Yes.", "weight": 0}]}, "weight"),
    ({"messages": [{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}]}, "reaso"),
    ({"messages": [{"role": "assistant", "content": None}]}, "'content' is not a text"),
    ({"messages": [{"role": "assistant", "content": "Yes.", "tool_calls": [1]}]}, "tool_calls"),
    ({"conversations": "human: a"}, "'conversations' is not a list"),
    ({"prompt": turns(QUESTION), "completion": "b"}, "'completion' is not a list"),
    ({**ALPACA, "history": [["a", "b"]]}, "'history'"),
    ({**ALPACA, "input": 3}, "'input' is not a text"),
    ({"instruction": "a", "response": "b"}, "--completion_column"),
]


@pytest.mark.parametrize("row, said", REFUSED)
def test_rows_that_would_lose_something(row, said):
    found = read_row(row, "line 1", RowOptions())
    assert isinstance(found, BadRow) and str(found).startswith("line 1: ") and said in str(found)


@pytest.mark.parametrize("columns", [{"prompt": "q"}, {"completion": "a"}, {"text": "t"}])
def test_a_named_column_that_is_missing(columns):
    found = read_row(ALPACA, "line 1", RowOptions(tuple(columns.items())))
    assert isinstance(found, BadRow) and f"'{next(iter(columns.values()))}'" in str(found)
    with pytest.raises(UserError, match="instruction, input, output"):
        columns_of_table(list(ALPACA), RowOptions(tuple(columns.items())), "x")


def test_formats_of_one_kind_may_be_mixed():
    one_kind = OneKind()
    for row in (ALPACA, {"messages": turns(QUESTION, ANSWER)}, ALPACA):
        assert isinstance(one_kind.check(read_row(row, "", RowOptions())), Example)
    assert one_kind.formats == ["Alpaca (instruction, input, output)", "messages"]
    assert isinstance(one_kind.check(read_row("text", "", RowOptions())), BadRow)


# --------------------------------------------------------------------------------- as token ids
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:BEGIN{{ m.content }};END"
    "{% elif m.role in ('user', 'system') %}U:{{ m.content | trim }};{% endif %}{% endfor %}"
)
TEMPLATES = {
    "marks": TEMPLATE.replace("BEGIN", "").replace("END", ""),
    "generation": TEMPLATE.replace("BEGIN", "{% generation %}").replace(
        "END", "{% endgeneration %}"
    ),
}


@pytest.fixture(params=TEMPLATES.values(), ids=TEMPLATES)
def templated(request):
    tokenizer = copy(tokenizer_of("gpt2"))
    tokenizer.chat_template = request.param
    return tokenizer


def text_of(tokenizer, ids):
    text = "".join(tokenizer.convert_ids_to_tokens(ids))
    return text.replace("Ġ", " ").replace("Ċ", "\n").replace(tokenizer.eos_token, "")


def trained_text(tokenizer, row):
    [encoded] = Encoder(tokenizer).encode([read_row(row, "line 1", RowOptions())])
    if isinstance(encoded, BadRow):
        return str(encoded)
    return text_of(tokenizer, encoded[encoded >= 0]).replace(";", "")


def test_only_the_completion_of_a_conversation_is_trained(templated):
    """Also if the prompt has answers, even the same ones."""
    prompt = turns(("user", "fox?"), ("assistant", "the dog"), ("user", "fox?"))
    row = {"prompt": prompt, "completion": turns(("assistant", "the dog"))}
    assert trained_text(templated, row) == "the dog"
    assert trained_text(templated, {"messages": prompt + row["completion"]}) == "the dog" * 2
    assert "says nothing" in trained_text(templated, {**row, "completion": turns(("user", "ok"))})


def test_a_role_that_the_template_leaves_out(templated):
    row = {"messages": turns(("user", "fox?"), ("critic", "a cat?"), ("assistant", "the dog"))}
    assert "leaves out the message of the role 'critic'" in trained_text(templated, row)


def test_the_cache_knows_what_changes_the_tokens(tmp_path):
    """The columns and the chat template; the same rows in another format give the same tokens."""
    rows = {
        "a.jsonl": ALPACA | {"prompt": "the", "completion": "fox"},
        "alpaca.jsonl": ALPACA,
        "chat.jsonl": {"messages": turns(("user", "Add the numbers.\n1, 2"), ("assistant", "3"))},
    }
    for name, row in rows.items():
        (tmp_path / name).write_text(json.dumps(row))
    plain, chat = tokenizer_of("gpt2"), copy(tokenizer_of("gpt2"))
    chat.chat_template = TEMPLATES["marks"]

    def tokens(name, tokenizer, **columns):
        options = RowOptions(tuple(columns.items()), tokenizer is chat)
        source = open_source(str(tmp_path / name), parse_arguments([]), options)
        cache = Cache(tmp_path / "cache", [], print)
        done = tokenize_once(source, tokenizer, cache, lambda n: None, 0)
        split = done["splits"]["train"]
        ids = np.fromfile(f"{done['folder']}/train.bin", split["dtype"])
        ids = np.where(ids < 0, ~ids, ids)
        return text_of(tokenizer, ids), split["sha256"]

    assert tokens("a.jsonl", plain)[0] == "thefox"
    assert tokens("a.jsonl", plain, text="text")[0] == "all of it"
    assert tokens("a.jsonl", plain, prompt="input", completion="output")[0] == "1, 23"
    assert tokens("alpaca.jsonl", plain)[0] == f"{WITH_INPUT}3"
    assert tokens("alpaca.jsonl", chat) == tokens("chat.jsonl", chat)
    assert tokens("alpaca.jsonl", chat)[0] == "U:Add the numbers.\n1, 2;A:3;"


def test_a_prompt_and_a_completion_without_a_space_between_them_are_noticed(tmp_path):
    def joined(*pairs):
        rows = [json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs]
        (tmp_path / "pairs.jsonl").write_text("".join(rows))
        source = open_source(str(tmp_path / "pairs.jsonl"), parse_arguments([]), RowOptions())
        cache = Cache(tmp_path / "cache", [], print)
        done = tokenize_once(source, tokenizer_of("gpt2"), cache, lambda n: None, 0)
        return done["splits"]["train"]["joined"]

    assert joined(("the ", "fox"), ("the", " fox"), ("", "fox")) is None
    assert joined(("the ", "fox"), ("the quick", "fox")) == "the quickfox"
