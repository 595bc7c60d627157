"""A prompt of a comparison, and its limits."""

from typing import NamedTuple

from distributed_training.data.conversations import Message

NEW_TOKENS = 32  # of an answer
LONGEST = 128  # tokens of a prompt
CONTEXT = 2 * (LONGEST + NEW_TOKENS)  # a wrong template, or other tokens, may make prompts longer


class Prompt(NamedTuple):
    """A text to continue, or a conversation to answer."""

    text: str  # of a conversation: as the chat template writes it
    messages: tuple[Message, ...] = ()

    @property
    def is_chat(self) -> bool:
        """Whether an engine gets the messages, and writes them itself."""
        return bool(self.messages)
