"""Conversations with tools: which tokens are trained, what is refused; messages with the weight 0;
--train_on all.
"""

import json

import numpy as np
import pytest
from conftest import PROJECT
from streams import ids_of, stream_of, tokenized
from tool_templates import DEEPSEEK, LLAMA, MISTRAL, QWEN, QWEN_BLOCKS, with_template
from transformers import GenerationConfig

from distributed_training.checkpoints.other_runs import refuse_other_run
from distributed_training.checkpoints.signature import flags_signature
from distributed_training.cli.parse import parse_arguments
from distributed_training.data.chat import Encoder, Example
from distributed_training.data.conversations import PLAIN_TEMPLATE
from distributed_training.data.examples import encode_example
from distributed_training.data.row_files import rows_of_file
from distributed_training.data.rows import BadRow, RowOptions, read_row
from distributed_training.errors import UserError
from distributed_training.model.stopping import end_ids

SCHEMA = {"name": "weather", "parameters": {"type": "object", "required": ["city"]}}
TOOLS = [{"type": "function", "function": SCHEMA}]


def call(arguments, name="weather"):
    function = {"name": name, "arguments": arguments}
    return {"id": "call00001", "type": "function", "function": function}


def user(text):
    return {"role": "user", "content": text}


def said(text, **others):
    return {"role": "assistant", "content": text, **others}


def calls(*tool_calls, content=None, **others):
    return {"role": "assistant", "content": content, "tool_calls": list(tool_calls), **others}


def result(text):
    return {"role": "tool", "content": text, "tool_call_id": "call00001"}


PARIS = {"city": "Paris", "days": 2}
ASKED = [user("How warm is Paris?"), calls(call(PARIS)), result("21"), said("It has 21 degrees.")]
ROW = {"messages": ASKED, "tools": TOOLS}
WRITTEN = '"arguments": {"city": "Paris", "days": 2}}'
EOS = "<|end|>"  # of the small tokenizer
# A template, and what is trained of ROW.
TRAINED = {
    "Qwen": (
        QWEN,
        f'<call>{{"name": "weather", {WRITTEN}</call><|im_end|>',
        "It has 21 degrees.<|im_end|>",
    ),
    "Qwen with blocks": (
        QWEN_BLOCKS,
        f'<call>{{"name": "weather", {WRITTEN}</call><|im_end|>',
        "It has 21 degrees.<|im_end|>",
    ),
    "Llama": (
        LLAMA,
        '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}<|eot|>',
        "It has 21 degrees.<|eot|>",
    ),
    "Mistral": (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "weather", {WRITTEN}]{EOS}',
        f" It has 21 degrees.{EOS}",  # a token has the space of the template
    ),
    "DeepSeek": (
        DEEPSEEK,
        'weather {"city": "Paris", "days": 2}<|eot|>',
        "It has 21 degrees.<|eot|>",
    ),
}


def encoded(row, template, train_on="assistant"):
    """An Example, or the text of the BadRow; and the tokenizer."""
    tokenizer = with_template(template)
    options = RowOptions(chat_template=template, train_on=train_on)
    found = read_row(row, "a.jsonl, line 1", options)
    if not isinstance(found, BadRow):
        found = encode_example(Encoder(tokenizer), found)
    return (found if isinstance(found, Example) else str(found)), tokenizer


def trained(row, template, train_on="assistant"):
    """The text of the trained tokens; the reason if the row is refused."""
    found, tokenizer = encoded(row, template, train_on)
    return found if isinstance(found, str) else tokenizer.decode(found.ids[found.ids >= 0])


def whole(row, template):
    found, tokenizer = encoded(row, template)
    return tokenizer.decode(np.where(found.ids < 0, ~found.ids, found.ids))


@pytest.mark.parametrize("name", TRAINED)
def test_the_calls_and_the_answers_are_trained(name):
    template, *parts = TRAINED[name]
    assert trained(ROW, template) == "".join(parts)
    text = whole(ROW, template)
    assert json.dumps(TOOLS[0]) in text and "21" in text and "How warm is Paris?" in text
    # Arguments and tools as JSON text, a function and a schema alone.
    alone = [user("How warm is Paris?"), calls(call(json.dumps(PARIS))), *ASKED[2:]]
    same = {"messages": alone, "tools": json.dumps([SCHEMA])}
    assert np.array_equal(encoded(same, template)[0].ids, encoded(ROW, template)[0].ids)


def test_a_tokenizer_with_a_template_for_tools():
    """Its blocks count for rows with tools, those of the other one for rows without."""
    end = "{{- '<|im_end|>' }}{%- endgeneration %}"
    assert end in QWEN_BLOCKS
    without_end = QWEN_BLOCKS.replace(end, "{%- endgeneration %}{{- '<|im_end|>' }}")
    templates = {"default": QWEN, "tool_use": without_end}
    call_of_row, answer = TRAINED["Qwen"][1:]
    assert trained(ROW, templates) == (call_of_row + answer).replace("<|im_end|>", "")
    assert trained({"messages": ASKED}, templates) == call_of_row + answer


def test_a_call_in_the_middle_and_several_calls():
    """Two calls in one message, text before them, the same call twice, questions after it."""
    first = calls(call(PARIS), call({"city": "Rome"}), content="I look.")
    second = calls(call(PARIS))
    row = {"messages": [user("?"), first, result("1"), result("2"), said("1 and 2."), user("?")]}
    row["messages"] += [second, result("3"), said("3."), user("Thanks.")]
    for template in (QWEN, QWEN_BLOCKS):
        text = trained(row, template)
        paris = f'<call>{{"name": "weather", {WRITTEN}</call>'
        rome = '<call>{"name": "weather", "arguments": {"city": "Rome"}}</call>'
        end = "<|im_end|>"
        assert text == f"I look.\n{paris}\n{rome}{end}1 and 2.{end}{paris}{end}3.{end}"
    assert "the chat template refuses it: only one call" in trained(row, LLAMA)


def test_sharegpt_names_of_calls_and_results():
    turns = [
        *(("system", "Be short."), ("human", "How warm is Paris?")),
        ("function_call", json.dumps({"name": "weather", "arguments": PARIS})),
        *(("observation", "21"), ("gpt", "It has 21 degrees.")),
    ]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    row["tools"] = json.dumps([SCHEMA])
    system = {"role": "system", "content": "Be short."}
    same = {"messages": [system, *ASKED], "tools": TOOLS}
    assert np.array_equal(encoded(row, QWEN)[0].ids, encoded(same, QWEN)[0].ids)
    row["conversations"][3]["from"] = "tool"
    assert np.array_equal(encoded(row, QWEN)[0].ids, encoded(same, QWEN)[0].ids)


def test_tools_of_a_prompt_and_a_completion():
    row = {"prompt": ASKED[:1], "completion": ASKED[1:], "tools": TOOLS}
    assert trained(row, QWEN) == trained(ROW, QWEN)
    later = {"prompt": ASKED[:3], "completion": ASKED[3:], "tools": TOOLS}
    for template in (QWEN, QWEN_BLOCKS):
        assert trained(later, template) == "It has 21 degrees.<|im_end|>"


def test_arguments_that_a_table_fills_with_nulls(tmp_path):
    """All rows of a table have the same keys; a call has those that it was written with."""
    import pyarrow
    import pyarrow.parquet

    rows = [ROW, {"messages": [user("?"), calls(call({"city": "Rome"})), said("5")]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = rows_of_file(tmp_path / "a.parquet", RowOptions())
    assert first.messages[1]["tool_calls"][0]["function"]["arguments"] == PARIS
    assert second.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert first.tools and not second.tools and "content" not in first.messages[1]


# ------------------------------------------------------------------------------- what is refused

BEGIN = "{% for m in messages %}"
ANSWERS = "{% if m.role == 'assistant' %}A: {{ m.content }}<|eot|>{% endif %}"
USERS = "{% if m.role == 'user' %}Q: {{ m.content }}{% endif %}"
RESULTS = "{% if m.role == 'tool' %}R: {{ m.content }}{% endif %}"
CALLS = "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function | tojson }}{% endfor %}"
END = "{% endfor %}"
HINT = "--chat_template FILE"
LEFT_OUT = {
    # The result is a part of the answer, the name of the function is one of a tool.
    "a result": (BEGIN + ANSWERS + USERS + CALLS + END, ROW, "role 'tool'"),
    "the calls": (BEGIN + ANSWERS + USERS + RESULTS + END, ROW, "tool calls"),
    "the tools": (BEGIN + ANSWERS + USERS + RESULTS + CALLS + END, ROW, "'tools'"),
    "text next to a call": (
        LLAMA,
        {"messages": [user("?"), calls(call({}), content="I look."), result("1"), said("1")]},
        "text next to tool calls",
    ),
    "all, in the plain template": (None, ROW, "tool calls"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_a_template_leaves_out_is_refused(name, tmp_path):
    template, row, part = LEFT_OUT[name]
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=f"a.jsonl, line 1: .*leaves out.*{part}.*{HINT}") as raised:
        tokenized(tmp_path / "a.jsonl", with_template(template), tmp_path)
    assert "\n" not in str(raised.value)


def test_the_plain_template_writes_the_results_of_tools(tmp_path):
    """As the rows of some datasets have them: the calls are a part of the answer's text."""
    messages = [
        user("?"),
        said("<call>f</call>"),
        {"role": "tool", "content": "21"},
        said("It is."),
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
    tokenizer = with_template(None)
    ids = ids_of(tokenized(tmp_path / "a.jsonl", tokenizer, tmp_path))
    assert "### Tool:\n21" in tokenizer.decode(np.where(ids < 0, ~ids, ids))
    assert tokenizer.decode(ids[ids >= 0]) == f"<call>f</call>{EOS}It is.{EOS}"


def test_calls_whose_position_is_unknown():
    """The template writes calls in the turn before, and a text there changes what follows."""
    template = (
        "{{ messages | map(attribute='content') | select('defined') | join(' ') }}"
        "{% for m in messages %}{{ loop.length }}" + CALLS + "{% endfor %}"
    )
    row = {"messages": ASKED}
    assert "its position is unknown" in trained(row, template)
    assert "generation" in trained(row, template)


def with_call(**changes):
    """A row whose only call is changed."""
    wrong = call(PARIS)
    wrong["function"] |= changes
    return {"messages": [user("?"), calls(wrong), said("Yes.")]}


BAD = {
    "a call without a name": (with_call(name=None), "no function with a 'name'"),
    "an empty name": (with_call(name=" "), "no function with a 'name'"),
    "no function": ({"messages": [user("?"), calls({"type": "function"})]}, "'name'"),
    "a call that is no object": ({"messages": [user("?"), calls("f")]}, "list of JSON objects"),
    "calls that are no list": ({"messages": [{**said("x"), "tool_calls": 3}]}, "list of JSON"),
    "arguments that are no JSON": (with_call(arguments="city=Paris"), "are not JSON: 'city=Paris'"),
    "arguments that are a list": (with_call(arguments="[1]"), "not a JSON object but"),
    "a list of arguments": (with_call(arguments=[1]), "not a JSON object but [1]"),
    "deep arguments": (with_call(arguments="[" * 100_000), "are not JSON"),
    "arguments that are not UTF-8": (with_call(arguments={"city": "\ud800"}), "surrogate pair"),
    "half of a pair in JSON": (with_call(arguments='{"city": "\\ud800"}'), "surrogate pair"),
    "a user's call": (
        {"messages": [{**user("?"), "tool_calls": [call({})]}]},
        "only the assistant",
    ),
    "a result without text": (
        {"messages": [*ASKED[:2], result(None)]},
        "'content' is not a string",
    ),
    "a result that is an object": ({"messages": [*ASKED[:2], result({"a": 1})]}, "not a string"),
    "ShareGPT's call without JSON": (
        {"conversations": [{"from": "function_call", "value": "weather(Paris)"}]},
        "the tool calls are not JSON",
    ),
    "tools that are no list": (
        {"messages": ASKED, "tools": {"name": "f"}},
        "'tools' are not a list",
    ),
    "tools that are words": ({"messages": ASKED, "tools": ["weather"]}, "'tools' are not a list"),
    "tools that are no JSON": ({"messages": ASKED, "tools": "weather"}, "'tools' are not JSON"),
    "tools of a pair": ({"prompt": "a", "completion": "b", "tools": TOOLS}, "needs conversations"),
    "half a weight": (
        {"messages": [user("?"), said("x", weight=0.5)]},
        "the weight 0.5: use 0 or 1",
    ),
    "a weight of true": ({"messages": [user("?"), said("x", weight=True)]}, "the weight True"),
    "a weight as text": (
        {"messages": [user("?"), said("x", weight="0")]},
        "the weight '0': use 0 or 1",
    ),
    "train: yes": ({"messages": [user("?"), said("x", train="yes")]}, "'train': 'yes': use true"),
    "train: 1": ({"messages": [user("?"), said("x", train=1)]}, "'train': 1: use true"),
    "both, and they differ": (
        {"messages": [user("?"), said("x", train=True, weight=0)]},
        "leave one out",
    ),
    "a user's message to be trained": (
        {"messages": [{**user("?"), "train": True}]},
        "--train_on all",
    ),
    "no answer left": ({"messages": [user("?"), said("x", weight=0)]}, "has the weight 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_of_tools_and_weights(name):
    row, reason = BAD[name]
    text, _ = encoded(row, QWEN)
    assert isinstance(text, str) and text.startswith("a.jsonl, line 1: ") and reason in text
    assert "\n" not in text and len(text) < 250


# ------------------------------------------------------------------------------- weights of messages


@pytest.mark.parametrize("template", [QWEN, QWEN_BLOCKS], ids=["found", "blocks"])
def test_a_message_with_the_weight_0_is_not_trained(template):
    """Also if another answer is the same text, or it is a call, or the last one."""
    end = "<|im_end|>"
    row = [user("a"), said("Yes."), user("b"), said("No."), user("c"), said("Yes.")]
    for off in ({"weight": 0}, {"train": False}, {"weight": 0.0, "train": False}):
        changed = [*row[:3], {**row[3], **off}, *row[4:5], {**row[5], "weight": 1, "train": True}]
        assert trained({"messages": changed}, template) == f"Yes.{end}Yes.{end}"
        changed = [row[0], {**row[1], **off}, *row[2:5], {**row[5], **off}]
        assert trained({"messages": changed}, template) == f"No.{end}"
    called = {**ROW, "messages": [ASKED[0], {**ASKED[1], "weight": 0}, *ASKED[2:]]}
    assert trained(called, template) == f"It has 21 degrees.{end}"
    answered = {**ROW, "messages": [*ASKED[:3], {**ASKED[3], "train": False}]}
    assert trained(answered, template).endswith(f"</call>{end}")
    # A question has no loss anyway.
    assert trained({"messages": [{**row[0], "weight": 0}, row[1]]}, template) == f"Yes.{end}"


def test_weights_count_behind_a_system_text_and_in_a_completion():
    turns = [
        ("human", "a", None),
        ("gpt", "Yes.", False),
        ("human", "b", None),
        ("gpt", "No.", None),
    ]
    rows = [{"from": role, "value": text, "train": train} for role, text, train in turns]
    assert trained({"conversations": rows, "system": "Be short."}, QWEN) == "No.<|im_end|>"
    completion = [said("Yes.", weight=0), user("b"), said("No.")]
    row = {"prompt": [user("a"), said("Hm."), user("?")], "completion": completion}
    assert trained(row, QWEN) == "No.<|im_end|>"


def test_a_template_with_blocks_that_writes_a_beginning_differently():
    """Where the answer is that has no loss is then not known."""
    template = QWEN_BLOCKS.replace(
        "{%- for message in messages %}",
        "{{- messages | length }}{%- for message in messages %}",
        1,
    )
    row = [user("a"), said("Yes.", weight=0), user("b"), said("No.")]
    assert "differently" in trained({"messages": row}, template)
    del row[1]["weight"]
    assert trained({"messages": row}, template) == "Yes.<|im_end|>No.<|im_end|>"


# ------------------------------------------------------------------------------------- --train_on all


@pytest.mark.parametrize("name", TRAINED)
def test_all_tokens_of_a_conversation_are_trained(name):
    template = TRAINED[name][0]
    assert trained(ROW, template, "all") == whole(ROW, template)
    asked = {"messages": [user("a"), said("Yes.", weight=0), user("b"), said("No.")]}
    text = trained(asked, template, "all")
    assert "Yes" not in text and "No." in text and "a" in text and "b" in text


def test_all_tokens_of_a_pair_and_of_a_prompt_are_trained():
    row = {"prompt": "the fox ", "completion": "jumps"}
    assert trained(row, QWEN, "all") == f"the fox jumps{EOS}"
    assert trained(row, QWEN) == f"jumps{EOS}"
    row = {"prompt": [user("a"), said("b"), user("c")], "completion": [said("d")]}
    assert trained(row, QWEN, "all") == whole(row, QWEN)
    assert "only the assistant's" in trained(
        {"messages": [{**user("a"), "weight": 0}]}, QWEN, "all"
    )
    assert "a<|im_end|>" in trained({"messages": [user("a")]}, QWEN, "all")  # without an answer


def test_answers_that_a_template_changes_are_trained_with_all():
    template = "{% for m in messages %}{{ m.content | upper }}<|eot|>{% endfor %}"
    row = {"messages": [user("a"), said("yes")]}
    assert "its position is unknown" in trained(row, template)
    assert trained(row, template, "all") == "A<|eot|>YES<|eot|>"


def test_the_cache_and_a_stream_follow_train_on(tmp_path):
    rows = [{"messages": [user("a"), said("No.", weight=0), user("b"), said("Yes.")]}] * 8
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = {}
    for train_on in ("assistant", "all"):
        tokenizer, flags = with_template(QWEN), ["--train_on", train_on]
        ids = ids_of(tokenized(tmp_path / "a.jsonl", tokenizer, tmp_path / "cache", *flags))
        stream = stream_of(tmp_path / "a.jsonl", tokenizer, train_on=train_on, seq_length=128)
        [(part, _)] = stream.first_sequence()
        assert np.array_equal(part >= 0, ids[: len(part)] >= 0)
        counts[train_on] = int((ids >= 0).sum())
        assert "Yes." in tokenizer.decode(ids[ids >= 0])
        assert "No." not in tokenizer.decode(ids[ids >= 0])
    assert counts["all"] > 2 * counts["assistant"]


def test_a_resume_with_another_train_on_is_refused():
    def signature(*flags):
        settings = parse_arguments(list(flags))
        return flags_signature(settings.data, settings.training, world_size=1)

    before, everything = signature(), signature("--train_on", "all")
    refuse_other_run(everything, everything, forced=False)
    with pytest.raises(
        UserError, match=r"train_on assistant in the checkpoint, all .*resume_force"
    ):
        refuse_other_run(before, everything, forced=False)
    del before["soft"]["train_on"]  # of an earlier version
    refuse_other_run(before, signature(), forced=False)
    with pytest.raises(UserError, match="train_on assistant"):
        refuse_other_run(before, everything, forced=False)


def test_blocks_that_leave_out_a_call_are_refused():
    """Otherwise the call would silently have no loss, or a loss although its weight is 0."""
    begin_of_calls, end = "{%- for call in message.tool_calls %}", "{%- endgeneration %}"
    assert QWEN_BLOCKS.count(begin_of_calls) == QWEN_BLOCKS.count(end) == 1
    moved = QWEN_BLOCKS.replace(end, "").replace(begin_of_calls, end + begin_of_calls)
    unweighted = {"messages": [ASKED[0], {**ASKED[1], "weight": 0}, *ASKED[2:]]}
    for row, train_on in (({"messages": ASKED}, "assistant"), (unweighted, "all")):
        assert "leave out tool calls" in trained(row, moved, train_on)


def test_a_message_that_is_left_out_is_found_although_another_repeats_it():
    other = "{%- else %}\n{{- '<|im_start|>'"
    no_system = QWEN.replace(other, other.replace("else", "elif message.role == 'user'"))
    assert no_system != QWEN
    messages = [{"role": "system", "content": "Say it"}, user("Say it twice"), said("it it")]
    assert "the message of the role 'system'" in trained({"messages": messages}, no_system)
    assert "leaves out" not in trained({"messages": messages}, QWEN)


@pytest.mark.parametrize("arguments", [None, ""])
def test_a_call_without_arguments(arguments):
    row = {"messages": [user("Now?"), calls(call(arguments)), result("12"), said("12.")]}
    assert '"arguments": {}' in trained(row, QWEN)


def test_the_default_of_train_on_changes_no_digest():
    """A checkpoint of an earlier stream resumes; the digest is of these forms."""
    options = RowOptions((("text", "body"),), "t")
    assert repr(options) == "RowOptions(columns=(('text', 'body'),), chat_template='t')"
    assert options.for_digest() == [(("text", "body"),), "t"]
    every = options._replace(train_on="all")
    assert repr(every) != repr(options) and every.for_digest() != options.for_digest()


def test_an_answer_ends_with_the_token_of_the_template():
    """A base model's configuration has that of a text only."""
    tokenizer = with_template(QWEN)
    ends = end_ids(tokenizer, GenerationConfig(eos_token_id=tokenizer.eos_token_id), is_chat=True)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in ends
    alone = end_ids(tokenizer, GenerationConfig(), is_chat=False)
    assert alone == {tokenizer.eos_token_id}


def test_openais_rows_with_the_template_that_the_messages_name():
    """For a tokenizer without a template: the plain one does not write tools."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    called = {"id": "call_id", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answered = {"role": "tool", "tool_call_id": "call_id", "content": "21."}
    messages = [user("How warm?"), {"role": "assistant", "tool_calls": [called]}, answered]
    tools = [{"type": "function", "function": function}]
    row = {"messages": messages, "tools": tools, "parallel_tool_calls": False}
    file = "recipes/chat_with_tools.jinja"
    refused = trained(row, PLAIN_TEMPLATE)
    assert "leaves out tool calls" in refused and file in refused
    template, call_of_row = (
        (PROJECT / file).read_text("utf-8"),
        'Call: {"name": "f", "arguments": {}}',
    )
    assert trained(row, template) == call_of_row + EOS
    longer = {**row, "messages": [*messages, said("It is 21.", weight=1)]}
    assert trained(longer, template) == f"{call_of_row}{EOS}It is 21.{EOS}"
    text = whole(longer, template)
    assert json.dumps(tools[0]) in text and "### User:\nHow warm?" in text and "21." in text


def test_blocks_where_a_token_has_characters_of_two_messages():
    """A line break after a message, and the next heading: the tokens of a beginning differ."""
    template = (
        "{% for m in messages %}{{ '\n\n' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
    )
    row = {"messages": [user("?"), said("one", weight=0), user("? "), said("two")]}
    assert trained(row, template) == f"two{EOS}"
