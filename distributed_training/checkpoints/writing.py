"""Write a checkpoint to a folder with a temporary name, which is renamed at the end.

Each rank writes its pieces; then rank 0 writes the rest, with the manifest last.
"""

from pathlib import Path

import torch.distributed as dist

from distributed_training.checkpoints import format as files
from distributed_training.checkpoints.contents import Contents
from distributed_training.checkpoints.folder import CheckpointFolder
from distributed_training.checkpoints.saving import PieceWriter, write_shards
from distributed_training.errors import FirstError, OutOfMemory, TrainingError, explain
from distributed_training.files import atomic
from distributed_training.files.json_types import JsonObject
from distributed_training.ranks.context import DistContext


def write_checkpoint(
    folder: CheckpointFolder, step: int, contents: Contents, manifest: JsonObject, ctx: DistContext
) -> None:
    """Write the checkpoint of a step; it is on disk afterwards. All ranks call this function.

    Args:
        manifest: see `Contents.manifest`; the entries about files and pieces are added.
    Raises:
        TrainingError: it cannot be written. All ranks raise it, and nothing unfinished remains.
    """
    final, errors = folder.of_step(step), FirstError()
    unfinished = folder.path / f"{atomic.PARTIAL}{final.name}"
    if ctx.is_main:
        atomic.remove(unfinished)
        errors.attempt(unfinished.mkdir, 0o777, True)
    dist.barrier()
    writer = PieceWriter(unfinished, ctx.rank)
    errors.attempt(write_shards, writer, contents.shards, ctx.world_size)
    if errors.error is not None and isinstance(explain(errors.error), OutOfMemory):
        raise errors.error  # its report has remedies; it ends the other ranks
    ranks = ctx.all_gather((writer.pieces, writer.files, str(errors)))
    failed = next((f"{error} [rank {r}]" for r, (_, _, error) in enumerate(ranks) if error), "")
    if ctx.is_main:
        if not failed:
            manifest["pieces"] = [piece for pieces, _, _ in ranks for piece in pieces]
            manifest["files"] = {name: f for _, entry, _ in ranks for name, f in entry.items()}
            errors.attempt(_complete, unfinished, contents, manifest)
            errors.attempt(folder.add, unfinished, final)
            failed = str(errors)
        atomic.remove(unfinished)  # it exists after an error only
    if failed := ctx.broadcast_from_rank0(failed):
        raise TrainingError(f"The checkpoint {final} could not be written: {failed}")


def _complete(unfinished: Path, contents: Contents, manifest: JsonObject) -> None:
    """Write what the pieces lack, and the manifest with the digests of all files."""
    contents.write_whole(unfinished)
    for path in sorted(unfinished.rglob("*")):
        name = path.relative_to(unfinished).as_posix()
        if path.is_file() and name not in manifest["files"]:
            manifest["files"][name] = files.file_entry(path)
    files.write_manifest(unfinished, manifest)
    atomic.sync_tree(unfinished / "model")
    atomic.sync(unfinished)
