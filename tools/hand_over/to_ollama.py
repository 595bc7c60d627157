"""--to ollama: a Modelfile with the chat template and the stop tokens of a trained model.

Ollama's templates are those of Go. The text that the Jinja template writes around the messages is
found by rendering conversations, and becomes a Go template that writes the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from distributed_training.data.chat_template import MARK, Chat, ChatTemplate, answer
from distributed_training.data.conversations import Message
from distributed_training.data.special_tokens import start_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUOTES = '"""'  # around a text of several lines in a Modelfile


class Untranslatable(ValueError):
    """The chat template has no equivalent that this module can write."""


class Around(NamedTuple):
    """What a template writes around the messages: [system] user (assistant user)*."""

    system: tuple[str, str] | None  # before it, and between it and the first question
    first: str  # before the first question, without a system message
    answer: tuple[str, str]  # before an earlier answer, and between it and the next question
    last: str  # after the last question: the prompt of the answer

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation that ends with a question, as Ollama renders it."""
        text = ""
        for number, message in enumerate(messages):
            content = message["content"]
            if message["role"] == "system":
                before, after = self.system or ("", "")
                text += f"{before}{content}{after}"
            elif message["role"] == "assistant":
                text += f"{self.answer[0]}{content}{self.answer[1]}"
            else:
                is_last = number == len(messages) - 1
                text += f"{'' if number else self.first}{content}{self.last if is_last else ''}"
        return text

    def as_go(self) -> str:
        """Return the same as a Go template.

        Raises:
            Untranslatable: a text cannot be written in a Modelfile.
        """
        before, after = map(_literal, self.system or ("", ""))
        first, last = _literal(self.first), _literal(self.last)
        before_answer, after_answer = map(_literal, self.answer)
        content = "{{ .Content }}"
        return (
            "{{- range $i, $_ := .Messages }}"
            "{{- $last := eq (len (slice $.Messages $i)) 1 }}"
            f'{{{{- if eq .Role "system" }}}}{before}{content}{after}'
            f'{{{{- else if eq .Role "assistant" }}}}{before_answer}{content}{after_answer}'
            f"{{{{- else }}}}{{{{ if eq $i 0 }}}}{first}{{{{ end }}}}{content}"
            f"{{{{ if $last }}}}{last}{{{{ end }}}}{{{{ end }}}}{{{{- end }}}}"
        )


def _literal(text: str) -> str:
    """Return a text as a part of a Go template in a Modelfile.

    White space at an end would be trimmed by the markers next to it, so it is quoted.
    """
    if QUOTES in text or "`" in text or "\r" in text:
        raise Untranslatable("it writes quotes that a Modelfile cannot contain")
    return f"{{{{ {_quoted(text)} }}}}" if text else ""


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + escaped.replace("\t", "\\t") + '"'


def around_messages(tokenizer: PreTrainedTokenizerBase) -> Around:
    """Return what a chat template writes around the messages.

    The engine begins each prompt as the tokenizer does, so the start token is left out.

    Raises:
        Untranslatable: the template refuses a conversation, or what it writes depends on more than
            the roles of the messages.
    """
    template = ChatTemplate(tokenizer)
    start = "".join(tokenizer.convert_ids_to_tokens(start_of(tokenizer)))

    def pieces(*roles: str) -> list[str]:
        messages = [_message(role, MARK.format(number)) for number, role in enumerate(roles)]
        try:
            text = template.render(Chat(messages), add_generation_prompt=True)
        except ValueError as error:
            raise Untranslatable(str(error)) from error
        found = re.split("\ue000\\d+\ue001", text.removeprefix(start))
        if len(found) != len(roles) + 1:
            raise Untranslatable("it leaves a message out, or writes it twice")
        return found

    first, before, after, last = pieces("user", "assistant", "user")
    try:
        system = pieces("system", "user")
    except Untranslatable:
        system = []
    found = Around((system[0], system[1]) if system else None, first, (before, after), last)
    for conversation in CONVERSATIONS:
        has_system = conversation[0]["role"] == "system"
        if has_system and not system:
            continue
        expected = template.render(Chat(conversation), add_generation_prompt=True)
        if found.render(conversation) != expected.removeprefix(start):
            raise Untranslatable("what it writes depends on more than the roles of the messages")
    return found


def _message(role: str, content: str) -> Message:
    return answer(content) if role == "assistant" else {"role": role, "content": content}


_TURNS = [_message(r, t) for r, t in (("user", "One."), ("assistant", "Two."), ("user", "3 4"))]
_SYSTEM = _message("system", "Be short.")
CONVERSATIONS = (
    _TURNS[:1],
    _TURNS,
    [*_TURNS, answer("Five."), _message("user", "six")],
    [_SYSTEM, *_TURNS[:1]],
    [_SYSTEM, *_TURNS],
)


def modelfile(weights: str, template: str | None, stops: Sequence[str]) -> str:
    """Return the text of a Modelfile.

    Args:
        weights: the GGUF file, or the folder of the model, as seen from the Modelfile.
        template: a Go template; None: none is written, and Ollama uses its own.
        stops: the tokens at which an answer ends.
    """
    lines = [f"FROM {weights}"]
    if template is not None:
        lines.append(f"TEMPLATE {QUOTES}{template}{QUOTES}")
    lines += [f"PARAMETER stop {_quoted(stop)}" for stop in stops]
    return "\n".join(lines) + "\n"
