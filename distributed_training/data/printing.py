"""What the console says of the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from distributed_training import console
from distributed_training.data.facts import SplitFacts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def print_splits(
    facts: dict[str, SplitFacts], tokenizer: PreTrainedTokenizerBase, unit: str
) -> None:
    """Print the formats, and one line for each split.

    Args:
        unit: what a row of the corpus is: "rows" or "articles".
    """
    rows = [split for split in facts.values() if "kind" in split]
    kinds = [split["kind"] for split in rows]
    formats = dict.fromkeys(name for split in rows for name in split["formats"])
    print_format(formats, "chat" if "chat" in kinds else kinds[0], tokenizer)
    for name, split in facts.items():
        console.print0(f"📚 {name}: {', '.join(_counts(split, unit)) or 'nothing'}")


def _counts(split: SplitFacts, unit: str) -> Iterator[str]:
    """Yield what to print of the counts of a split."""
    skipped, is_text = split.get("skipped", 0), split.get("kind") == "text"
    # Lines before the first title are no article.
    rows = split.get("rows", 0) - (skipped if unit == "articles" else 0)
    numbers = {unit: rows, "tokens": split.get("tokens"), "sequences": split["blocks"]}
    yield from (f"{number:,} {name}" for name, number in numbers.items() if number)
    if split.get("truncated"):
        yield f"{split['truncated']:,} truncated"
    if skipped and unit != "articles":
        yield f"{skipped:,} skipped ({'empty' if is_text else 'no target within --seq_length'})"
    if "padding_share" in split:
        yield f"{split['padding_share']:.1%} padding"


def print_format(
    formats: Iterable[str], kind: str | None, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Print the formats that were recognized; set a chat template if conversations need one."""
    if kind == "chat":
        from distributed_training.data.chat_notices import notices_about  # not for text

        for notice in notices_about(tokenizer):
            console.warn(notice)
    console.print0(f"🔎 Format: {', '.join(formats)} ({kind or 'text'})")


def warn_of_no_end(
    tokenizer: PreTrainedTokenizerBase, is_chat: bool, is_cut: bool, read: int | None = None
) -> None:
    """Print that no answer ends with a trained end token; see `chat_notices`."""
    from distributed_training.data.chat_notices import no_end_notice  # not for text

    console.warn(no_end_notice(tokenizer, is_chat, is_cut, read))
