"""Find the checkpoint that --resume selects, before the data and the weights are loaded."""

from __future__ import annotations

from pathlib import Path

from support.checkpoints.compatibility import flags_signature, refuse_other_run
from support.checkpoints.format import candidates_in, find_damage, list_checkpoints, read_manifest
from support.checkpoints.recognize import format_of
from support.cli.arguments import Arguments
from support.cluster.context import DistContext
from support.errors import UserError
from support.files.user_files import shown
from support.tables import OPTIMIZERS

Found = tuple[Path, dict]  # a checkpoint's folder and its manifest


def find_checkpoint(args: Arguments, ctx: DistContext, folder: Path) -> Found | None:
    """Find the checkpoint to resume from: the newest complete and undamaged one.

    Every rank calls it, and all ranks return the same. Only the flags are compared with the
    manifest here; the model and the data are compared in `CheckpointManager.resume`.

    Args:
        folder: the run's output folder.
    Returns:
        The checkpoint; None without --resume, or if --resume names no path and `folder` has none.
    Raises:
        UserError: no checkpoint is complete and undamaged, or it is of a run with other flags.
    """
    if args.resume is None:
        return None
    found = _newest(args.resume, folder / "checkpoints", ctx)
    if found is None:
        ctx.console.warn(
            f"--resume: there is no checkpoint in {folder / 'checkpoints'} yet, so this run starts "
            "from the beginning."
        )
        return None
    path, manifest = found
    current = flags_signature(args, ctx.world_size)
    refuse_other_run(manifest["identity"], current, args.resume_force)
    if args.ds_config is None:  # a user's file may name another optimizer
        check_optimizer(path, manifest, OPTIMIZERS[args.optim].family)
    return found


def check_optimizer(path: Path, manifest: dict, family: str | None) -> None:
    """Check that an optimizer of a family (see support/optimizers.py) can use a checkpoint."""
    saved_by = manifest["optimizer"]
    if saved_by not in ("", family):
        raise UserError(
            f"--resume {path}: the checkpoint has the states of {shown(saved_by)}, and this run's "
            f"optimizer is {family}: use the same --optim."
        )


def _newest(wanted: str, folder: Path, ctx: DistContext) -> Found | None:
    """Return the newest checkpoint in `wanted`, or if it is "" in `folder`, that can be used."""
    candidates, program = [], None
    if ctx.is_main:  # rank 0 decides: other nodes may see new names in a shared folder later
        candidates = candidates_in(Path(wanted)) if wanted else list_checkpoints(folder)
        program = format_of(Path(wanted)) if wanted and not candidates else None
    candidates, program = ctx.broadcast_from_rank0((candidates, program))
    if program:
        raise UserError(
            f"--resume {wanted} is a checkpoint of {program}. Convert it first: "
            f"python scripts/convert_checkpoint.py {wanted} --to checkpoint NEW_FOLDER"
        )
    for candidate in candidates:
        manifest, problem = verify(candidate, ctx)
        if not problem:
            return candidate, manifest
        if wanted and candidate == Path(wanted):
            raise UserError(f"--resume {wanted}: {problem}.")
        ctx.console.warn(f"Skipped the checkpoint {candidate}: {problem}.")
    if wanted or candidates:
        raise UserError(
            f"--resume: no checkpoint in {wanted or folder} is complete and undamaged."
            + ("" if wanted else " Remove the folder to start from the beginning.")
        )
    return None


def verify(checkpoint: Path, ctx: DistContext) -> tuple[dict, str]:
    """Read a checkpoint's manifest and verify its files, of which each rank takes a part.

    Returns:
        (manifest, ""), or a clause that says why it cannot be used as the second item; the same
        on all ranks.
    """
    manifest, problem = ctx.broadcast_from_rank0(read_manifest(checkpoint) if ctx.is_main else None)
    problem = problem or find_damage(checkpoint, manifest, ctx.rank, ctx.world_size)
    return manifest, next(filter(None, ctx.all_gather(problem)), "")
