"""A run goes on under any strategy, on any number of ranks, as if nothing had changed."""

import shutil

import pytest
from conftest import assert_close

pytestmark = pytest.mark.slow

# Global batches of 6 blocks on 40: an epoch has 7 steps, the last one short. The schedule spans the
# whole run.
WORK = (
    "--seq_length 32 --num_samples 40 --epochs 2 --dropout 0 --eval_samples 9 --precision fp32 "
    "--lr_scheduler cosine --warmup_steps 3 --save_every 2 --no_export"
).split()
SPLIT = {
    1: "--batch_size 2 --gradient_accumulation_steps 3".split(),
    2: "--batch_size 1 --gradient_accumulation_steps 3".split(),
    3: ["--batch_size", "2"],
}


def checkpoint(run, step):
    return run.folder / "checkpoints" / f"step-{step:08d}"


def moments(run, step):
    """Every weight and moment of a checkpoint, by name."""
    from distributed_training.checkpoints.convert import OwnCheckpoint

    source = OwnCheckpoint(checkpoint(run, step))
    return {
        (name, kind): source.read(name, kind) for name in source.shapes for kind in source.kinds
    }


def check_chain(script, links, *args):
    """The first link runs to the end; each further one resumes the one before, two steps later."""
    whole = run = before = None
    for number, (strategy, ranks) in enumerate(links):
        start = 2 * number
        resume = ["--resume", checkpoint(run, start)] if run else []
        launcher = {"launcher": "torchrun", "ranks": ranks} if ranks > 1 else {}
        run = script(*WORK, *args, *SPLIT[ranks], "--strategy", strategy, *resume, **launcher)
        if whole is None:
            whole = run
            assert len(whole.losses) == 14
        else:
            for key, old, new in zip(("strategy", "ranks"), before, (strategy, ranks), strict=True):
                assert (f"{key} {old} in the checkpoint, {new}" in run.out) == (old != new)
        before = (strategy, ranks)
        ours, theirs = ([m for m in r.metrics if "loss" in m] for r in (run, whole))
        assert [m["step"] for m in ours] == list(range(start + 1, 15))
        assert [m["lr"] for m in ours] == [m["lr"] for m in theirs[start:]]
        assert_close(run.losses, whole.losses[start:], 1e-5)
        for key in ("steps", "samples", "tokens", "train_loss_first"):
            assert run.results[key] == whole.results[key]
        assert run.results["eval_loss"] == pytest.approx(whole.results["eval_loss"], rel=1e-5)
        states, expected = moments(run, start + 2), moments(whole, start + 2)
        assert states.keys() == expected.keys() and len({kind for _, kind in states}) == 3
        for key, tensor in states.items():
            assert (tensor - expected[key]).norm() <= 1e-3 * expected[key].norm(), key


def test_from_dp_over_every_strategy_back_to_dp(script):
    links = [("dp", 1), ("zero3", 2), ("infinity", 2), ("fsdp", 2), ("zero1", 3), ("offload", 1)]
    check_chain(script, [*links, ("dp", 2)])


def test_llama_from_infinity(script, llama, text_file):
    """Grouped-query attention, untied embeddings, a tokenizer of its own."""
    links = [("infinity", 2), ("dp", 1), ("infinity", 1)]
    check_chain(script, links, "--model", llama, "--dataset", text_file, "--lr", "1e-3")


def test_other_global_batch_is_refused_and_forced_keeps_the_position_in_the_data(
    script, text_file, tmp_path
):
    work = ["--dataset", text_file, "--no_eval", "--no_export"]
    work += "--seq_length 32 --num_samples 20 --epochs 2".split()
    first = script(*work, "--batch_size", "4", "--save_every", "2")
    other = [*work, "--batch_size", "6", "--resume", checkpoint(first, 2)]
    refused = script(*other, ok=False)
    assert refused.code == 2 and "global batch 4 in the checkpoint, 6 in this run" in refused.error
    # Into a folder that holds another run's checkpoints: they are not mixed up with this one's.
    used = shutil.copytree(first.folder, tmp_path / "used")
    run = script(*other, "--resume_force", "--output_dir", used, folder=used)
    saved = (used / "checkpoints").glob("*step-*")
    assert all(path.name.startswith("aside-") for path in saved)
    # 8 blocks are behind it, 12 of this epoch and 20 of the next are left: 2 steps of 6, then 6, 6,
    # 6 and 2.
    assert run.results["steps"] == 2 + 2 + 4 and run.results["samples"] == 40
    assert [record["epoch"] for record in run.metrics if record["step"] > 2] == [1, 1, 2, 2, 2, 2]


def test_another_precision_goes_on(script):
    work = "--seq_length 32 --num_samples 24 --batch_size 4 --no_eval --no_export".split()
    whole = script(*work, *"--precision fp32 --save_every 3".split())
    flags = "--precision bf16 --strategy zero1 --resume".split()
    run = script(*work, *flags, checkpoint(whole, 3))
    assert_close(run.losses, whole.losses[3:], 1e-2)
    assert run.results["precision"] == "bf16"
