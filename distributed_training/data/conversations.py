"""Conversations and prompt-completion pairs, from the keys of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from distributed_training.data.refused_rows import TOOL_KEYS
from distributed_training.data.tools import Tool, ToolCall, calls_of, tools_of
from distributed_training.files.user_files import shown

Template = str | dict[str, str] | None  # a tokenizer's chat template, or several by name


class _Message(TypedDict):
    role: str


class Message(_Message, total=False):
    """A message of a conversation. One that only calls tools may have no content."""

    content: str
    tool_calls: list[ToolCall]  # of the assistant
    tool_call_id: str  # of a tool's message, like `name`
    name: str


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
# Keys of a message whose values would not be trained on: only text and tool calls are.
UNSUPPORTED = (
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
    "images",
    "image",
    "audio",
)
CALL = "function_call"  # the role of a ShareGPT message that has a tool call as JSON
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}  # ShareGPT's names
ROLES |= {CALL: "assistant", "observation": "tool"}
ROLES |= {name: name for name in ("system", "developer", "user", "assistant", "tool")}
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
    tools: list[Tool]
    untrained: list[int]
    pieces: list[str]
    context: int
    prompt: str
    completion: str


def conversation(row: Mapping[str, object], messages: Sequence[object]) -> Content:
    """Return a conversation of messages as a row has them, after those of its other keys."""
    system = _system(row)
    converted = [_message(message) for message in messages]
    pairs = zip(messages, converted, strict=True)
    kept = [_is_trained(message, role=found["role"]) for message, found in pairs]
    content: Content = {"kind": "chat", "messages": system + converted}
    if not all(kept):
        content["untrained"] = [n for n, keep in enumerate(kept, len(system)) if not keep]
    if tools := tools_of(row.get("tools")):
        content["tools"] = tools
    return content


def _system(row: Mapping[str, object]) -> list[Message]:
    return [{"role": "system", "content": text_of(row, "system")}] if row.get("system") else []


def instruction(row: Mapping[str, object], as_chat: bool) -> Content:
    """Return a row of Alpaca's keys as a conversation, or as a pair.

    Args:
        as_chat: whether the tokenizer has a chat template, other than the plain one.
    """
    system = _system(row)
    task, answer = text_of(row, "instruction"), text_of(row, "output")
    context = text_of(row, "input") if row["input"] else ""
    if as_chat:
        asked: Message = {"role": "user", "content": "\n".join(filter(None, (task, context)))}
        messages: list[Message] = [*system, asked, {"role": "assistant", "content": answer}]
        return {"kind": "chat", "messages": messages}
    preamble = ALPACA_PREAMBLE.format(ALPACA_INPUT if context else "")
    preamble = system[0]["content"] if system else preamble
    heading = f"\n\n### Input:\n{context}" if context else ""
    question = f"{preamble}\n\n### Instruction:\n{task}{heading}\n\n### Response:"
    return {"kind": "pair", "prompt": question, "completion": answer}


def messages_of(row: Mapping[str, object], name: str) -> list[object]:
    """Return the messages under a key of a row; they are not checked.

    Raises:
        ValueError: they are no list, or an empty one.
    """
    messages = row[name]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{name!r} is not a list of messages")
    return messages


def _message(message: object) -> Message:
    """Return a message with `role` and `content` (ShareGPT: `from` and `value`)."""
    if not isinstance(message, dict):
        raise ValueError("a message is not an object with 'role' and 'content'")
    keys = ("role", "content") if message.get("role") is not None else ("from", "value")
    role, content = (message.get(key) for key in keys)
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"a message has the role {shown(repr(role))}: use one of {list(ROLES)}")
    if lost := [key for key in UNSUPPORTED if message.get(key)]:
        raise ValueError(f"{lost[0]!r} is not supported: only text and tool calls are trained on")
    if tools := [key for key in ("tools", *TOOL_KEYS) if message.get(key)]:
        raise ValueError(f"a message has {tools[0]!r}: write them as 'tools' of the row")
    calls, found = message.get("tool_calls"), Message(role=ROLES[role])
    if role == CALL:
        calls, content = content, None
    if calls or role == CALL:
        if found["role"] != "assistant":
            raise ValueError(f"the role {role!r} has tool calls: only the assistant's may")
        found["tool_calls"] = calls_of(calls)
    if content is not None or not calls:
        found["content"] = _content(content, keys[1])
    if found["role"] == "tool":
        for key in ("tool_call_id", "name"):
            if message.get(key) is not None:
                found[key] = text_of(message, key)  # type: ignore[literal-required]
    return found


def _content(content: object, key: str) -> str:
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise ValueError(f"a message has {shown(content)}: only text is trained on")
        content = "".join(text_of(part, "text") for part in content)
    return text_of({key: content}, key)


def _is_trained(message: object, role: str) -> bool:
    """Return whether `train` and `weight` keep a message in the loss."""
    assert isinstance(message, dict)  # _message has checked it
    train, weight = message.get("train"), message.get("weight")
    if not isinstance(train, bool | None):
        raise ValueError(f"a message has 'train': {shown(repr(train))}: use true or false")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise ValueError(f"a message has the weight {shown(repr(weight))}: use 0 or 1")
    if train is not None and weight is not None and train != weight:
        raise ValueError(f"a message has 'train': {train} and the weight {weight}: leave one out")
    if train and role != "assistant":
        raise ValueError(
            f"a message of the role {role!r} has 'train': true: only the assistant's messages are "
            "trained, or all with --train_on all"
        )
    return train is not False and weight != 0


def text_of(row: Mapping[str, object], key: str) -> str:
    """Return the text under a key of a row.

    Raises:
        ValueError: it is no text, or not UTF-8.
    """
    text = row.get(key)
    if not isinstance(text, str):
        raise ValueError(f"{key!r} is not a string but {shown(repr(text), 40)}")
    text.encode()
    return text


def is_plain(template: Template) -> bool:
    """Return whether a chat template is the one of `use_plain_template`."""
    return isinstance(template, str) and template.endswith(PLAIN_TEMPLATE)
