"""Reads what the user types, and prints the answers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from distributed_training.console import visible
from distributed_training.errors import UserError
from tools.chat.conversation import Conversation, Texts, Unanswerable
from tools.chat.speaker import Sampling, Speaker

NEW = "/new"  # typed by the user: starts a new conversation


def talk(speaker: Speaker, partner: Conversation | Texts, sampling: Sampling) -> None:
    """Answer each line until the input ends (Ctrl-D).

    On a terminal Ctrl-C ends an answer, and a line that cannot be answered is reported.

    Raises:
        KeyboardInterrupt: Ctrl-C, while nothing is generated or without a terminal.
        UserError: a line cannot be answered.
    """
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if on_terminal:
        how = "each line is continued"
        if isinstance(partner, Conversation):
            how = f"{NEW} starts a new conversation"
        print(f"💬 {speaker.title}: {how}, Ctrl-C stops an answer, Ctrl-D ends.")
    for line in lines(on_terminal):
        if isinstance(partner, Conversation) and line.strip() == NEW:
            partner.start_anew()
        elif line.strip():
            try:
                given = partner.ask(line)
            except Unanswerable as error:
                if not on_terminal:
                    raise
                print(visible(f"❌ {error}"), file=sys.stderr)
                continue
            if given.notice:
                print(f"ℹ️  {given.notice}", file=sys.stderr)
            partner.answered(speaker.answer(given.ids, sampling, may_be_stopped=on_terminal))


def lines(on_terminal: bool) -> Iterator[str]:
    """Yield the lines of the input, without their ends; on a terminal after a prompt."""
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    if not on_terminal:
        try:
            for line in sys.stdin:
                yield line.rstrip("\r\n")
        except OSError as error:  # it is open for writing only, as under nohup
            reason = f"Standard input cannot be read: {error.strerror}"
            raise UserError(f"{reason}. Give a file or a pipe with the lines to answer.") from error
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() then has a history and can be edited
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
