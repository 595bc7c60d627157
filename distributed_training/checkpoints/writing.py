"""Write a checkpoint's folder under a temporary name, which is renamed when it is complete.

Each rank writes its pieces; then rank 0 writes the rest, with the manifest last.
"""

from pathlib import Path

from distributed_training.checkpoints import format as files
from distributed_training.checkpoints.contents import WholeParts
from distributed_training.files import atomic
from distributed_training.files.json_types import JsonObject


def new_folder(unfinished: Path) -> None:
    """Create the folder of a checkpoint, in place of one that an earlier save has left."""
    atomic.remove(unfinished)
    unfinished.mkdir(0o777, True)


def complete(unfinished: Path, whole: WholeParts, manifest: JsonObject) -> None:
    """Write what the pieces lack, and the manifest with the digests of all files.

    Args:
        manifest: with the pieces and the files of all ranks.
    """
    whole.write(unfinished)
    for path in sorted(unfinished.rglob("*")):
        name = path.relative_to(unfinished).as_posix()
        if path.is_file() and name not in manifest["files"]:
            manifest["files"][name] = files.file_entry(path)
    files.write_manifest(unfinished, manifest)
    atomic.sync_tree(unfinished / "model")
    atomic.sync(unfinished)
