"""--auto_micro_batch: a run that needs too much memory continues with smaller micro-batches."""

import json
import sys

import pytest
from conftest import FAULT, SCRIPT, assert_close, descendants_of_test, finish, start

from distributed_training import process

WORK = "--seq_length 32 --max_steps 4 --dropout 0 --precision fp32 --no_eval --no_export".split()


@pytest.fixture(scope="module")
def whole(script):
    """The same global batch in one process, without accumulation."""
    return script(*WORK, "--batch_size", "16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, launcher, rank",
    [
        ("zero3", "deepspeed", 1),  # rank 0 hosts the store
        ("fsdp", "torchrun", 0),  # the agent does
    ],
)
def test_one_rank_without_memory_halves_the_micro_batch_of_all(
    script, whole, strategy, launcher, rank
):
    flags = [*WORK, "--strategy", strategy, "--batch_size", "8", "--auto_micro_batch"]
    fault = {"program": FAULT, "env": {"FAULT": f"oom_above:{rank}:2"}}
    # A program that starts again must be the one that was started.
    run = script(*flags, launcher=launcher, ranks=2, **fault, real=True, timeout=170)
    results = run.results
    assert (results["batch_size"], results["gradient_accumulation_steps"]) == (2, 4)
    assert (results["global_batch_size"], results["status"]) == (16, "completed")
    assert_close(run.losses, whole.losses, 1e-6)
    lines = [line for line in run.out.splitlines() if "start again with --batch_size" in line]
    assert len(lines) == 2 and all(f"rank {rank} on" in line for line in lines)
    assert "❌" not in run.out + run.err and descendants_of_test() == []


@pytest.mark.slow
def test_a_batch_that_the_plan_has_chosen_is_halved_too(script, whole):
    chosen = "--strategy auto --batch_size auto --global_batch_size 16 --auto_micro_batch".split()
    fault = {"program": FAULT, "env": {"FAULT": "oom_above:0:2"}}
    run = script(*WORK, *chosen, launcher="torchrun", ranks=2, **fault, real=True, timeout=170)
    assert run.results["automatic"]["batch_size"] == 8
    assert (run.results["batch_size"], run.results["gradient_accumulation_steps"]) == (2, 4)
    assert_close(run.losses, whole.losses, 1e-6)


def test_a_single_sequence_that_does_not_fit_ends_the_run(script):
    flags = [*WORK, "--batch_size", "2", "--auto_micro_batch"]
    run = script(*flags, program=FAULT, env={"FAULT": "oom_above:0:0"}, real=True, ok=False)
    assert run.code == 3 and "Out of memory" in run.error
    assert (run.results["status"], run.results["batch_size"]) == ("oom", 1)


@pytest.mark.parametrize(
    "code_of_torch, before, code, status",
    [
        ("import os, time; os.kill(os.getpid(), 15); time.sleep(30)", "running", 75, "preempted"),
        ("import os, time; os.kill(os.getpid(), 15); time.sleep(30)", "failed", 75, "failed"),
        ("raise ImportError('libtorch.so: failed to map segment')", "running", 1, "failed"),
        # While the program was replaced: the signal is blocked, and pending.
        ("raise ImportError('was not stopped')", "running", 75, "preempted"),
    ],
)
def test_results_of_a_run_that_ends_while_it_starts_again(
    tmp_path, code_of_torch, before, code, status
):
    (tmp_path / "torch.py").write_text(code_of_torch)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text(json.dumps({"status": before}))
    values = {"batch_size": 2, "gradient_accumulation_steps": 4, "output_dir": "out"}
    env = {"PYTHONPATH": ".", process.RESTARTED: json.dumps(values)}
    command = [sys.executable, SCRIPT, "--auto_micro_batch"]
    if "was not stopped" in code_of_torch:
        replace = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [15]); "
        replace += "os.kill(os.getpid(), 15); os.execv(sys.executable, sys.orig_argv[3:])"
        command = [sys.executable, "-c", replace, *command]
    run = start(command, env, cwd=tmp_path)
    _, err = finish(run, 20)
    assert run.returncode == code and err.count("\n") < 3 and "Traceback" not in err, err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["status"] == status
    assert before != "running" or results["reason"] in err
