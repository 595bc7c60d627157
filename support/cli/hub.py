"""The probe of the Hugging Face hub, before any of its libraries is imported."""

from __future__ import annotations

import os
import re
import shlex
import threading

from support.cli.paths import is_local_dataset, is_local_model
from support.errors import UserError
from support.files.hub_cache import cached_repository, huggingface_home, missing_of_model
from support.known_models import EMBEDDED_MODEL, GPT2_SHAPES
from support.redaction import redact

PROBE_SECONDS = 4  # the hub answers within 1 s; the clients' own retries take 23 s to 11 minutes


def ask_hub(args, is_main: bool, is_node_leader: bool) -> tuple[bool, str | None]:
    """Decide whether the hub is used, and report with --check what is missing without it.

    Returns:
        Whether the hub must not be used; and with --check the text of the error, or None.
    Raises:
        UserError: without --check; see `reach_hub`.
    """
    try:
        return not reach_hub(args, is_main, is_node_leader), None
    except UserError as error:
        if not args.check:
            raise
        return True, redact(str(error))


def reach_hub(args, is_main: bool, is_node_leader: bool) -> bool:
    """Decide whether the Hugging Face hub is used, before any of its libraries is imported.

    One probe replaces the clients' retries. If the hub does not answer, HF_HUB_OFFLINE is set, with
    which the libraries load from the cache without delay. Only the first rank of a node uses the
    hub; the others load from the cache that it has filled. A streamed dataset is not cached, so
    every rank reads it from the hub.

    Returns:
        True if the hub may be used.
    Raises:
        UserError: the hub does not answer, and the cache lacks a file that the run needs.
    """
    model = args.model if args.model != EMBEDDED_MODEL and not is_local_model(args.model) else None
    dataset = {"wikitext": "Salesforce/wikitext", "pydocs": None}.get(args.dataset, args.dataset)
    dataset = None if dataset and is_local_dataset(dataset) else dataset
    every_rank = args.streaming and dataset  # every rank reads a streamed dataset
    if not (model or dataset) or not (is_node_leader or every_rank):
        os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is needed from the hub
        return False
    set_offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if not set_offline and answers(endpoint):
        return True
    os.environ["HF_HUB_OFFLINE"] = "1"
    reason = (
        "HF_HUB_OFFLINE is set"
        if set_offline
        else f"The Hugging Face hub ({endpoint}) cannot be reached"
    )
    needed_model = None if scratch_without_hub(args) else model
    missing_model = None if cached_repository("models", needed_model) else needed_model
    missing_dataset = None if cached_repository("datasets", dataset) else dataset
    if missing_model or missing_dataset:
        raise UserError(f"{reason}, and {_remedies(args, missing_model, missing_dataset)}")
    missing_files = missing_of_model(needed_model, not args.from_scratch) if needed_model else []
    if missing_files:
        raise UserError(
            f"{reason}, and the cache has no {' and no '.join(missing_files)} of {model}. Run "
            f"this where there is a network (a cluster's head node): {prefetch_command(args)}"
        )
    if is_main and not (set_offline or args.quiet):
        print(redact(f"ℹ️  {reason}: using what is in the cache."))
    return False


PREFETCH_FLAGS = (
    *("dataset_config", "text_column", "validation_file", "chat_template", "cache_dir"),
    *("max_bad_rows", "include"),
)


def prefetch_command(args) -> str:
    """Return the command that downloads what this run needs.

    It is meant for a machine that has a network and shares the cache's disk, such as a head node.
    """
    command = ["env", f"HF_HOME={huggingface_home()}", "python", "real_model_example.py"]
    command += ["--prefetch", "--model", args.model, "--dataset", args.dataset]
    for flag in PREFETCH_FLAGS:
        command += [f"--{flag}", str(getattr(args, flag))] if flag in args.given else []
    return shlex.join(command + ["--from_scratch"] * args.from_scratch)


def _remedies(args, model: str | None, dataset: str | None) -> str:
    """Return the end of a message: what is missing in the cache, and the three remedies."""
    missing, local_paths, hubless_flags = [], [], []
    if model:
        missing.append(f"model {model}")
        local_paths.append("a local folder to --model")
        hubless_flags.append("--from_scratch" if model in GPT2_SHAPES else "--model tiny-gpt2")
    if dataset:
        no_file = "" if args.dataset == "wikitext" else " (there is no such file either)"
        missing.append(f"dataset {dataset}{no_file}")
        local_paths.append("a file or folder to --dataset")
        hubless_flags.append("--dataset pydocs")
    return (
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in the cache. Three "
        "solutions: where there is a network (a cluster's head node) run "
        f"`{prefetch_command(args)}`, then set HF_HUB_OFFLINE=1; pass "
        f"{' and '.join(local_paths)}; or use {' '.join(hubless_flags)}, "
        "which needs no hub."
    )


def scratch_without_hub(args) -> bool:
    """Return whether the model needs nothing from the hub: GPT-2 with random weights."""
    return args.from_scratch and args.model in GPT2_SHAPES


def answers(endpoint: str) -> bool:
    """Return whether an HTTP server answers at `endpoint` within PROBE_SECONDS.

    The proxy variables of the environment are used. An HTTP error counts as an answer.
    """
    # Not at the top of the file: these imports take a fifth of the time of --help.
    import http.client
    import urllib.error
    import urllib.request

    if not endpoint.startswith(("http://", "https://")):
        return False
    answered = threading.Event()
    # urllib takes user:password for a part of the host's name.
    endpoint = re.sub("//[^/?#]*@", "//", endpoint)

    def ask() -> None:
        try:
            urllib.request.urlopen(
                urllib.request.Request(endpoint, method="HEAD"), timeout=PROBE_SECONDS
            ).close()
        except urllib.error.HTTPError:
            pass  # an error page is an answer
        except (OSError, ValueError, http.client.HTTPException):
            return
        answered.set()

    # In a thread, to limit the total time: the name lookup and each address have their own time
    # limits.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return answered.is_set()
