"""Find the checkpoint that --resume selects, and check that it belongs to the run."""

import shlex
from pathlib import Path
from typing import NamedTuple

from distributed_training import console
from distributed_training.about import command_of
from distributed_training.checkpoints import other_runs, signature
from distributed_training.checkpoints.format import candidates_in, list_checkpoints
from distributed_training.checkpoints.verify import verify
from distributed_training.errors import UserError
from distributed_training.files.json_types import JsonObject
from distributed_training.files.user_files import shown
from distributed_training.optimizers import OPTIMIZERS
from distributed_training.ranks.context import DistContext
from distributed_training.settings.data import DataSettings
from distributed_training.settings.output import OutputSettings
from distributed_training.settings.training import TrainingSettings


class FoundCheckpoint(NamedTuple):
    """A complete and undamaged checkpoint."""

    path: Path  # its folder
    manifest: JsonObject


def find_checkpoint(
    output: OutputSettings,
    data: DataSettings,
    training: TrainingSettings,
    ctx: DistContext,
    folder: Path,
) -> FoundCheckpoint | None:
    """Find the checkpoint of --resume: the newest complete and undamaged one, on all ranks.

    Only the flags are compared with it here; model and data in `CheckpointManager.resume`.

    Args:
        folder: the run's output folder.
    Returns:
        The checkpoint; None without --resume, or if it names no path and `folder` has none.
    Raises:
        UserError: no checkpoint is complete and undamaged, or it is of a run with other flags.
    """
    wanted = output.resume
    if wanted is None:
        return None
    found = _newest(wanted, folder / "checkpoints", ctx)
    if found is None:
        console.warn(
            f"--resume: {folder} has no checkpoint yet: this run starts from the beginning."
        )
        return None
    path, manifest = found
    current = signature.flags_signature(data, training, ctx.world_size)
    other_runs.refuse_other_run(manifest["identity"], current, output.resume_force)
    saved_by, family = manifest["optimizer"], OPTIMIZERS[training.optim].family
    if saved_by not in ("", family):
        raise UserError(
            f"--resume {path}: the checkpoint has the states of {shown(saved_by)}, and this run's "
            f"optimizer is {family}: use the same --optim."
        )
    return found


def _newest(wanted: str, folder: Path, ctx: DistContext) -> FoundCheckpoint | None:
    """Return the newest checkpoint in `wanted`, or if it is "" in `folder`, that can be used."""
    # Rank 0 decides: other nodes may see new names in a shared folder later.
    candidates = ctx.broadcast_from_rank0(
        candidates_in(Path(wanted)) if wanted else list_checkpoints(folder)
    )
    problem = ""
    for candidate in candidates:
        manifest, problem = verify(candidate, ctx)
        if not problem:
            return FoundCheckpoint(candidate, manifest)
        if wanted and candidate == Path(wanted):
            raise UserError(f"--resume {wanted}: {problem}.")
        console.warn(f"Skipped the checkpoint {candidate}: {problem}.")
    if candidates:
        raise UserError(
            f"--resume: no checkpoint in {wanted or folder} can be used. The oldest one: "
            f"{problem}. To start from the beginning, name another --output_dir."
        )
    if wanted:
        raise UserError(
            f"--resume: no checkpoint in {wanted}. To convert one of Trainer, DeepSpeed or FSDP: "
            f"{command_of('scripts/convert_checkpoint.py')} {shlex.quote(str(wanted))} "
            "--to checkpoint NEW_FOLDER"
        )
    return None
