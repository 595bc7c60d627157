"""Run the script with one thing broken, as the environment variable FAULT names it:

    crash:RANK:N       that rank raises an exception as it reads its N-th micro-batch
    nan:N              the N-th loss is not a number
    gpus:N             torch sees N GPUs (this machine has none)
"""

import os
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "real_model_example.py"


def break_steps(action) -> None:
    """Call action(n) as the n-th micro-batch is read, counting from 1; reading is one step ahead of training."""
    from support import data

    served, fill_up = [0], data.fill_up

    def broken(file, indices, rows):
        served[0] += 1
        inputs, labels = fill_up(file, indices, rows)
        action(served[0])
        return inputs, labels

    data.fill_up = broken


def main() -> None:
    kind, *values = os.environ["FAULT"].split(":")
    sys.argv[0] = str(SCRIPT)
    sys.path.insert(0, str(SCRIPT.parent))
    import torch

    if kind == "crash":
        rank, step = map(int, values)

        def crash(now):
            if now == step and int(os.environ["RANK"]) == rank:
                raise RuntimeError("a planted crash")

        break_steps(crash)
    elif kind == "nan":
        cross_entropy, calls = torch.nn.functional.cross_entropy, [0]

        def not_a_number(*args, **kwargs):
            calls[0] += 1
            return cross_entropy(*args, **kwargs) * (float("nan") if calls[0] == int(values[0]) else 1)

        torch.nn.functional.cross_entropy = not_a_number
    elif kind == "gpus":
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: int(values[0])
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
