"""What the model continues: a conversation with its history, or one text after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from distributed_training.data.chat_template import Chat, ChatTemplate
from distributed_training.data.conversations import Message
from distributed_training.data.special_tokens import start_of
from distributed_training.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Unanswerable(UserError):
    """A text that the model cannot continue, such as one that is too long; others may do."""


class Input(NamedTuple):
    """What the model continues."""

    ids: list[int]
    notice: str = ""  # for the user: what was left out


class Texts:
    """Texts of the user, which are continued without what came before."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int) -> None:
        self.tokenizer, self.most = tokenizer, most  # see Conversation
        self.start = start_of(tokenizer)

    def ask(self, text: str) -> Input:
        """Return the ids of a text, without its beginning if it is too long.

        Raises:
            Unanswerable: the tokenizer returns no token, so there is nothing to continue.
        """
        ids = self.start + self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise Unanswerable(f"The tokenizer returns no token for {text!r}: type another text.")
        if len(ids) <= self.most:
            return Input(ids)
        notice = f"The text has {len(ids)} tokens: only the last {self.most} are continued."
        return Input(ids[-self.most :], notice)

    def answered(self, text: str) -> None:
        """Do nothing: the next text is a new one."""


class Conversation:
    """A conversation in the tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int, system: str | None) -> None:
        """Start a conversation.

        Args:
            most: tokens of the conversation that leave positions for an answer.
            system: the system message, or None.
        Raises:
            UserError: the chat template has an error, or refuses or leaves out the system message.
        """
        self.tokenizer, self.most = tokenizer, most
        self.template = ChatTemplate(tokenizer)
        self.system: list[Message] = []
        self.messages: list[Message] = []  # of the user and the model, by turns
        if system:
            self.system = [{"role": "system", "content": system}]
            try:
                kept = system.strip() in self._render([{"role": "user", "content": "a"}])
            except ValueError as error:
                raise UserError(f"--system: {error}: leave it out.") from error
            if not kept:
                raise UserError("--system: this model's chat template ignores the system message.")

    def ask(self, text: str) -> Input:
        """Add a message of the user, and return the ids of the conversation.

        If it is too long, its oldest turns (a question and its answer) are forgotten.

        Raises:
            Unanswerable: the message alone is too long.
            UserError: the chat template refuses the conversation.
        """
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        left_out = 0
        while len(ids := self._encode(messages)) > self.most and len(messages) > 1:
            del messages[:2]
            left_out += 1
        if len(ids) > self.most:
            raise Unanswerable(
                f"The message has {len(ids)} tokens in the chat template, and the model takes "
                f"{self.most} here: shorten it."
            )
        self.messages = messages
        what = "turn is" if left_out == 1 else f"{left_out} turns are"
        notice = f"The conversation is too long for the model: its oldest {what} left out."
        return Input(ids, notice if left_out else "")

    def answered(self, text: str) -> None:
        """Add the model's answer."""
        self.messages.append({"role": "assistant", "content": text})

    def start_anew(self) -> None:
        """Forget all messages but the system message."""
        self.messages.clear()

    def _render(self, messages: list[Message]) -> str:
        return self.template.render(Chat([*self.system, *messages]), add_generation_prompt=True)

    def _encode(self, messages: list[Message]) -> list[int]:
        try:
            text = self._render(messages)
        except ValueError as error:
            raise UserError(f"The conversation cannot be rendered: {error}.") from error
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
