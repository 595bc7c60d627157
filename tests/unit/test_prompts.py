"""What --generate continues."""

from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from support.data.chat import prompt_for, prompt_of
from support.errors import UserError

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def tokenizer(tiny_tokenizer):
    return AutoTokenizer.from_pretrained(tiny_tokenizer)


def test_prompt_is_a_users_message_for_a_chat_model(tokenizer):
    plain = prompt_of("the dog", tokenizer, True)  # no template
    tokenizer.chat_template = TEMPLATE
    chat, text = (prompt_of("the dog", tokenizer, as_chat) for as_chat in (True, False))
    assert tokenizer.decode(plain.ids) == "the dog" and text == plain and not plain.is_chat
    assert tokenizer.decode(chat.ids) == "[user] the dog[assistant]" and chat.is_chat


def test_template_that_refuses_the_prompt(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(UserError, match="--chat_template"):
        prompt_of("the dog", tokenizer, True)


@pytest.mark.parametrize(
    "kind, eval_only, is_chat",
    [
        ("chat", False, True),
        ("text", False, False),
        (None, False, False),  # a stream before its first row
        ("text", True, True),
        ("pair", True, False),
    ],
)
def test_what_is_prompted_with_the_template(tokenizer, kind, eval_only, is_chat):
    tokenizer.chat_template = TEMPLATE  # as base models have, too
    args = SimpleNamespace(generate="the dog", eval_only=eval_only)
    spec = SimpleNamespace(tokenizer=tokenizer)
    assert prompt_for(args, spec.tokenizer, {"kind": kind}).is_chat is is_chat
