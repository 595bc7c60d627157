"""The prompts of a comparison: texts and conversations, of the run's data and with edge cases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from distributed_training.data.chat_template import answer
from distributed_training.data.conversations import Message
from distributed_training.errors import UserError
from distributed_training.files.json_types import JsonObject
from tools.hand_over.prompt import LONGEST, NEW_TOKENS, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distributed_training.data.rows import Row
    from tools.hand_over.reference import Reference

PROMPTS = 20
CHATS = 12  # of the prompts, for a model that answers
ROWS = 400  # of the data, from which prompts are taken
# Where the rules of tokenizers differ: digits, spaces, contractions, line breaks, other scripts.
TEXTS = (
    "The year 1999 had 365 days, and 1234567890 seconds are 31 years.",
    "  two spaces,   three spaces, and\ta tab ",
    "x = [10, 200]\n    return  None\n\n\ndef f(a_b):\n",
    "It's the dog's; we've seen that they'll say I'M HERE.",
    "Gr\u00f6\u00dfe, na\u00efve caf\u00e9, \u4eba\u5de5\u667a\u80fd \U0001f680!!! ... (a) [b]",
)


class NotHere(UserError):
    """A dataset of the hub, which is not read."""


def user(text: str) -> Message:
    """Return a message of the user."""
    return {"role": "user", "content": text}


SYSTEM: Message = {"role": "system", "content": "You are a helpful assistant. Be short."}
CONVERSATIONS: tuple[list[Message], ...] = (
    [user("What is the largest file?")],
    [SYSTEM, user("What is the largest file?")],
    [user("One?"), answer("Two."), user("And 3?")],
    [SYSTEM, user("One?"), answer("Two."), user("And 3?")],
    [user("Say nothing."), answer(""), user("Why?")],
    [user(TEXTS[0])],
    [user("x = [10, 200]\n    return  None\n\ny   =  1")],
    [user(TEXTS[4])],
)


def prompts_of(reference: Reference, rows: Iterable[Row]) -> list[Prompt]:
    """Return PROMPTS prompts; those of a model that answers are mostly conversations.

    Args:
        rows: of the run's data, of any kind; if they are few, Python's reference is used as well.
    """
    rows = list(itertools.islice(rows, ROWS))
    positions = reference.positions or 2**31
    longest = max(1, min(LONGEST, positions - NEW_TOKENS))

    def fits(prompt: Prompt) -> bool:
        return 0 < len(reference.ids_of(prompt)) <= longest

    found: list[Prompt] = []
    if reference.is_chat:
        asked = map(_question_of, filter(lambda row: row.kind == "chat", rows))
        chats = itertools.chain(CONVERSATIONS, _spread(list(filter(None, asked))))
        found = list(itertools.islice(filter(fits, _rendered(chats, reference)), CHATS))
    shorten = _shortener(reference.tokenizer, longest - len(reference.start))
    documents = _spread([text for row in rows if (text := _text_of(row))])
    texts = itertools.chain(TEXTS, documents, _reference_text())
    for text in dict.fromkeys(map(shorten, texts)):
        if len(found) == PROMPTS:
            break
        if fits(prompt := Prompt(text)):
            found.append(prompt)
    return found


def _rendered(chats: Iterable[list[Message]], reference: Reference) -> Iterator[Prompt]:
    """Yield conversations as prompts, without those that the chat template refuses."""
    for messages in chats:
        try:
            yield Prompt(reference.render(messages), tuple(messages))
        except ValueError:
            continue


def _question_of(row: Row) -> list[Message]:
    """Return a conversation up to its last question; [] if it calls tools, or has no question."""
    messages = list(row.messages)
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if row.tools or any("content" not in each or each["role"] == "tool" for each in messages):
        return []
    return messages


def _text_of(row: Row) -> str:
    """Return the beginning of a document or of a pair; "" for a conversation."""
    if row.kind == "pair":
        return row.prompt
    return "".join(itertools.islice(row.pieces, 1))[: 20 * LONGEST].strip()


def _spread(items: list) -> list:
    """Return a part of the items in an order that takes them from everywhere."""
    step = max(1, len(items) // PROMPTS)
    return items[::step]


def _reference_text() -> Iterator[str]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name].partition("\n\n")[2].strip()[:300]


def _shortener(tokenizer: PreTrainedTokenizerBase, most: int) -> Callable[[str], str]:
    """Return a function that cuts a text to so many tokens, or fewer."""

    def shorten(text: str) -> str:
        while (count := len(tokenizer(text, add_special_tokens=False)["input_ids"])) > most:
            text = text[: min(len(text) - 1, max(1, len(text) * most // count))]
        return text

    return shorten


def rows_of_run(results: JsonObject, tokenizer: PreTrainedTokenizerBase) -> Iterator[Row]:
    """Yield the validation rows of a run, or those of its training data if none are set apart.

    Only data on this machine is read: Python's reference, files and folders.

    Raises:
        NotHere: the data is on the hub.
        UserError: the data is not there, or cannot be read.
    """
    from distributed_training.cli.checks import is_local_dataset
    from distributed_training.cli.resolve import resolve_settings
    from distributed_training.data.rows import Row, RowOptions
    from distributed_training.data.sources import open_source

    flags = results.get("flags") or {}
    named = {key: flags[key] for key in DATA_FLAGS if flags.get(key)}
    data = resolve_settings(named).data
    for dataset in data.dataset:
        name = dataset.name
        if name != "pydocs" and not is_local_dataset(name) and not data.validation_file:
            raise NotHere(f"the dataset {name} is not on this machine")
        splits = open_source(name, data, RowOptions.of(data, tokenizer), True).splits
        rows = splits.get("validation") or splits["train"]
        yield from (row for _, row in rows(None) if isinstance(row, Row))


DATA_FLAGS = (
    *("dataset", "validation_file", "text_column", "prompt_column", "completion_column"),
    *("include", "train_on"),
)
