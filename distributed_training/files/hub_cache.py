"""The cache of huggingface_hub, as it is after other programs than its clients have filled it."""

import contextlib
import re
from pathlib import Path

COMMIT = re.compile("[0-9a-f]{40}")


def cached_revision(name: str, revision: str | None) -> str | None:
    """Return the commit of a branch or tag of a model in the cache, or else `revision`.

    In a cache that was filled by hand the file of a branch may end with a line break. Transformers
    ignores it, and huggingface_hub takes it as a part of the commit, which it does not find.

    Args:
        revision: a branch, a tag or a commit; None: main.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    commit = ""
    with contextlib.suppress(OSError, ValueError):
        commit = (folder / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    # huggingface_hub takes nothing else as a commit.
    return commit if COMMIT.fullmatch(commit) else revision
