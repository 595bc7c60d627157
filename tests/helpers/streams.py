"""A stream without a script around it."""

from types import SimpleNamespace

from support.cli.parse import parse_arguments


def stream_of(file, tokenizer, **flags):
    """A Stream of one rank, without a script around it, and the lines that it prints."""
    from support.data.streaming import open_stream

    said = []
    small = "--seq_length 16 --batch_size 2 --max_steps 50 --shuffle_buffer 4 --max_bad_rows 9"
    args = parse_arguments(["--dataset", str(file), "--streaming", "--no_eval", *small.split()])
    args = args.replace(seed=0, **flags)
    run = SimpleNamespace(
        is_main=True,
        rank=0,
        device=SimpleNamespace(type="cpu"),
        world_size=1,
        all_gather=lambda value: [value],
        console=SimpleNamespace(print=said.append, print0=said.append, warn=said.append),
    )
    return open_stream(args, run, tokenizer)[0], said
