"""Opens the corpus of --streaming, whose files are read while training."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from distributed_training.cli.checks import is_local_dataset
from distributed_training.data.row_files import reading, rows_of_files
from distributed_training.data.rows import RowOptions, Source
from distributed_training.errors import TrainingError
from distributed_training.ranks.context import DistContext, require_equal_on_all_ranks
from distributed_training.settings.data import DataSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPARED_BYTES = 1 << 16  # of the beginning and the end of a file, in the digest of a stream


def _size_and_edges(file: Path) -> bytes:
    """Return what the digest of a stream has of a file: its size, its beginning and its end."""
    with open(file, "rb") as stream:
        size, begin = os.fstat(stream.fileno()).st_size, stream.read(COMPARED_BYTES)
        stream.seek(max(0, size - COMPARED_BYTES))
        return f"\0{size}".encode() + begin + stream.read(COMPARED_BYTES)


def _check_unchanged(known: dict[Path, tuple[int, bytes]], file: Path) -> None:
    """Raise a TrainingError if a file of a stream is not the one that was opened.

    Args:
        known: for each file the time of its last modification, and a digest of `_size_and_edges`.
    """
    time, digest = known[file]
    try:
        # Most files keep their time. One whose time was set only is still the same.
        if file.stat().st_mtime_ns == time:
            return
        if hashlib.sha256(_size_and_edges(file)).digest() == digest:
            return
        problem = "has changed"
    except OSError as error:
        problem = f"cannot be read any more ({error.strerror or error})"
    raise TrainingError(
        f"{file} {problem} since the run started, and --streaming reads it during training: do "
        "not change the dataset until the run ends. With the same files --resume continues from a "
        "checkpoint; other files need a new run."
    )


def open_for_streaming(
    data: DataSettings, ctx: DistContext, tokenizer: PreTrainedTokenizerBase
) -> Source:
    """Open the training split of --dataset for --streaming; every rank must call it.

    The fingerprint covers the beginnings and ends of files, which are never read completely.

    Raises:
        UserError: the corpus cannot be read.
        TrainingError: it differs between the nodes.
    """
    source = _open(data, ctx, RowOptions.of(data, tokenizer))
    require_equal_on_all_ranks(ctx.all_gather(source.fingerprint), "The corpus")
    return source


def _open(data: DataSettings, ctx: DistContext, options: RowOptions) -> Source:
    name = data.dataset_name
    digest = hashlib.sha256(f"{data.dataset_config}\0{data.text_column}".encode())
    if data.prompt_column or data.completion_column:  # else checkpoints of earlier runs stay valid
        digest.update(repr(options.columns).encode())
    if is_local_dataset(name):
        from distributed_training.data.folder_splits import training_files

        files = training_files(name, data)["train"]
        known = {}
        for file in files:
            with reading(file):
                time, content = file.stat().st_mtime_ns, _size_and_edges(file)
            known[file] = time, hashlib.sha256(content).digest()
            digest.update(os.fsencode(file.name) + content)
        check = functools.partial(_check_unchanged, known)
        rows = functools.partial(rows_of_files, files, options, check)
        return Source(digest.hexdigest(), {"train": rows})
    from distributed_training.data.row_hub import (
        builder_of,
        check_stream_states,
        loading,
        rows_of_table,
    )

    check_stream_states()
    # All ranks read the same commit, even if the dataset changes on the hub meanwhile.
    config, commit = data.dataset_config, None
    if ctx.is_main:
        commit = builder_of(name, config, data.dataset_revision).hash
    commit = ctx.broadcast_from_rank0(commit)
    with loading(name):
        builder = builder_of(name, config, commit)
        open_table = functools.partial(
            builder.as_streaming_dataset, split=data.train_split or "train"
        )
        open_table()  # before the first pass: the split may not exist
    digest.update(f"{name}\0{commit}".encode())
    digest.update(f"\0{data.train_split}".encode() if data.train_split else b"")
    rows = functools.partial(rows_of_table, open_table, name, f"--dataset {name}", options)
    return Source(digest.hexdigest(), {"train": rows})
