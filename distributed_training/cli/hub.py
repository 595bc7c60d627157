"""The probe of the Hugging Face hub before its libraries are imported, and what its caches have."""

import contextlib
import os
import re
import shlex
import threading
from collections.abc import Iterable
from pathlib import Path

from distributed_training.cli.checks import is_local_model, names_on_hub, scratch_without_hub
from distributed_training.errors import UserError, redact, refused_as
from distributed_training.files.cache import huggingface_home
from distributed_training.settings.command import CommandSettings
from distributed_training.settings.data import DataSettings
from distributed_training.settings.model import ModelSettings
from distributed_training.settings.output import OutputSettings
from distributed_training.settings.settings import Hub

PROBE_SECONDS = 4  # the hub answers within 1 s; the clients' own retries take 23 s to 11 minutes
JSON_ROWS = "json_rows"  # the folder in the cache of `datasets` that has what hub_json.py reads
LOGIN_COMMAND = "hf auth login"  # before huggingface_hub 0.34: huggingface-cli login
# What a run needs of a model: names of files in a snapshot, and "weights" unless they are drawn.
MODEL_FILES = {
    "config.json": r"config\.json",
    "tokenizer files": r"tokenizer\.json|vocab.*|.*\.model|.*\.tiktoken",
    "weights": r".*\.safetensors|pytorch_model.*\.bin",
}


def ask_hub(
    chosen: ModelSettings,
    data: DataSettings,
    output: OutputSettings,
    command: CommandSettings,
    is_main: bool,
    is_node_leader: bool,
) -> Hub:
    """Decide whether the hub is used, before any of its libraries is imported.

    Only a run that needs the hub asks it. One probe replaces the clients' retries. With
    HF_HUB_OFFLINE, which is set if the hub does not answer, they load from the cache without delay.
    Only the first rank of a node uses the hub; the others load from the cache that it has filled.
    Every rank reads a streamed dataset from the hub.

    Raises:
        UserError: without --check: something is missing without the hub.
    """
    model, datasets = names_on_hub(chosen.model, data.dataset)
    pushes = output.push_to_hub and is_main
    reads = (model or datasets or pushes) and (is_node_leader or (data.streaming and datasets))
    set_offline, url = is_set_offline(), endpoint()
    if reads and not set_offline and answers(url):
        return Hub()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not reads:
        return Hub(offline=True)
    unreachable = f"The Hugging Face hub ({url}) cannot be reached"
    reason = redact("HF_HUB_OFFLINE is set" if set_offline else unreachable)
    problem = _missing(
        None if scratch_without_hub(chosen) else model,
        not (chosen.from_scratch or command.show_sample),
        chosen.model_revision,
        datasets,
    )
    if pushes:
        problem = "--push_to_hub needs it: leave it out, and push later: hf upload NAME FOLDER."
    if problem and not command.check:
        raise UserError(f"{reason}, and {problem}")
    if is_main and not (problem or set_offline or output.quiet):
        print(f"ℹ️  {reason}: using what is in the cache.")
    return Hub(offline=True, problem=f"{reason}, and {problem}" if problem else None)


def _missing(
    model: str | None, with_weights: bool, revision: str | None, datasets: list[str]
) -> str:
    """Return what the cache lacks, and what to do; "" if it has everything."""
    missing = [f"dataset {name}" for name in datasets if not has_dataset(name)]
    if model:
        missing += missing_of_model(model, with_weights, revision)
    if not missing:
        return ""
    return (
        f"the cache has no {' and no '.join(missing)}. Run the same command with --prefetch where "
        f"there is a network, with HF_HOME={shlex.quote(str(huggingface_home()))}, then set "
        "HF_HUB_OFFLINE=1; or name local files and folders; or use --dataset pydocs, and a GPT-2 "
        "with --from_scratch or --model tiny-gpt2, which need no hub."
    )


def endpoint() -> str:
    """Return the address of the hub."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def download_config(model: str, known: Iterable[str]) -> str:
    """Return the path of the config.json of a model on the hub, or of its copy in the cache.

    Args:
        known: names of models that need no file, for messages.
    Raises:
        UserError: there is no such model, the user has no access, or the hub does not answer.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    problem, names = f"--model {model}: no such file or folder", f"Known names: {', '.join(known)}."
    if is_local_model(model):
        raise UserError(f"{problem}. {names}")
    hub = f"the hub ({redact(endpoint())})"
    with refused_as(
        f"{problem}, and no config.json on {hub} (a gated model needs HF_TOKEN). {names} The hub's "
        "answer"
    ):
        if not is_set_offline() and answers(endpoint()):
            return hf_hub_download(model, "config.json")
        if isinstance(cached := try_to_load_from_cache(model, "config.json"), str):
            return cached
    reason = "HF_HUB_OFFLINE is set" if is_set_offline() else f"{hub} cannot be reached"
    raise UserError(f"{problem}, {reason}, and the cache of the hub does not have it. {names}")


def is_set_offline() -> bool:
    """Return whether the user's environment forbids the use of the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def answers(url: str) -> bool:
    """Return whether an HTTP server answers at `url` within PROBE_SECONDS.

    The proxy variables of the environment are used. An HTTP error counts as an answer.
    """
    # Not at the top of the file: these imports take a fifth of the time of --help.
    import http.client
    import urllib.error
    import urllib.request

    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            # urllib takes user:password for a part of the host's name.
            head = urllib.request.Request(re.sub("//[^/?#]*@", "//", url), method="HEAD")
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(head, timeout=PROBE_SECONDS).close()
            answered.set()

    # In a thread, to limit the total time: the name lookup and each address have their own limits.
    if url.startswith(("http://", "https://")):
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(PROBE_SECONDS)  # a refused connection ends it at once
    return answered.is_set()


def has_dataset(name: str) -> bool:
    """Return whether the cache of the `datasets` library has a dataset."""
    prepared = os.environ.get("HF_DATASETS_CACHE") or huggingface_home() / "datasets"
    joined = name.replace("/", "___")
    names = joined, joined.lower(), f"{JSON_ROWS}/{joined}"  # of Arrow files
    return any((Path(prepared).expanduser() / part).is_dir() for part in names)


def missing_of_model(name: str, with_weights: bool, revision: str | None) -> list[str]:
    """Return which files of a model the hub's cache lacks, such as "weights of gpt2".

    Other programs cache parts of a model. Call it after HF_HUB_OFFLINE is set, because
    huggingface_hub reads it once, when it is imported.
    """
    from huggingface_hub import snapshot_download

    from distributed_training.files.hub_cache import cached_revision  # only without a network

    try:
        revision = cached_revision(name, revision)
        snapshot = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or not a name of the hub
        return [f"model {name}"]
    # exists(): an interrupted download leaves dangling links.
    files = [file.name for file in snapshot.iterdir() if file.exists()]
    return [
        f"{kind} of {name}"
        for kind, names in MODEL_FILES.items()
        if (with_weights or kind != "weights") and not any(re.fullmatch(names, f) for f in files)
    ]
