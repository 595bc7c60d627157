"""A tokenized corpus, and a stream, without a script around them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np

from distributed_training.cli.parse import parse_arguments
from distributed_training.ranks.context import ONE_NODE


def tokenized(file, tokenizer, root, *flags, bad=0):
    """What `tokenize_once` returns for a file or folder, with the cache in `root`."""
    from distributed_training.data.rows import RowOptions
    from distributed_training.data.sources import open_source
    from distributed_training.data.token_cache import tokenize_once
    from distributed_training.files.cache import Cache

    data = parse_arguments([str(flag) for flag in flags]).data
    options = RowOptions.of(data, tokenizer)
    source = open_source(str(file), data, options, eval_only=False)
    return tokenize_once(source, tokenizer, Cache(Path(root)), lambda n: None, bad)


def ids_of(prepared):
    """The stored numbers of the training split."""
    dtype = prepared["splits"]["train"]["dtype"]
    return np.fromfile(f"{prepared['folder']}/train.bin", dtype)


def stream_of(file, tokenizer, **flags):
    """A Stream of one rank."""
    from distributed_training.data.sequences import Padding
    from distributed_training.data.streaming import open_stream

    small = "--seq_length 16 --batch_size 2 --max_steps 50 --shuffle_buffer 4 --max_bad_rows 9"
    settings = parse_arguments(["--dataset", str(file), "--streaming", "--no_eval", *small.split()])
    settings = settings.replace(seed=0, **flags)
    cpu = SimpleNamespace(type="cpu")
    ctx = SimpleNamespace(rank=0, world_size=1, nodes=ONE_NODE, is_main=True, device=cpu)
    ctx.all_gather = lambda value: [value]
    ctx.once_per_node = lambda what, prepare: prepare()
    padding = Padding.of(settings.data.seq_length, False, "cpu")
    return open_stream(settings.data, settings.training, ctx, tokenizer, padding)[0]
