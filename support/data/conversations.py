"""Conversations and prompt-completion pairs, from the keys of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from support.files.user_files import shown

Message = dict[str, str]  # with the keys "role" and "content"
Template = str | dict[str, str] | None  # a tokenizer's chat template, or several by name

# For tokenizers without a chat template, such as GPT-2's: plain headings, and the end-of-text token
# (if the tokenizer has one) after each answer.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}### Assistant:\n"
    "{{ message['content'] }}{{ eos_token }}\n\n"
    "{% else %}### {{ message['role'] | capitalize }}:\n{{ message['content'] }}\n\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
# Keys of a message whose values would not be trained on: only text is.
UNSUPPORTED = (
    *("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"),
    *("images", "image", "audio"),
)
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}  # ShareGPT's names
ROLES |= {name: name for name in ("system", "developer", "user", "assistant")}
# The prompt of the Alpaca dataset (github.com/tatsu-lab/stanford_alpaca), for models without a chat
# template. The completion follows without a space, as in the project's own training script.
ALPACA_PREAMBLE = (
    "Below is an instruction that describes a task{}. "
    "Write a response that appropriately completes the request."
)
ALPACA_INPUT = ", paired with an input that provides further context"


class Content(TypedDict, total=False):
    """The fields of a `rows.Row` that differ by its format."""

    kind: str
    format: str
    messages: list[Message]
    context: int
    prompt: str
    completion: str


def convert(row: Mapping[str, object], template: Template) -> Content:
    """Return the content of a row.

    Args:
        row: values of the keys of a format.
        template: the tokenizer's chat template. Without one, Alpaca's rows become pairs.
    Raises:
        ValueError: the row cannot be used, or is not UTF-8.
    """
    system: list[Message] = []
    if row.get("system"):
        system = [{"role": "system", "content": _text(row, "system")}]
    for key in ("messages", "conversations"):
        if key in row:
            return {"kind": "chat", "messages": system + _messages(row, key)}
    if "instruction" in row:
        return _alpaca(row, system, as_chat=bool(template) and not is_plain(template))
    if isinstance(row["prompt"], list) or isinstance(row["completion"], list):
        prompt, completion = _messages(row, "prompt"), _messages(row, "completion")
        name = "prompt and completion, each a list of messages"
        messages = prompt + completion
        return {"kind": "chat", "format": name, "messages": messages, "context": len(prompt)}
    return {"kind": "pair", "prompt": _text(row, "prompt"), "completion": _text(row, "completion")}


def _alpaca(row: Mapping[str, object], system: list[Message], as_chat: bool) -> Content:
    task, answer = _text(row, "instruction"), _text(row, "output")
    context = _text(row, "input") if row["input"] else ""
    if as_chat:
        asked = {"role": "user", "content": "\n".join(filter(None, (task, context)))}
        messages = [*system, asked, {"role": "assistant", "content": answer}]
        return {"kind": "chat", "messages": messages}
    preamble = ALPACA_PREAMBLE.format(ALPACA_INPUT if context else "")
    preamble = system[0]["content"] if system else preamble
    heading = f"\n\n### Input:\n{context}" if context else ""
    question = f"{preamble}\n\n### Instruction:\n{task}{heading}\n\n### Response:"
    return {"kind": "pair", "prompt": question, "completion": answer}


def _messages(row: Mapping[str, object], name: str) -> list[Message]:
    messages = row[name]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{name!r} is not a list of messages")
    return [_message(message) for message in messages]


def _message(message: object) -> Message:
    """Return a message with `role` and `content` (ShareGPT: `from` and `value`)."""
    if not isinstance(message, dict):
        raise ValueError("a message is not an object with 'role' and 'content'")
    keys = ("role", "content") if message.get("role") is not None else ("from", "value")
    role, content = (message.get(key) for key in keys)
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"a message has the role {shown(repr(role))}: use one of {list(ROLES)}")
    if lost := [key for key in UNSUPPORTED if message.get(key)]:
        raise ValueError(f"{lost[0]!r} is not supported: only text is trained on")
    if message.get("weight") not in (None, 1):
        raise ValueError(
            f"a message has the weight {shown(message['weight'])}: only 1 is supported"
        )
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise ValueError(f"a message has {shown(content)}: only text is trained on")
        content = "".join(_text(part, "text") for part in content)
    return {"role": ROLES[role], "content": _text({keys[1]: content}, keys[1])}


def _text(row: Mapping[str, object], key: str) -> str:
    text = row.get(key)
    if not isinstance(text, str):
        raise ValueError(f"{key!r} is not a string but {shown(repr(text), 40)}")
    text.encode()
    return text


def is_plain(template: Template) -> bool:
    """Return whether a chat template is the one of `use_plain_template`."""
    return isinstance(template, str) and template.endswith(PLAIN_TEMPLATE)
