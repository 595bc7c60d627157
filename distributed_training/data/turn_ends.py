"""The tokens that end an assistant's turn: short conversations are encoded as in training.

A template may end the last answer, an answer before another question, and tool calls in different
ways. GLM-4's, for example, has no end token: the role of the next message ends a turn.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from distributed_training.data.chat import Encoder
from distributed_training.data.chat_template import EXAMPLE_CALL, EXAMPLE_TOOL, answer
from distributed_training.data.conversations import Message
from distributed_training.data.rows import Row
from distributed_training.data.special_tokens import end_finder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASKED: Message = {"role": "user", "content": "a"}
CALLED: Message = {"role": "assistant", "tool_calls": [EXAMPLE_CALL]}
RESULT: Message = {"role": "tool", "content": "b", "name": "f", "tool_call_id": "a" * 9}
CALLING = [ASKED, CALLED, RESULT, answer("d")]
CONVERSATIONS = (
    Row("", "chat", messages=[ASKED, answer("c")]),
    Row("", "chat", messages=[ASKED, answer("c"), ASKED, answer("d")]),
    Row("", "chat", messages=CALLING),
    Row("", "chat", messages=CALLING, tools=[EXAMPLE_TOOL]),
)


def ends_of_encoded_turns(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of the trained tokens that end the assistant's turns."""
    if not tokenizer.is_fast:  # it does not give the characters of a token
        return set()
    encoder, found = Encoder(tokenizer), set()
    find = end_finder(tokenizer, encoder.template.ends_of_turns)
    for conversation in CONVERSATIONS:
        with contextlib.suppress(ValueError):  # many templates have no tools
            ids = encoder.encode(conversation).ids
            while end := find(ids):
                found.add(int(ids[end - 1]))
                ids = ids[end:]
    return found
