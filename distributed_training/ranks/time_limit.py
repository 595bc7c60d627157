"""The time limit of a Slurm job, and when Slurm signals the job before it."""

import re

from distributed_training.errors import UserError

SIGNAL_SECONDS = 120  # before the time limit


def seconds_of(time_limit: str) -> int:
    """Return the seconds of a time limit, HH:MM:SS or D-HH:MM:SS.

    Raises:
        UserError: it has another form, or is 0, which means no limit.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", time_limit, re.ASCII)
    parts = [int(part or 0) for part in found.groups()] if found else [0]
    seconds = sum(part * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=False))
    if seconds == 0:
        raise UserError(f"--time_limit {time_limit}: write it as HH:MM:SS or D-HH:MM:SS, above 0.")
    return seconds
