"""The lines that --profile_memory prints."""

from collections.abc import Iterator

from distributed_training.text_tables import text_table
from distributed_training.units import human_bytes


def lines_of(used: dict, on_gpu: bool) -> Iterator[str]:
    """Yield the lines; the tables show the rank with the most.

    Args:
        used: the "memory" entry of results.json.
    """
    for rank in range(len(used["peak_bytes"])):
        yield f"{'GPU' if on_gpu else 'Process'} {rank} Memory:"
        for name in ("Allocated", "Reserved", "Peak"):
            yield f"  {name}: {_most([used[f'{name.lower()}_bytes'][rank]])}"
    kinds = ["device_allocated", "device_peak", "host_resident"][0 if on_gpu else 2 :]
    phases = used["phases_bytes"].items()
    rows = [[phase, *(_most(values[kind]) for kind in kinds)] for phase, values in phases]
    yield "\n" + text_table(rows, ["memory after", *kinds])
    places = (used["categories_bytes_by_rank"], used["device_categories_bytes_by_rank"])
    rows = [
        [kind, *(_most([rank[kind] for rank in place]) for place in places)]
        for kind in used["categories_bytes"] or ()
    ]
    yield "\n" + text_table(rows, ["live tensors by kind", "all", "on the device"])
    host, pinned = _most(used["host_peak_bytes"]), _most(used["pinned_bytes"])
    yield f"\nHost: {host} at its peak, {pinned} pinned"
    if used["nvme_bytes"]:
        written = human_bytes(used["nvme_written_bytes_per_step"])
        yield f"NVMe: {human_bytes(used['nvme_bytes'])} stored, {written} written in a step"


def _most(values: list[int | None]) -> str:
    known = [value for value in values if value is not None]
    return human_bytes(max(known)) if known else "—"
