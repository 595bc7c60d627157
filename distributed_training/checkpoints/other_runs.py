"""Compare the signature of a checkpoint with that of the run that resumes it."""

from distributed_training import console
from distributed_training.errors import UserError, same_redacted
from distributed_training.files.json_types import JsonObject
from distributed_training.files.user_files import shown

WHERE = ("in the checkpoint", "in this run")
NAMES_BEFORE = {"reduce_dtype": "fsdp_reduce_dtype"}  # of entries in earlier versions
# Entries that earlier versions did not write, and their value in the runs of those versions.
VALUES_BEFORE: JsonObject = {
    "isolate_documents": False,
    "packing": False,
    "document_start": None,
    "decay_ratio": 0.1,
    "decay_type": "linear",
    "min_lr_ratio": 0.0,
    "lora_rslora": False,
    "lora_dora": False,
    "train_on": "assistant",
}


def refuse_other_run(saved: JsonObject, current: JsonObject, forced: bool) -> None:
    """Raise a UserError if a checkpoint is another run's; with `forced` only "hard" parts count."""
    for part in ("hard",) if forced else ("hard", "soft"):
        if found := differences(saved[part], current[part], *WHERE):
            advice = " Use --resume_force to resume nevertheless." if part == "soft" else ""
            raise UserError(
                f"--resume: the checkpoint is of another run: {'; '.join(found)}.{advice}"
            )


def report_changes(saved: JsonObject, current: JsonObject) -> None:
    """Warn of the differences between two run signatures that are not refused."""
    for part in ("soft", "told"):
        if found := differences(saved[part], current[part], *WHERE):
            console.warn(f"--resume: the settings have changed: {'; '.join(found)}.")


def differences(saved: JsonObject, current: JsonObject, then: str, now: str) -> list[str]:
    """Return a clause about each entry of a part of two run signatures that differs.

    Args:
        then, now: where the values of `saved` and `current` are.
    """
    before = saved and VALUES_BEFORE | saved
    before |= {new: saved[old] for new, old in NAMES_BEFORE.items() if old in saved}
    return [
        f"{key} {shown(before[key])} {then}, {shown(value)} {now}"
        for key, value in current.items()
        if key in before and not same_redacted(before[key], value)
    ]
