"""Where the rows of a corpus come from: Python's reference, files, or the hub."""

import hashlib

from distributed_training import console
from distributed_training.cli.checks import is_local_dataset
from distributed_training.data.rows import PlacedRows, Position, Row, RowOptions, Source
from distributed_training.settings.data import DataSettings


def announce(data: DataSettings) -> None:
    """Print which dataset is loaded."""
    is_wikitext_2 = data.dataset_name == "wikitext" and data.dataset_config is None
    name = "WikiText-2" if is_wikitext_2 else data.dataset_name
    console.print0(f"📦 Loading dataset ({name})...")


def open_source(name: str, data: DataSettings, options: RowOptions, eval_only: bool) -> Source:
    """Open a corpus ("pydocs", a file, a folder, or a dataset on the hub) and --validation_file.

    Args:
        eval_only: open only the validation data if it does not depend on the training data.
    """
    corpus = Source("", {})
    if not (data.validation_file and eval_only):
        if name == "pydocs":
            corpus = _open_pydocs()
        elif is_local_dataset(name):
            from distributed_training.data.folder_splits import training_files
            from distributed_training.data.row_files import open_files

            corpus = open_files(training_files(name, data, not eval_only), options)
        else:
            from distributed_training.data.row_hub import open_hub

            corpus = open_hub(name, data, options, needs_train=not eval_only)
    if data.validation_file is None:
        return corpus
    from distributed_training.data.folder_splits import validation_files
    from distributed_training.data.row_files import open_files

    held_out = open_files({"validation": validation_files(data.validation_file, data)}, options)
    digest = hashlib.sha256(f"{corpus.fingerprint}\0{held_out.fingerprint}".encode())
    return Source(digest.hexdigest(), {**corpus.splits, **held_out.splits})


def _open_pydocs() -> Source:
    """Open the Python language reference that CPython includes; its text differs by release."""
    from pydoc_data.topics import topics

    def rows(position: Position | None) -> PlacedRows:
        for number, name in enumerate(sorted(topics)):
            yield {"file": 0, "row": number}, Row(f"pydocs, {name}", pieces=[topics[name]])

    text = "\0".join(topics[name] for name in sorted(topics))
    return Source(hashlib.sha256(text.encode()).hexdigest(), {"train": rows})
