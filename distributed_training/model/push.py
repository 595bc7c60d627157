"""Push the exported model to the Hugging Face hub (--push_to_hub)."""

import re
import shlex
from pathlib import Path

from distributed_training import console
from distributed_training.cli.hub import LOGIN_COMMAND
from distributed_training.errors import TrainingError, UserError, first_line, refused_as
from distributed_training.ranks.context import DistContext
from distributed_training.settings.output import OutputSettings


def open_repository(output: OutputSettings, folder: Path, ctx: DistContext) -> str | None:
    """Create the repository, and check that it can be written to, before the training.

    Args:
        folder: the run's folder, whose name is the default of --hub_model_id.
    Returns:
        OWNER/NAME on rank 0; None on the other ranks.
    """
    if not ctx.is_main:
        return None
    from huggingface_hub import CommitOperationAdd, HfApi

    of_folder = re.sub(r"[^A-Za-z0-9_]+", "-", folder.absolute().name).strip("-")
    name = output.hub_model_id or of_folder
    advice = f"log in with `{LOGIN_COMMAND}`, or set HF_TOKEN to a token that may write"
    with refused_as(f"--push_to_hub failed ({advice} to {name})", 200):
        api = HfApi()
        if "/" not in name:
            name = f"{api.whoami()['name']}/{name}"
        api.create_repo(name, private=output.hub_private_repo or None, exist_ok=True)
        # create_repo accepts a repository that exists, also if the token may only read it. This
        # announces a file without sending it, for which the hub checks the permission.
        api.preupload_lfs_files(name, [CommitOperationAdd("README.md", b"model card")])
        # create_repo does not change a repository that exists.
        is_public = output.hub_private_repo and not api.model_info(name).private
    if is_public:
        raise UserError(
            f"--hub_private_repo: {name} exists and is public. Make it private in its settings on "
            "the hub, or name another repository with --hub_model_id."
        )
    return name


def push(repository: str | None, folder: Path, ctx: DistContext) -> dict | None:
    """Upload an exported model from rank 0 while the other ranks wait, without a time limit.

    Returns:
        The `push` entry of results.json on the ranks of rank 0's node; None on the others.
    """
    return ctx.once_per_node("push", lambda: _upload(repository, folder) if repository else None)


def _upload(repository: str, folder: Path) -> dict:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    console.print0(f"⏳ Pushing {folder} to {repository}")
    if not console.on_terminal():
        disable_progress_bars()
    try:
        commit = HfApi().upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Add the trained model"
        )
    except Exception as error:  # the client raises a dozen classes; the first line has the reason
        raise TrainingError(
            f"The push to {repository} failed: {first_line(error, 200).rstrip('.')}. The trained "
            f"model is in {folder}: `hf upload {repository} {shlex.quote(str(folder))}` pushes it."
        ) from error
    return {"repository": repository, "commit": commit.oid}
