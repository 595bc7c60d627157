"""What a template writes between the generation prompt and the text of an answer: it is trained, or
a notice says that the prompt lacks it.
"""

import numpy as np
import pytest
from tool_templates import QWEN, with_template

from distributed_training.data.chat import Encoder
from distributed_training.data.chat_notices import notices_about
from distributed_training.data.examples import encode_example
from distributed_training.data.rows import BadRow, RowOptions, read_row

BLOCK = "<think>\n\n</think>\n\n"
END = "<|im_end|>"


def chatml(before="", prompt=""):
    """ChatML with statements before an answer, and a text at the end of the generation prompt."""
    return (
        "{%- set last = namespace(n=-1) %}"
        "{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.n = loop.index0 %}"
        "{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
        f"{{%- if m.role == 'assistant' %}}{before}{{%- endif %}}"
        "{{- m.content or '' }}"
        "{%- for call in m.tool_calls %}{{- '<call>' + call.function | tojson }}{%- endfor %}"
        "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}"
        f"{{{{- '<|im_start|>assistant\\n{prompt}' }}}}{{%- endif %}}"
    )


def in_blocks(before="", inside=""):
    """ChatML with {% generation %} blocks, and statements before and in them."""
    return (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
        f"{{%- if m.role == 'assistant' %}}{before}{{%- generation %}}{inside}"
        "{{- m.content + '<|im_end|>' }}{%- endgeneration %}"
        "{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )


ALWAYS = "{{- '<think>\\n\\n</think>\\n\\n' }}"
AT_THE_END = "{%- if loop.index0 > last.n %}" + ALWAYS + "{%- endif %}"  # as Qwen3
CHANNEL = (  # as gpt-oss: the name of a channel follows the prompt
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|im_start|>assistant<|head|>final<|/head|>{{ m.content }}<|im_end|>"
    "{% else %}<|im_start|>{{ m.role }}<|/head|>{{ m.content }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
INST = (  # no generation prompt
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %}BLOCK{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# A template, and what is trained of two answers.
TRAINED = {
    "usual": (chatml(), "one<|im_end|>two<|im_end|>"),
    "with tools": (QWEN, "one<|im_end|>two<|im_end|>"),
    "each answer": (chatml(ALWAYS), f"{BLOCK}one<|im_end|>{BLOCK}two<|im_end|>"),
    "the last answer": (chatml(AT_THE_END), f"one<|im_end|>{BLOCK}two<|im_end|>"),
    "in the prompt": (chatml(ALWAYS, "<think>\\n\\n</think>\\n\\n"), "one<|im_end|>two<|im_end|>"),
    "a part in the prompt": (
        chatml(ALWAYS, "<think>"),
        "\n\n</think>\n\none<|im_end|>\n\n</think>\n\ntwo<|im_end|>",
    ),
    "only in the prompt": (chatml("", "<think>\\n"), "one<|im_end|>two<|im_end|>"),
    "a line break": (chatml("{{- '\\n' }}"), "\none<|im_end|>\ntwo<|im_end|>"),
    "a channel": (CHANNEL, "{0}one<|im_end|>{0}two<|im_end|>".format("<|head|>final<|/head|>")),
    "before a generation block": (in_blocks(ALWAYS), "one<|im_end|>two<|im_end|>"),
}
ROW = {
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "two"},
    ]
}


def trained(row, template, train_on="assistant"):
    """The text of the trained tokens."""
    tokenizer = with_template(template)
    tokenizer.add_tokens(["<think>", "</think>"])
    found = read_row(row, "line 1", RowOptions(chat_template=template, train_on=train_on))
    example = encode_example(Encoder(tokenizer), found)
    assert not isinstance(example, BadRow), str(example)
    return tokenizer.decode(example.ids[example.ids >= 0])


@pytest.mark.parametrize("name", TRAINED)
def test_what_follows_the_generation_prompt_is_trained(name):
    template, wanted = TRAINED[name]
    assert trained(ROW, template) == wanted


def test_a_template_that_writes_a_beginning_differently():
    """The number of messages is in the first line, so no beginning is a part of the whole."""
    assert trained(ROW, "{{ messages | length }}" + chatml(ALWAYS)) == (
        f"{BLOCK}one{END}{BLOCK}two{END}"
    )


def test_before_a_call_and_with_the_weight_0():
    function = {"name": "f", "arguments": {"a": 1}}
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    row = {"messages": [{"role": "user", "content": "a"}, called]}
    text = trained(row, chatml(AT_THE_END))
    assert text.startswith(BLOCK + "<call>") and text.endswith("}" + END)
    ignored = [{**message} for message in ROW["messages"]]
    ignored[1]["weight"] = 0
    assert trained({"messages": ignored}, chatml(ALWAYS)) == f"{BLOCK}two{END}"
    rest = f"<|im_start|>user\na{END}\n<|im_start|>assistant\n\n<|im_start|>user\nb{END}\n"
    rest += f"<|im_start|>assistant\n{BLOCK}two{END}\n"
    assert trained({"messages": ignored}, chatml(ALWAYS), "all") == rest


def test_the_same_tokens_as_the_answer_to_the_prompt():
    """The prompt of --generate and the trained tokens are the whole conversation."""
    template = chatml(ALWAYS)
    tokenizer = with_template(template)
    row = read_row({"messages": ROW["messages"][:2]}, "line 1", RowOptions(chat_template=template))
    ids = encode_example(Encoder(tokenizer), row).ids
    asked = tokenizer.apply_chat_template(
        ROW["messages"][:1], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(~ids[: int(np.argmax(ids >= 0))]) == asked


@pytest.mark.parametrize(
    "template, told",
    [
        (chatml(), None),
        (chatml(ALWAYS), None),
        (CHANNEL, None),
        (INST.replace("BLOCK", " "), None),
        (INST.replace("BLOCK", "<think></think>"), "'<think></think>'"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot|>{% endfor %}", "'assistant:'"),
        (in_blocks(), None),
        (in_blocks(inside=ALWAYS), None),
        (in_blocks(ALWAYS), "'<think>\\n\\n</think>'"),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_a_notice_if_the_prompt_lacks_what_is_not_trained(template, told):
    found = notices_about(with_template(template))
    assert len(found) == (told is not None), found
    assert told is None or (told in found[0] and "add_generation_prompt" in found[0])
