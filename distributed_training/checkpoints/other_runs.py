"""Compare the signature of a checkpoint with that of the run that resumes it."""

from distributed_training import console
from distributed_training.checkpoints.format import COMMIT, FROZEN
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
            if FROZEN in saved[part] and saved[part][FROZEN] != current[part].get(FROZEN):
                advice = _advice_for_frozen(saved, current)
            raise UserError(
                f"--resume: the checkpoint is of another run: {'; '.join(found)}.{advice}"
            )


def _advice_for_frozen(saved: JsonObject, current: JsonObject) -> str:
    """Return the advice for a run whose frozen weights are not those of the checkpoint."""
    commit = saved["told"].get(COMMIT)
    if commit and commit != current["told"].get(COMMIT):
        advice = f"the adapters were trained with: --model_revision {shown(commit)} --resume_force"
    else:
        advice = "the adapters were trained with; the weights of --model have changed since"
    return f" Use the weights that {advice}."


def other_weights(saved: JsonObject, current: JsonObject) -> str:
    """Return a clause that says why weights of one run are useless in another, or ""."""
    found = differences(saved["hard"], current["hard"], *WHERE)
    return f"it is of another run ({'; '.join(found)})" if found else ""


def report_changes(saved: JsonObject, current: JsonObject) -> None:
    """Warn of what differs between two run signatures and is not refused, or not known."""
    if FROZEN in current["hard"] and FROZEN not in saved["hard"]:
        console.warn(
            "--resume: the checkpoint does not record its frozen weights, because an earlier "
            "version saved it: they are not compared with those of --model."
        )
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
