"""A rank that fails in the middle ends the whole run, and the first error is the one that is shown."""

import json
import signal
import time

import pytest
from cluster_work import ranks_of, reached
from conftest import (
    FAULT,
    SCRIPT,
    SMALL,
    descendants_of_test,
    finish,
    launcher_command,
    slow,
    start,
)

WORK = ["--seq_length", "32", "--batch_size", "2", "--no_eval"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, rank, launcher", [("fsdp", 0, "torchrun"), ("zero2", 1, "deepspeed")]
)
def test_crash_of_one_rank_ends_all(tmp_path, strategy, rank, launcher):
    flags = [*WORK, "--strategy", strategy, "--output_dir", tmp_path / "out"]
    command = [*launcher_command(launcher, 2), FAULT, *flags]
    process = start(command, env={"FAULT": f"crash:{rank}:3"})
    said = "".join(finish(process, 60))
    [line] = [line for line in said.splitlines() if "❌" in line]
    assert process.returncode != 0
    assert "a planted crash" in line and f"rank {rank}" in line
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["status"] == "failed" and "a planted crash" in results["reason"]
    assert descendants_of_test() == []


def test_killed_rank_ends_all_within_30_seconds(tmp_path):
    process = start(
        [*launcher_command("torchrun", 2), SCRIPT, *WORK, "--output_dir", tmp_path / "out"]
    )
    reached(process, "Epoch 1")
    ranks_of(process)[1].kill()
    killed = time.monotonic()
    _, err = finish(process, 40)
    assert process.returncode != 0
    assert time.monotonic() - killed < 30
    assert "SIGKILL" in err or "Signal 9" in err  # the launcher's own report names the cause
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["status"] != "running"
    assert descendants_of_test() == []


def test_token_cache_that_shrinks_ends_all_ranks_and_leaves_the_checkpoints(script, tmp_path):
    """The next read finds it, on whichever rank it is."""
    flags = [*WORK, "--max_steps", "9", "--save_every", "1", "--cache_dir", tmp_path / "cache"]
    under = {"launcher": "torchrun", "ranks": 2}
    run = script(*flags, **under, program=FAULT, env={"FAULT": "cut:1:5"}, ok=False)
    losses = run.losses
    assert run.code == 1 and run.results["status"] == "failed"
    assert "train.bin" in run.error and str(tmp_path / "cache") in run.results["reason"]
    assert 2 <= len(losses) <= 4
    assert descendants_of_test() == []
    resumed = script(*flags, "--batch_size", "4", "--resume", folder=run.folder)
    assert len(resumed.losses) == 9 and resumed.losses[:2] == losses[:2]


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_loss_that_is_not_finite_stops_the_run(script, strategy):
    run = script(*WORK, "--strategy", strategy, program=FAULT, env={"FAULT": "nan:4"}, ok=False)
    assert run.code == 1
    assert "The loss is nan" in run.error
    assert run.results["status"] == "failed"
    assert len(run.losses) == 3  # the steps before it are on record


@pytest.mark.parametrize(
    "stage, precision", [(2, "bf16"), slow(3, "bf16"), slow(1, "fp32"), slow(1, "bf16")]
)
def test_loss_that_is_not_finite_stops_with_a_file_without_check_grad_overflow(
    script, small_gpt2, tmp_path, stage, precision
):
    """DeepSpeed 0.19.8 skips such an update, and counts the step, unless the key is false."""
    zero = {"stage": stage}
    content = {"bf16": {"enabled": "auto"}, "zero_optimization": zero, "gradient_clipping": 1.0}
    (file := tmp_path / "ds.json").write_text(json.dumps(content))
    work = [*WORK, "--model", small_gpt2, *SMALL, "--ds_config", file, "--precision", precision]
    run = script(*work, "--save_every", "1", program=FAULT, env={"FAULT": "nan:2"}, ok=False)
    assert run.code == 1 and "The loss is nan at step 2" in run.error and len(run.losses) == 1
    saved = [path.name for path in (run.folder / "checkpoints").glob("step-*")]
    assert saved == ["step-00000001"]


@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero3"])
def test_gradient_that_is_not_finite_stops_the_run_and_is_in_no_checkpoint(
    script, small_gpt2, strategy
):
    """DeepSpeed leaves out such an update under zero3, and not in bf16 under zero1."""
    run = script(
        *WORK,
        *f"--strategy {strategy} --precision bf16 --save_every 1".split(),
        *["--model", small_gpt2, *SMALL],
        program=FAULT,
        env={"FAULT": "infinite:3"},
        ok=False,
    )
    assert run.code == 1 and "gradient" in run.error
    assert run.results["status"] == "failed" and len(run.losses) == 2
    saved = sorted(path.name for path in (run.folder / "checkpoints").glob("step-*"))
    assert saved == ["step-00000001", "step-00000002"]


def stopped(begin, *flags) -> tuple[int, str]:
    """Send SIGTERM to a run that trains; return its exit code and its errors."""
    process = begin([*launcher_command("python", 1), SCRIPT, *WORK, *flags])
    reached(process, "Epoch 1")
    process.send_signal(signal.SIGTERM)
    _, err = finish(process, 30)
    return process.returncode, err


@pytest.mark.slow
def test_stopped_infinity_leaves_nothing_on_nvme(begin, tmp_path):
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    flags = ["--strategy", "infinity", "--nvme_path", nvme, "--output_dir", tmp_path / "out"]
    assert stopped(begin, *flags) == (75, "")
    assert list(nvme.iterdir()) == []


def test_signal_with_no_save_ends_with_one_line(begin, tmp_path):
    code, err = stopped(begin, "--no_save", "--output_dir", tmp_path / "out")
    assert code == 1
    assert err.count("❌") == 1 and "SIGTERM" in err and "Traceback" not in err
    assert not (tmp_path / "out" / "checkpoints").exists()
