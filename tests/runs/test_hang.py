"""Ranks that wait for each other: the report of their stacks, which does not end the run."""

import os
import re
import signal
from pathlib import Path

import pytest
from cluster_work import ranks_of, reached, wait_for
from conftest import FAULT, SCRIPT, finish, launcher_command, start

WORK = ["--seq_length", "32", "--batch_size", "2", "--no_eval", "--no_export"]


def wait_for_reports(folder: Path, number: int) -> list[str]:
    """The reports in an output folder, as soon as there are `number`."""
    file = folder / "hang" / "report.txt"
    wait_for(lambda: file.exists() and file.read_text().count("Hang report of ") == number, 30, "")
    return file.read_text().split("Hang report of ")[1:]


def stacks_of(folder: Path, rank: int) -> str:
    """The stacks of a rank, which it writes at the same time as the report."""
    file = folder / "hang" / f"rank-{rank}.txt"
    wait_for(lambda: file.stat().st_size, 10, "no stacks")
    return file.read_text()


def columns_of(report: str, rank: int) -> list[str]:
    """The row of a rank in the table of a report."""
    return re.search(rf"^{rank} +.*$", report, re.MULTILINE)[0].split()


def test_a_rank_that_is_stopped_is_reported_and_the_run_continues(tmp_path, request):
    folder = tmp_path / "out"
    flags = [*WORK, "--hang_seconds", "3", "--epochs", "1000", "--output_dir", folder]
    process = start([*launcher_command("torchrun", 2), SCRIPT, *flags])
    request.addfinalizer(process.terminate)  # or the ranks would train on if an assertion fails
    reached(process, "Epoch 1 | Batch 1")
    first, second = ranks_of(process)
    second.suspend()
    [report] = wait_for_reports(folder, 1)
    second.resume()
    assert "Rank 1 did not start collective" in report.splitlines()[1]
    assert columns_of(report, 1)[2:4] == [str(second.pid), "stopped"]
    assert int(columns_of(report, 1)[4]) >= 1  # its last known step, of up to a second before
    assert "train_epoch_ddp" in stacks_of(folder, 0)

    second.send_signal(signal.SIGUSR2)
    report = wait_for_reports(folder, 2)[1]
    assert "SIGUSR2" in report and "train_epoch_ddp" in stacks_of(folder, 1)
    assert [columns_of(report, rank)[2] for rank in (0, 1)] == [str(first.pid), str(second.pid)]
    process.send_signal(signal.SIGTERM)
    out, err = finish(process, 60)
    assert process.returncode != 0 and "preempted" in (folder / "results.json").read_text()
    assert out.count(str(folder / "hang")) == 2 and "❌" not in out + err


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, fault, says",
    [
        ("fsdp", "hang:1:3", "Rank 1 did not start collective"),
        ("zero3", "skip:1:2", "The ranks differ in collective"),
    ],
)
def test_a_report_is_written_before_the_timeout_ends_the_run(script, strategy, fault, says):
    run = script(
        *WORK,
        *("--strategy", strategy, "--ddp_timeout", "14", "--hang_seconds", "4"),
        launcher="torchrun",
        ranks=2,
        program=FAULT,
        env={"FAULT": fault},
        ok=False,
        timeout=90,
    )
    assert run.code != 0 and run.results["status"] == "failed"
    assert sum("stacks of the ranks" in line for line in run.out.splitlines()) == 1
    [report] = wait_for_reports(run.folder, 1)
    assert says in report and says in run.out
    if fault.startswith("hang"):
        assert "fault.py" in stacks_of(run.folder, 1)
        assert "distributed_c10d.py" in stacks_of(run.folder, 0)


def test_one_process_reports_its_stack_on_a_signal(begin, tmp_path):
    process = begin([*launcher_command("python", 1), SCRIPT, *WORK, "--output_dir", tmp_path])
    reached(process, "Epoch 1 | Batch 0")
    os.kill(process.pid, signal.SIGUSR2)
    assert "SIGUSR2" in wait_for_reports(tmp_path, 1)[0]
    assert "train_epoch_ddp" in stacks_of(tmp_path, 0)
    process.send_signal(signal.SIGTERM)
    _, err = finish(process, 60)
    assert process.returncode == 75 and err == ""
