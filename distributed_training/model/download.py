"""Download of a model from the Hugging Face hub."""

from distributed_training.cli.hub import LOGIN_COMMAND
from distributed_training.errors import UserError, first_line
from distributed_training.files.hub_cache import cached_revision


def download(name: str, revision: str | None, with_weights: bool, offline: bool, what: str) -> str:
    """Return the local snapshot of a model on the hub; download it if it is not in the cache.

    Only the files that training needs are downloaded: configuration, tokenizer and safetensors in
    the top folder. Pickled weights are downloaded only if there are no safetensors.

    Args:
        revision: a branch, a tag or a commit; None: main.
        with_weights: also download the weights.
        offline: use the cache only.
        what: what the user has given, for messages (--model NAME).
    """
    from huggingface_hub import HfApi, errors, snapshot_download

    if offline:
        revision = cached_revision(name, revision)
    patterns = ["*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja"]
    try:
        if with_weights and not offline:
            files = HfApi().list_repo_files(name, revision=revision)
            safe = any(file.endswith(".safetensors") and "/" not in file for file in files)
            patterns.append("*.safetensors" if safe else "pytorch_model*.bin")
        return snapshot_download(
            name,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=["*/*", "consolidated*"],
            local_files_only=offline,
        )
    except Exception as error:  # the clients raise many classes, which differ between versions
        problem = f" cannot be downloaded: {first_line(error)}"
        if isinstance(error, errors.GatedRepoError):
            problem = f" is gated: accept its license and log in with `{LOGIN_COMMAND}`."
        elif isinstance(error, errors.RevisionNotFoundError):
            problem = f" has no branch, tag or commit {revision} (--model_revision)."
        elif isinstance(error, errors.RepositoryNotFoundError):
            problem = ": there is no such model on the hub (or it is private), and no such folder."
        raise UserError(f"{what}{problem}") from error
