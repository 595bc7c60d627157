"""The conversation that scripts/chat.py continues."""

import pytest
from tool_templates import QWEN, with_template

from tools.chat.conversation import Conversation, Unanswerable


def test_a_conversation_keeps_its_history_if_a_message_is_too_long():
    conversation = Conversation(with_template(QWEN), 60, None)
    conversation.ask("How are you?")
    conversation.answered("Well.")
    before = [*conversation.messages]
    with pytest.raises(Unanswerable):
        conversation.ask("many words " * 99)
    assert conversation.messages == before
