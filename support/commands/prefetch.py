"""--prefetch: downloads all that a run reads from the network, in one process without a GPU."""

from __future__ import annotations

import sys

import torch

from support.cli.validate import huggingface_home, is_local_dataset
from support.cluster.context import Run
from support.cluster.launch import Launch
from support.data import tokenize as tokens
from support.errors import EXIT_COMPLETED
from support.model import resolve as models


def prefetch(args, launch: Launch) -> None:
    """Download the model and the dataset, tokenize the dataset, and exit.

    A run with the same flags then needs no network; HF_HUB_OFFLINE=1 prevents it from trying to
    reach the hub. With --streaming a dataset of the hub is not downloaded.

    Args:
        args: the flags of the run.
        launch: the place of this process, which is the only one.
    Raises:
        SystemExit: the downloads are complete. An error ends the process in `Run.end_failed`.
    """
    # The "fake" backend of simulations: this process is the only one.
    run = Run(launch, torch.device("cpu"), "fake", args.verbose, args.quiet)
    try:
        run.print0(f"⏳ Downloading {args.model}, where it is not in the cache")
        tokenizer = models.prefetch(args, run)
        if args.streaming:
            if not is_local_dataset(args.dataset):
                run.warn(
                    f"--streaming reads {args.dataset} from the hub while it trains, "
                    "so it is not in the cache."
                )
        else:
            run.print0(f"⏳ Preparing the dataset {args.dataset}")
            tokens.tokenize_corpus(
                args, run, tokenizer, args.dataset, args.dataset_config, args.validation_file
            )
        run.clean_up()
        run.print0(
            f"✅ Prefetched into {huggingface_home()}: "
            "with HF_HUB_OFFLINE=1 a run with these flags needs no network."
        )
    except BaseException as error:
        run.end_failed(error)
    sys.exit(EXIT_COMPLETED)
