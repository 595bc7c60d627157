#!/usr/bin/env bash
# release: wandb 0.31.0
# finding: With define_metric(summary="min"), "max" or "mean" one NaN makes the summary NaN for the rest of the run: losses of 1.0, NaN, 0.5 have the minimum NaN. An infinite loss does not spoil the minimum.
# guess: A NaN does not change the minimum: 0.5.
# matters: After one NaN loss the summary of a run has no minimum, although tables of runs are sorted by it.
# instead: Leave the key out of run.log when the value is NaN, and count such steps in a metric of their own.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile wandb==0.31.0
cd "$work"
HOME=$work WANDB_MODE=offline "$work/env/bin/python" - <<'PROGRAM'
import math

import wandb

NAN, INF = float("nan"), float("inf")


def summary_of(losses):
    """wandb's minimum, maximum and mean of a run's losses."""
    run = wandb.init(project="check", settings=wandb.Settings(silent=True, console="off"))
    run.define_metric("loss", summary="min,max,mean")
    for loss in losses:
        run.log({"loss": loss})
    found = dict(run.summary["loss"])
    run.finish()
    print(f"{losses}: {found}")
    return [found[name] for name in ("min", "max", "mean")]


assert summary_of([1.0, 0.75, 0.5]) == [0.5, 1.0, 0.75]
assert all(map(math.isnan, summary_of([1.0, NAN, 0.5])))
assert all(map(math.isnan, summary_of([NAN, 1.0, 0.5])))
assert summary_of([1.0, INF, 0.5]) == [0.5, INF, INF]
PROGRAM
echo "As found: one NaN makes the minimum, the maximum and the mean NaN."
