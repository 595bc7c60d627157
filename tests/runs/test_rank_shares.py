"""--rank_shares: a faster rank computes more of each micro-batch, and the training is the same."""

import json
import signal

import pytest
from cluster_work import ranks_of, reached, wait_for
from conftest import (
    FAULT,
    SAME_WORK,
    SCRIPT,
    SPLIT,
    assert_close,
    descendants_of_test,
    finish,
    launcher_command,
    slow,
    soak,
    start,
)

FP32 = ["--precision", "fp32"]
TWO, THREE = ({"launcher": "torchrun", "ranks": ranks} for ranks in (2, 3))
AUTO = ["--rank_shares", "auto"]


@pytest.mark.slow
def test_three_ranks_with_shares_4_2_1(script, reference):
    """They get 8, 3 and 1 of 12 sequences; the last micro-batch of an epoch has one."""
    flags = [*SAME_WORK, *FP32, "--no_export", "--strategy", "zero3", "--batch_size", "4"]
    run = script(*flags, "--rank_shares", "4,2,1", **THREE)
    whole = script(*SAME_WORK, *FP32, "--no_export", "--batch_size", "12")
    assert run.results["rank_sequences"] == [8, 3, 1]
    assert_close(run.losses, whole.losses, 1e-5)


@pytest.mark.parametrize(
    "saved_under, resumed_under",
    [
        slow("--rank_shares 3,1", ""),
        slow("", "--rank_shares 1,3"),
        slow("--rank_shares 3,1", "fsdp"),
    ],
)
def test_a_checkpoint_resumes_under_other_shares(script, reference, saved_under, resumed_under):
    flags = [*SAME_WORK, *SPLIT, *FP32, "--no_export"]
    saved = script(*flags, *saved_under.split(), "--strategy", "zero2", "--save_every", "4", **TWO)
    checkpoint = saved.folder / "checkpoints" / "step-00000004"
    other = resumed_under.split() if resumed_under.startswith("--") else []
    strategy = "fsdp" if resumed_under == "fsdp" else "zero2"
    resumed = script(*flags, *other, "--strategy", strategy, "--resume", checkpoint, **TWO)
    assert "rank_shares" in resumed.out
    assert len(resumed.losses) == 6
    assert_close(resumed.losses, saved.losses[4:], 1e-6)
    assert_close(resumed.losses, reference.losses[4:], 1e-5)


@pytest.mark.slow
def test_a_stream_is_divided_by_shares(script, text_file):
    flags = "--streaming --seq_length 32 --max_steps 6 --no_eval --no_export --dropout 0 --dataset "
    flags = [*flags.split(), text_file, *FP32]
    one = script(*flags, "--batch_size", "8")
    run = script(*flags, *SPLIT, "--rank_shares", "3,1", "--save_every", "3", **TWO)
    assert_close(run.losses, one.losses, 1e-5)
    checkpoint = run.folder / "checkpoints" / "step-00000003"
    resumed = script(*flags, *SPLIT, "--resume", checkpoint, **TWO)
    assert_close(resumed.losses, one.losses[3:], 1e-5)


@pytest.mark.slow
def test_packed_examples_and_compiled_blocks_are_divided_by_shares(script, tmp_path):
    pairs = [{"prompt": "a b", "completion": " c" * (1 + n % 7)} for n in range(80)]
    (file := tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    flags = ["--dataset", file, "--packing", "--seq_length", "32", "--epochs", "1", "--no_export"]
    flags += ["--dropout", "0", "--validation_split", "0.2", *FP32]
    one = script(*flags, "--batch_size", "4")
    run = script(*flags, "--batch_size", "2", "--rank_shares", "3,1", "--compile", **TWO)
    assert_close(run.losses, one.losses, 1e-5)
    assert run.results["eval_loss"] == pytest.approx(one.results["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("strategy", [slow("dp"), slow("zero3"), soak("fsdp"), soak("zero2")])
def test_auto_gives_a_slow_rank_fewer_sequences(script, strategy):
    """Rank 1 needs a multiple of the other's time; the losses stay those of equal ranks."""
    flags = "--seq_length 32 --num_samples 320 --max_steps 14 --dropout 0 --no_eval --no_export"
    flags = [*flags.split(), *FP32, "--strategy", strategy, "--save_every", "8"]
    fault = {"program": FAULT, "env": {"FAULT": "slow:1:0.06"}, **TWO}
    run = script(*flags, "--batch_size", "4", *AUTO, **fault)
    one = script(*flags, "--batch_size", "8", "--strategy", "dp")
    assert_close(run.losses, one.losses, 1e-5)
    [record] = [m for m in run.metrics if "rank_sequences" in m]
    chosen = run.results["rank_sequences"]
    assert record["rank_sequences"] == chosen and chosen[0] > 4 > chosen[1] >= 1
    slow_rank, fast = record["rank_seconds_per_token"][::-1]
    assert slow_rank > max(fast, 0.06 / 32)
    # A resumed run repeats the choice at the same step: the checkpoint of step 8 contains it.
    checkpoint = run.folder / "checkpoints" / f"step-{record['step']:08d}"
    resumed = script(*flags, "--batch_size", "4", *AUTO, "--resume", checkpoint, **TWO)
    assert resumed.losses == run.losses[8:]
    assert resumed.results["rank_sequences"] == chosen


@pytest.mark.parametrize("restarts", [False, slow(True)])
def test_a_rank_whose_larger_share_does_not_fit_ends_the_run_or_halves_the_batch(script, restarts):
    flags = "--seq_length 32 --max_steps 4 --dropout 0 --no_eval --no_export --batch_size 4"
    flags = [*flags.split(), *FP32, "--rank_shares", "3,1"]
    fault = {"program": FAULT, "env": {"FAULT": "oom_above:0:5"}, **TWO}
    if restarts:
        run = script(*flags, "--auto_micro_batch", **fault, real=True)
        assert (run.results["batch_size"], run.results["rank_sequences"]) == (2, [3, 1])
    else:
        run = script(*flags, **fault, ok=False)
        assert run.results["status"] == "oom" and "rank 0" in run.error
    assert descendants_of_test() == []


@pytest.mark.slow
def test_ranks_with_unequal_shares_fail_and_stop_as_others_do(tmp_path):
    work = "--seq_length 32 --batch_size 2 --no_eval --epochs 99 --rank_shares 3,1".split()
    for rank, number in ((1, signal.SIGKILL), (0, signal.SIGTERM)):
        folder = tmp_path / str(rank)
        process = start([*launcher_command("torchrun", 2), SCRIPT, *work, "--output_dir", folder])
        reached(process, "Epoch 1 | Batch 1")
        ranks_of(process)[rank].send_signal(number)
        finish(process, 60)
        status = json.loads((folder / "results.json").read_text())["status"]
        assert process.returncode and status == ("failed" if rank else "preempted")
    assert descendants_of_test() == []


@pytest.mark.slow
def test_a_suspended_rank_is_reported(tmp_path):
    folder = tmp_path / "out"
    work = "--seq_length 32 --batch_size 2 --no_eval --epochs 999 --no_export --hang_seconds 3"
    flags = [*work.split(), "--rank_shares", "3,1", "--output_dir", folder]
    process = start([*launcher_command("torchrun", 2), SCRIPT, *flags])
    reached(process, "Epoch 1 | Batch 1")
    second = ranks_of(process)[1]
    second.suspend()
    report = folder / "hang" / "report.txt"
    wait_for(lambda: report.exists() and "stopped" in report.read_text(), 30, "no report")
    second.resume()
    process.terminate()
    finish(process, 60)


@pytest.mark.parametrize(
    "flags, problem",
    [
        ("--rank_shares 1,0", "0"),
        ("--rank_shares 1:2", "1:2"),
        ("--rank_shares auto --deterministic", "--deterministic"),
        ("--rank_shares auto --streaming --max_steps 2", "--streaming"),
        ("--rank_shares auto --simulate_gpus 2", "--simulate_gpus"),
        ("--rank_shares auto --compile --strategy fsdp", "--compile"),
        ("--rank_shares 1,2", "2 shares for 1 rank"),
    ],
)
def test_shares_that_cannot_be_used_are_refused(script, flags, problem):
    run = script(*flags.split(), ok=False)
    assert run.code == 2 and problem in run.error
