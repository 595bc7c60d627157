"""How two runs of --prove differ: in the loss, the gradient and the update of their first step.

The checkpoint after the step has whole tensors for every strategy: Adam's first moment is
(1 - beta1) times the gradient (Kingma and Ba, arXiv 1412.6980, algorithm 1), and the weights show
the update.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import torch

from distributed_training.checkpoints.convert import OwnCheckpoint
from distributed_training.errors import TrainingError
from distributed_training.settings.training import TrainingSettings

# The largest differences that count as equal; LEGEND has their units.
TOLERANCES = {"loss": 1e-5, "gradient's norm": 1e-5, "gradient": 1e-5, "update": 1e-3}
LEGEND = """
Differences from the first way, before clipping. Of the loss and the norm: relative. Of the
gradient: in the parameter that differs most, as a share of the whole gradient's norm. Of the
update: of the weight that differs most, in learning rates. fp32 rounds each result to 6e-08 of its
size, and each way adds the same numbers in another order. Trainer gets no label for the first token
of a sequence, which has no loss: otherwise it divides an accumulated loss of GPT-2 by its label as
well (docs/COMING_FROM.md#what-trainer-does-differently).
"""


class Step(NamedTuple):
    """The step of a run."""

    loss: float  # in nats per token
    scale: float  # of the gradient before clipping, in units of Adam's first moment
    checkpoint: OwnCheckpoint  # the weights and moments after the step
    adds: str = ""  # what its loss has in addition


def step_of(folder: Path, training: TrainingSettings) -> Step:
    """Return the step of a run."""
    record = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    # The factor of clip_grad_norm_ is max_norm / (norm + 1e-6). It is undone, because PyTorch's
    # norm, which Trainer uses, is summed in fp32 and therefore less precise than the gradient.
    clipping = max(1, (record["grad_norm"] + 1e-6) / training.max_grad_norm)
    scale = clipping / (1 - training.adam_beta1)
    return Step(record["loss"], scale, OwnCheckpoint(folder), record.get("adds", ""))


def compare_steps(reference: Step, step: Step, lr: float) -> tuple[dict[str, float], float, str]:
    """Compare two steps, one parameter at a time.

    Returns:
        The differences under the keys of TOLERANCES, the norm of the step's gradient, and the
        parameter whose gradient differs most.
    """
    steps = (reference, step)
    first, second = (one.checkpoint for one in steps)
    if only_one := sorted(set(first.shapes) ^ set(second.shapes)):
        raise TrainingError(f"Only some of the ways train {', '.join(only_one[:3])}.")
    norms, distances, updates = [], {}, []
    for name in first.shapes:
        gradients = [one.checkpoint.read(name, "exp_avg").mul_(one.scale) for one in steps]
        norms.append([_norm(gradient) for gradient in gradients])
        distances[name] = _norm(gradients[1].sub_(gradients[0]))
        weight = first.read(name, "weight")
        moved = second.read(name, "weight").sub_(weight).abs_()
        moved -= weight.abs_() * 2**-22  # each way rounds the weight twice, by half a digit
        updates.append(moved.max() / lr)
    worst = max(distances, key=lambda name: distances[name])
    wanted, norm = (math.hypot(*sizes) for sizes in zip(*norms, strict=True))
    loss = abs(step.loss / reference.loss - 1)
    update = torch.stack(updates).max().item()  # NaN if one is NaN
    values = (loss, abs(norm / wanted - 1), distances[worst] / wanted, update)
    return dict(zip(TOLERANCES, values, strict=True)), norm, worst


def _norm(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item()


def describe_problem(
    name: str, differences: dict[str, float], parameter: str, adds: str = ""
) -> str:
    """Return the line about a way that is not equal, or ""; NaN is not equal."""
    parts = [part for part, limit in TOLERANCES.items() if not differences[part] <= limit]
    at = f"largest in the gradient of {parameter}"
    cause = f" Its loss adds {adds}, which this project leaves out." if adds else ""
    return f"❌ {name}: not equal in {', '.join(parts)}; {at}.{cause}" if parts else ""
