"""Recognize checkpoints of Hugging Face's Trainer by their names, without importing torch."""

from pathlib import Path


def newest_of_trainer(folder: Path) -> Path:
    """Return the newest checkpoint-N in a Trainer's output folder, or the folder itself."""
    states = folder.glob("checkpoint-*/trainer_state.json")
    found = {path.parent.name.removeprefix("checkpoint-"): path.parent for path in states}
    steps = [step for step in found if step.isdecimal()]
    return found[max(steps, key=int)] if steps else folder
