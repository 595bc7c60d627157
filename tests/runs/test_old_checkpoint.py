"""A checkpoint written by an earlier version resumes, and the run ends as if it was never interrupted.

tests/fixtures/checkpoint_format_1 was written by the version of 2026-11-22, before the supporting
code became packages: a run of 8 steps that was killed after step 5, with a checkpoint of step 4,
and the metrics of the same run without an interruption. The model and the text are the fixture's.
"""

import json
import shutil
from pathlib import Path

import pytest
from conftest import slow

FIXTURE = Path(__file__).parent.parent / "fixtures" / "checkpoint_format_1"
WORK = (
    "--model model --dataset text.txt --seq_length 32 --batch_size 4 --max_steps 8 "
    "--save_every 4 --precision fp32 --lr 1e-2 --eval_every 3 --output_dir run --resume"
).split()


@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulation"), [("dp", 1, 2), slow("zero2", 2, 1), slow("fsdp", 2, 1)]
)
def test_old_checkpoint_resumes(script, tmp_path, strategy, ranks, accumulation):
    """Under the strategy that wrote it, and under others on two ranks with the same global batch.

    The reference was written before dropout on a CPU had a generator of its own, so the dropped
    elements after step 4 are others; they change these losses by 2e-4. On two ranks each has its own
    dropout, so those runs are compared loosely.
    """
    project = shutil.copytree(FIXTURE, tmp_path / "project")
    flags = ["--strategy", strategy, "--gradient_accumulation_steps", accumulation]
    under = {"launcher": "python" if ranks == 1 else "torchrun", "ranks": ranks}
    resumed = script(*WORK, *flags, **under, cwd=project, folder=project / "run").metrics
    text = (FIXTURE / "metrics_of_whole_run.jsonl").read_text()
    expected = [json.loads(line) for line in text.splitlines()]
    assert [record["step"] for record in resumed] == [record["step"] for record in expected]
    tolerance = 1e-3 if ranks == 1 else 2e-2
    for record, wanted in zip(resumed, expected, strict=True):
        name = "loss" if "loss" in wanted else "eval_loss"
        assert record[name] == pytest.approx(wanted[name], rel=tolerance), record
