"""Where the rows of a corpus come from: Python's reference, files, or the hub."""

import hashlib

from support import console
from support.cli.checks import is_local_dataset
from support.data.rows import PlacedRows, Position, Row, RowOptions, Source
from support.settings.settings import Settings


def announce(settings: Settings) -> None:
    """Print which dataset is loaded."""
    is_wikitext_2 = (
        settings.data.dataset_name == "wikitext" and settings.data.dataset_config is None
    )
    name = "WikiText-2" if is_wikitext_2 else settings.data.dataset_name
    console.print0(f"📦 Loading dataset ({name})...")


def open_source(name: str, settings: Settings, options: RowOptions) -> Source:
    """Open a corpus ("pydocs", a file, a folder, or a dataset on the hub) and --validation_file.

    With --eval_only, only the validation data if it does not depend on the training data.
    """
    corpus = Source("", {})
    if not (settings.data.validation_file and settings.training.eval_only):
        if name == "pydocs":
            corpus = _open_pydocs()
        elif is_local_dataset(name):
            from support.data.row_files import open_files

            corpus = open_files(name, settings, options)
        else:
            from support.data.row_hub import open_hub

            corpus = open_hub(name, settings, options, needs_train=not settings.training.eval_only)
    if settings.data.validation_file is None:
        return corpus
    from support.data.row_files import open_files

    held_out = open_files(settings.data.validation_file, settings, options)
    digest = hashlib.sha256(f"{corpus.fingerprint}\0{held_out.fingerprint}".encode())
    return Source(digest.hexdigest(), {**corpus.splits, "validation": held_out.splits["train"]})


def _open_pydocs() -> Source:
    """Open the Python language reference that CPython includes; its text differs by release."""
    from pydoc_data.topics import topics

    def rows(position: Position | None) -> PlacedRows:
        for number, name in enumerate(sorted(topics)):
            yield {"file": 0, "row": number}, Row(f"pydocs, {name}", pieces=[topics[name]])

    text = "\0".join(topics[name] for name in sorted(topics))
    return Source(hashlib.sha256(text.encode()).hexdigest(), {"train": rows})
