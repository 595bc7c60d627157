"""The formats of rows: what each becomes, which rows are refused because they would lose something,
which files of a folder are data, which examples have a target, and what --generate continues.
"""

import gzip
import json
from copy import copy

import numpy as np
import pytest
from streams import ids_of, tokenized
from tokenizer_zoo import tokenizer_of
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from distributed_training.cli.parse import parse_arguments
from distributed_training.data.chat import Encoder, prompt_for, prompt_of
from distributed_training.data.corpus import open_split
from distributed_training.data.examples import encode_example
from distributed_training.data.opening import check_validation
from distributed_training.data.row_files import rows_of_file
from distributed_training.data.rows import BadRow, Row, RowOptions, columns_of_table, read_row
from distributed_training.data.sequences import Padding, Sequences
from distributed_training.errors import UserError
from distributed_training.files.folders import files_of
from distributed_training.loss_chunks import IGNORED

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
HUMAN, GPT = ("human", QUESTION[1]), ("gpt", ANSWER[1])
ADD = [("user", "Add the numbers.\n1, 2"), ("assistant", "3")]


def turns(*pairs, keys=("role", "content")):
    return [dict(zip(keys, pair, strict=True)) for pair in pairs]


def sharegpt(*pairs):
    return turns(*pairs, keys=("from", "value"))


SYSTEM = {"conversations": sharegpt(HUMAN, GPT), "system": "Be short.", "tools": ""}
TRL = {"prompt": turns(QUESTION, ANSWER, QUESTION), "completion": turns(ANSWER)}
NAMED = {"q": turns(QUESTION), "a": turns(ANSWER), "messages": []}
# A row, the flags' columns, and the (role, content) of its messages with the number of those that
# are context.
CONVERSATIONS = {
    "messages": ({"messages": turns(QUESTION, ANSWER)}, {}, [QUESTION, ANSWER], 0),
    "parts": ({"messages": turns(("user", PARTS), ANSWER)}, {}, [QUESTION, ANSWER], 0),
    "ShareGPT": (SYSTEM, {}, [("system", "Be short."), QUESTION, ANSWER], 0),
    "TRL": (TRL, {}, [QUESTION, ANSWER, QUESTION, ANSWER], 3),
    "named columns": (NAMED, {"prompt": "q", "completion": "a"}, [QUESTION, ANSWER], 1),
    "Alpaca": ({**ALPACA, "history": []}, {}, ADD, 0),
}


@pytest.mark.parametrize(
    "row, columns, messages, context", CONVERSATIONS.values(), ids=CONVERSATIONS
)
def test_rows_that_become_a_conversation(row, columns, messages, context):
    found = read_row(row, "line 1", RowOptions(tuple(columns.items()), "a template"))
    assert isinstance(found, Row) and found.kind == "chat" and found.context == context
    assert [(m["role"], m["content"]) for m in found.messages] == messages


PAIRS = [
    ({"prompt": "a", "completion": " b", "text": "c"}, {}, ("a", " b")),
    ({"question": "a", "answer": "b"}, {"prompt": "question", "completion": "answer"}, ("a", "b")),
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
    found = read_row(row, "line 1", RowOptions(tuple(columns.items())))
    assert (found.kind, found.prompt, found.completion) == ("pair", *pair)


@pytest.mark.parametrize(
    "content, texts",
    [
        ('{"text": "a"}\n\n{"text": "b"}\n', ["a", "b"]),  # a row on each line
        ('{\n"text": "a"\n}', ["a"]),
        ('[{"text": "a"},\n{"text": "b"}]', ["a", "b"]),
    ],
)
def test_rows_of_a_json_file(tmp_path, content, texts):
    (tmp_path / "rows.json").write_text(content)
    rows = list(rows_of_file(tmp_path / "rows.json", RowOptions()))
    assert [row.pieces for row in rows] == [[text] for text in texts]


# Files that another program wrote in another layout, and what the message must name.
OTHER_LAYOUTS = {
    "a.csv": ("text;label\nhello, you;1\n", "semicolons.*commas"),
    "b.csv": ('"prompt"|"completion"\na|b\n', r"'\|'.*commas"),
    "c.csv": ("question\tanswer\na\tb\n", r"tabs.*sep='\\t'"),
    "d.tsv": ("text,label\na,b\n", "commas.*tabs"),
    "a.json": ('{"data": [{"text": "a"}]}', r"jq -c '\.data\[\]'"),
    "b.json": ('{\n"version": 1,\n"my data": {"train": [{"text": "a"}]}}', r'"my data"\.train\[\]'),
    "c.jsonl": ('{"rows": [{"messages": []}]}\n', r"jq -c '\.rows\[\]'"),
    "d.json": ('{"texts": ["a", "b"]}', r"jq -c '\.texts\[\]'"),
}


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_a_file_in_another_layout_is_refused_with_the_remedy(tmp_path, name):
    content, named = OTHER_LAYOUTS[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"{name}.*{named}"):
        for row in rows_of_file(tmp_path / name, RowOptions()):
            raise row if isinstance(row, BadRow) else AssertionError(row)


def test_types_of_files_by_their_suffix(tmp_path):
    """The suffix in any case, and before .gz; every other file is one document."""
    lines = '{"text": "a"}\n{"text": "b"}\n'
    for name, documents in (
        *(("a.jsonl", 2), ("b.NDJSON", 2), ("c.ndjson.gz", 2)),
        *(("d.txt", 1), ("e.log", 1), ("f", 1), ("g.gz", 1)),
    ):
        file = tmp_path / name
        file.write_bytes(gzip.compress(lines.encode()) if name[-2:] == "gz" else lines.encode())
        rows = list(rows_of_file(file, RowOptions()))
        assert len(rows) == documents, name
        assert "".join("".join(row.pieces) for row in rows) == ("ab" if documents == 2 else lines)


def test_a_column_with_another_delimiter_in_its_name(tmp_path):
    (tmp_path / "a.csv").write_text("a;b\nx;y\n")
    [row] = rows_of_file(tmp_path / "a.csv", RowOptions((("text", "a;b"),)))
    assert row.pieces == ["x;y"]


def test_a_named_column_decides():
    options = RowOptions((("text", "output"),))
    assert read_row(ALPACA, "line 1", options).pieces == ["3"]
    assert columns_of_table(list(ALPACA), options, "x") == ["output"]
    columns = columns_of_table([*ALPACA, "images"], RowOptions(), "x")
    assert columns == ["instruction", "output", "input", "images"]
    missing = RowOptions((("prompt", "q"),))
    assert "'q'" in str(read_row(ALPACA, "line 1", missing))
    with pytest.raises(UserError, match="instruction, input, output"):
        columns_of_table(list(ALPACA), missing, "x")


IMAGE = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
REFUSED = [
    ({"messages": turns(("user", IMAGE), ANSWER)}, "'image'"),
    ({**ALPACA, "tools": [{"name": "f"}]}, "'tools'"),
    ({"prompt": "a", "completion": "b", "image": "a.png"}, "'image'"),
    ({"conversations": sharegpt(HUMAN, ("function_call", "{}"), GPT)}, "'name'"),
    ({"messages": [{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}]}, "reaso"),
    ({"messages": [{"role": "assistant", "content": None}]}, "'content' is not a string"),
    ({"messages": [{"role": ["user"], "content": "Yes."}]}, "has the role"),
    ({"messages": [{"role": "assistant", "content": "Yes.", "tool_calls": [1]}]}, "the tool calls"),
    ({"prompt": turns(QUESTION), "completion": "b"}, "'completion' is not a list"),
    ({**ALPACA, "history": [["a", "b"]]}, "'history'"),
    ({"instruction": "a", "response": "b"}, "--completion_column"),
]


@pytest.mark.parametrize("row, said", REFUSED)
def test_rows_that_would_lose_something(row, said):
    found = read_row(row, "line 1", RowOptions())
    assert isinstance(found, BadRow) and str(found).startswith("line 1: ") and said in str(found)


# --------------------------------------------------------------------------------- as token ids
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:BEGIN{{ m.content }};END"
    "{% else %}U:{{ m.content | trim }};{% endif %}{% endfor %}"
)
TEMPLATES = {
    "marks": TEMPLATE.replace("BEGIN", "").replace("END", ""),
    "generation": TEMPLATE.replace("BEGIN", "{% generation %}").replace(
        "END", "{% endgeneration %}"
    ),
}


def text_of(tokenizer, ids):
    text = "".join(tokenizer.convert_ids_to_tokens(ids))
    return text.replace("Ġ", " ").replace("Ċ", "\n").replace(tokenizer.eos_token, "")


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_only_the_completion_of_a_conversation_is_trained(template):
    """Also if the prompt has answers, even the same ones."""
    tokenizer = copy(tokenizer_of("gpt2"))
    tokenizer.chat_template = template

    def trained_text(row):
        example = encode_example(Encoder(tokenizer), read_row(row, "line 1", RowOptions()))
        if isinstance(example, BadRow):
            return str(example)
        return text_of(tokenizer, example.ids[example.ids >= 0]).replace(";", "")

    prompt = turns(("user", "fox?"), ("assistant", "the dog"), ("user", "fox?"))
    row = {"prompt": prompt, "completion": turns(("assistant", "the dog"))}
    assert trained_text(row) == "the dog"
    assert trained_text({"messages": prompt + row["completion"]}) == "the dog" * 2
    assert "says nothing" in trained_text({**row, "completion": turns(("user", "ok"))})


@pytest.mark.parametrize("tags", ["{%- {}generation -%}", "{% {}generation %}\n  "])
def test_a_block_ends_with_a_character_without_a_token(tags):
    """transformers 5.23.0 marks everything after such a block as the assistant's."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # so that a line break has no token
    words.train_from_iterator(["fox dog U A ; <e>"], trainers.BpeTrainer(show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>")
    begin, end = (tags.replace("{}", word) for word in ("", "end"))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A " + begin + "{{ m.content + '\n' }}"
        f"{end}{{% else %}}U {{{{ m.content }}}};{{% endif %}}{{% endfor %}}"
    )
    chat = turns(("user", "dog"), ("assistant", "fox"), ("user", "dog"), ("assistant", "fox"))
    row = read_row({"messages": chat}, "line 1", RowOptions())
    ids = encode_example(Encoder(tokenizer), row).ids
    tokens = tokenizer.convert_ids_to_tokens(np.where(ids < 0, ~ids, ids))
    assert tokens == ["U", "dog", ";", "A", "fox"] * 2
    assert (ids >= 0).tolist() == [False, False, False, False, True] * 2


def test_the_cache_knows_what_changes_the_tokens(tmp_path):
    """The columns and the chat template; the same rows in another format give the same tokens."""
    rows = {
        "a.jsonl": ALPACA | {"prompt": "the", "completion": "fox"},
        "alpaca.jsonl": ALPACA,
        "chat.jsonl": {"messages": turns(*ADD)},
    }
    for name, row in rows.items():
        (tmp_path / name).write_text(json.dumps(row))
    plain, chat = tokenizer_of("gpt2"), copy(tokenizer_of("gpt2"))
    chat.chat_template = TEMPLATES["marks"]

    def tokens(name, tokenizer, *flags):
        done = tokenized(tmp_path / name, tokenizer, tmp_path / "cache", *flags)
        ids = ids_of(done)
        text = text_of(tokenizer, np.where(ids < 0, ~ids, ids))
        return text, done["splits"]["train"]["sha256"]

    assert tokens("a.jsonl", plain)[0] == "thefox"
    assert tokens("a.jsonl", plain, "--text_column", "text")[0] == "all of it"
    assert tokens("alpaca.jsonl", plain)[0] == f"{WITH_INPUT}3"
    assert tokens("alpaca.jsonl", chat) == tokens("chat.jsonl", chat)
    assert tokens("alpaca.jsonl", chat)[0] == "U:Add the numbers.\n1, 2;A:3;"


def read(tokenizer, folder, length, conversations):
    """Labels and facts of conversations, given as lists of (role, content)."""
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in turns]}
        for turns in conversations
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = tokenized(folder / "chat.jsonl", tokenizer, folder)
    data = parse_arguments([]).data
    sequences, facts = open_split(prepared, "train", data, Padding(length, 8))
    return *sequences.read(np.arange(1))[:2], facts


def test_an_example_without_a_target_in_the_sequence_is_skipped(tmp_path):
    """The first token of a sequence is not predicted, so it does not count as a target."""
    tokenizer = copy(tokenizer_of("gpt2"))
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    late = [("assistant", "a"), ("user", " and" * 50), ("assistant", "late")]
    early = [("assistant", "a long answer"), ("user", " and" * 50)]
    _, labels, facts = read(tokenizer, tmp_path, 16, [late, early])
    assert (facts["blocks"], facts["skipped"], facts["truncated"]) == (1, 1, 1)
    assert (labels[:, 1:] != IGNORED).any()


def test_the_plain_template_without_an_end_of_text_token(tmp_path):
    tokenizer = copy(tokenizer_of("gpt2"))
    tokenizer.eos_token, tokenizer.chat_template = None, None
    inputs, labels, _ = read(tokenizer, tmp_path, 64, [[("user", "fox?"), ("assistant", "dog")]])
    learned = inputs[0][labels[0] != IGNORED]
    assert "".join(tokenizer.convert_ids_to_tokens(learned)) == "dog"


def test_nothing_to_evaluate_on():
    with pytest.raises(UserError, match=r"nothing to evaluate on.*--eval_only"):
        check_validation(Sequences.none(Padding(8, 8)), parse_arguments(["--eval_only"]).training)


# patterns, and what they choose of a.txt, b.md, config.json, sub/a.txt, sub/deep/c.TXT
INCLUDED = [
    ("*.txt", ["a.txt", "sub/a.txt"]),
    ("sub/*", ["sub/a.txt", "sub/deep/c.TXT"]),
    (" *.md , *.json ", ["b.md", "config.json"]),
]


def test_include_chooses_files(tmp_path):
    for name in ("a.txt", "b.md", "config.json", "sub/a.txt", "sub/deep/c.TXT"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    for patterns, chosen in INCLUDED:
        found = files_of(tmp_path, "x", patterns)
        assert [str(file.relative_to(tmp_path)) for file in found] == chosen
    with pytest.raises(UserError, match=r"--include \*.csv.* 3 .txt"):
        files_of(tmp_path, "x", "*.csv")


PROMPT = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def tokenizer():
    return copy(tokenizer_of("gpt2"))


def test_prompt_is_a_users_message_for_a_chat_model(tokenizer):
    plain = prompt_of("the dog", tokenizer, True)  # no template
    tokenizer.chat_template = PROMPT
    chat, text = (prompt_of("the dog", tokenizer, as_chat) for as_chat in (True, False))
    assert text_of(tokenizer, plain.ids) == "the dog" and text == plain and not plain.is_chat
    assert text_of(tokenizer, chat.ids) == "[user] the dog[assistant]" and chat.is_chat


def test_template_that_refuses_the_prompt(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(UserError, match="--chat_template"):
        prompt_of("the dog", tokenizer, True)


def test_what_is_prompted_with_the_template(tokenizer):
    """Conversations were trained, or a model is only evaluated; base models have templates, too."""
    tokenizer.chat_template = PROMPT
    is_chat = {}
    for eval_only in (False, True):
        for kind in ("chat", "text", "pair", None):  # None: a stream before its first row
            prompt = prompt_for("the dog", tokenizer, {"kind": kind}, eval_only)
            is_chat[eval_only, kind] = prompt.is_chat
    assert {case for case, found in is_chat.items() if found} == {
        *((False, "chat"), (True, "chat"), (True, "text"), (True, None))
    }
