"""A stream without a script around it."""

from types import SimpleNamespace


def stream_of(file, tokenizer, **flags):
    """A Stream of one rank, without a script around it, and the lines that it prints."""
    from support.data.streaming import open_stream

    said = []
    args = SimpleNamespace(
        **{
            "dataset": str(file),
            "seq_length": 16,
            "batch_size": 2,
            "gradient_accumulation_steps": 1,
            "max_steps": 50,
            "shuffle_buffer": 4,
            "seed": 0,
            "text_column": None,
            "prompt_column": None,
            "completion_column": None,
            "cache_dir": None,
            "dataset_config": None,
            "dataset_revision": None,
            "train_split": None,
            "eval_split": None,
            "include": None,
            "max_bad_rows": 9,
            "compile": False,
            "simulate_gpus": None,
            "validation_file": None,
            "isolate_documents": False,
            "packing": False,
        }
        | flags
    )
    run = SimpleNamespace(
        is_main=True,
        rank=0,
        device=SimpleNamespace(type="cpu"),
        world_size=1,
        all_gather=lambda value: [value],
        broadcast_from_rank0=lambda value: value,
        console=SimpleNamespace(print=said.append, print0=said.append, warn=said.append),
    )
    return open_stream(args, run, tokenizer)[0], said
