"""Evaluations decide when to stop, and which weights are the result."""

import json

import pytest
from conftest import soak

# 24 blocks, seen again and again at a high rate: what was held out gets worse before long.
WORK = (
    "--seq_length 32 --num_samples 24 --batch_size 8 --epochs 20 --lr 3e-3 --precision fp32 "
    "--eval_every 4 --eval_samples 16 --lr_scheduler constant"
).split()


def test_early_stopping_keeps_and_exports_the_best(script, tmp_path):
    flags = "--early_stopping_patience 2 --load_best_at_end --keep_last 1 --output_dir"
    work = [*WORK, *flags.split(), tmp_path]
    run = script(*work, folder=tmp_path)
    evaluations = {r["step"]: r["eval_loss"] for r in run.metrics if "eval_loss" in r}
    best, found = min(evaluations, key=evaluations.get), run.results
    # Two more after the best.
    assert list(evaluations) == list(range(4, best + 9, 4)) and best + 8 < 60
    assert (found["best_step"], found["stopped_early"], found["steps"]) == (best, 2, best + 8)
    assert found["best_eval_loss"] == evaluations[best] < found["eval_loss"]
    # With early stopping the last step is not known, so an early step is measured.
    held = found["memory"]["categories_bytes"]
    assert held["optimizer"] == pytest.approx(2 * held["parameters"], rel=1e-3)
    assert (tmp_path / "checkpoints" / "best").read_text().strip() == f"step-{best:08d}"
    flags = f"--model {tmp_path / 'hf'} --dataset pydocs --eval_only --eval_samples 16"
    exported = script(*flags.split(), *"--seq_length 32 --precision fp32".split())
    assert exported.results["eval_loss"] == pytest.approx(found["best_eval_loss"], rel=1e-5)
    again = script(*work, "--resume", folder=tmp_path)  # it stops at the same step again
    assert (again.results["best_step"], again.results["steps"]) == (best, best + 8)


def test_patience_and_the_best_survive_a_resume(script, tmp_path):
    work = [*WORK, "--early_stopping_patience", "2", "--no_export"]
    whole = script(*work, "--save_every", "2", "--strategy", "zero2", launcher="torchrun", ranks=2)
    best = whole.results["best_step"]
    # After one evaluation that was no better, and before the other.
    start = whole.folder / "checkpoints" / f"step-{best + 6:08d}"
    resumed = script(*work, "--batch_size", "16", "--no_save", "--resume", start)
    assert json.loads((start / "manifest.json").read_text())["counters"]["best"]["waited"] == 1
    assert len(resumed.losses) == 2
    assert (resumed.results["steps"], resumed.results["best_step"]) == (best + 8, best)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", soak("zero2"), soak("zero3"), soak("infinity")])
def test_the_best_weights_are_everywhere(script, strategy):
    """Also where FSDP has kept what it gathered for the last evaluation: the sample comes from the
    live model, not the export.
    """
    how = ["--fsdp", "shard_grad_op"] if strategy == "fsdp" else ["--strategy", strategy]
    work = [*WORK, "--load_best_at_end", "--eval_samples", "16", "--generate", "A list is", *how]
    run = script(*work, "--max_steps", "16", "--batch_size", "4", launcher="torchrun", ranks=2)
    assert run.results["best_step"] < 16
    assert len(list((run.folder / "checkpoints").glob("step-*"))) == 1
    flags = "--dataset pydocs --eval_only --seq_length 32 --precision fp32 --eval_samples 16"
    model = ["--model", run.folder / "hf", "--generate", "A list is"]
    loaded = script(*flags.split(), *model)
    assert loaded.results["eval_loss"] == pytest.approx(run.results["best_eval_loss"], rel=1e-5)
    assert loaded.results["sample"] == run.results["sample"]
