"""The tools of a conversation, and the assistant's calls of them, in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypedDict

from distributed_training.files.user_files import shown

Tool = dict[str, object]  # the JSON schema of a function that the model may call


class Function(TypedDict):
    """What a tool call calls."""

    name: str
    arguments: dict[str, object]


class _ToolCall(TypedDict):
    type: str  # "function"
    function: Function


class ToolCall(_ToolCall, total=False):
    """A call of a tool by the assistant."""

    id: str


def tools_of(value: object) -> list[Tool]:
    """Return the tools of a row: a list of JSON schemas, which may be JSON text.

    Templates expect {"type": "function", "function": schema}; a schema alone is put into one.

    Raises:
        ValueError: the value is something else.
    """
    if isinstance(value, str):
        value = _parsed(value, "'tools'") if value.strip() else None
    tools = _objects(value, "'tools'") if value else []
    is_alone = [("name" in tool and "function" not in tool) for tool in tools]
    return [
        {"type": "function", "function": tool} if alone else tool
        for tool, alone in zip(tools, is_alone, strict=True)
    ]


def calls_of(value: object) -> list[ToolCall]:
    """Return the tool calls of a message: a list of calls or one, which may be JSON text.

    Raises:
        ValueError: a call has no function with a name and a JSON object of arguments.
    """
    if isinstance(value, str):
        value = _parsed(value, "the tool calls")
    value = [value] if isinstance(value, dict) else value
    return [_call(call) for call in _objects(value, "the tool calls")]


def _call(call: Mapping[str, object]) -> ToolCall:
    function = call.get("function", call)  # which may stand alone
    name = function.get("name") if isinstance(function, dict) else None
    if call.get("type") not in (None, "function") or not isinstance(name, str) or not name.strip():
        raise ValueError(f"a tool call has no function with a 'name': {shown(repr(call), 60)}")
    assert isinstance(function, dict)
    # Some datasets have none for a function without parameters.
    arguments, what = (
        function.get("arguments") or {},
        f"the 'arguments' of the tool call {shown(name)}",
    )
    if isinstance(arguments, str):
        arguments = _parsed(arguments, what)
    if not isinstance(arguments, dict):
        raise ValueError(f"{what} are not a JSON object but {shown(repr(arguments), 40)}")
    found: ToolCall = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(number := call.get("id"), str):
        found["id"] = number
    return found


def _objects(value: object, what: str) -> list[dict[str, object]]:
    if not isinstance(value, list) or not value or any(not isinstance(one, dict) for one in value):
        raise ValueError(f"{what} are not a list of JSON objects but {shown(repr(value), 40)}")
    _check_utf_8(value)
    return value


def _parsed(text: str, what: str) -> object:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} are not JSON: {shown(repr(text), 40)}") from error
    _check_utf_8(value)
    return value


def _check_utf_8(value: object) -> None:
    """Raise a UnicodeEncodeError if JSON has half of a surrogate pair."""
    json.dumps(value, ensure_ascii=False).encode()
