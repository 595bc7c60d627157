"""compare_strategies.sh and its report: the same work for all, a true verdict, and no failure that
stops the others.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest
from cluster_work import wait_for
from conftest import (
    FAULT,
    PROJECT,
    SAME_WORK,
    SMALL,
    SPLIT,
    STRATEGIES,
    Run,
    assert_close,
    descendants_of_test,
    finish,
    skip_without_libaio,
    start,
)
from project_copy import copy_project

REPORT = PROJECT / "scripts" / "compare_runs.py"
BF16 = [*SAME_WORK, *SPLIT, "--precision", "bf16", *SMALL]
MODEL = "small-gpt2"
SHORT = ["--seq_length", "32", "--batch_size", "2", "--precision", "fp32"]


@pytest.fixture(scope="module")
def compare(preloaded):
    """compare(folder, *args) runs a comparison in `folder`; returns exit code, output and
    comparison_results_<name>.json (or None). Forks of a preloaded interpreter run the training.
    """

    def run(folder, *args, script=PROJECT / "compare_strategies.sh", name="tiny-gpt2", **env):
        python = {"PYTHON": sys.executable}
        if preloaded:
            python = {"PYTHON": preloaded.python, **preloaded.for_torchrun()}
        process = start(["bash", script, *args], env={**python, "NUM_GPUS": 2, **env}, cwd=folder)
        out, err = finish(process, 600)
        report = folder / f"comparison_results_{name}.json"
        found = json.loads(report.read_text()) if report.exists() else None
        return process.returncode, out + err, found

    return run


def by_strategy(found):
    return {row["strategy"]: row for row in found["strategies"]}


def run_of(folder, strategy):
    """The first run of a strategy."""
    return Run(folder=folder / "comparison_runs" / MODEL / strategy / "1")


@pytest.fixture(scope="module")
def all_seven(tmp_path_factory, small_gpt2, compare):
    """All strategies in bf16 on two processes, in a folder with a space in its name: (folder,
    output, report). The model is in a folder, too.
    """
    skip_without_libaio()
    folder = tmp_path_factory.mktemp("my work")
    shutil.copytree(small_gpt2, folder / MODEL)
    code, out, found = compare(folder, MODEL, *BF16, name=MODEL)
    assert code == 0, out
    return folder, out, found


@pytest.mark.slow
def test_simulated_comparison(tmp_path, compare):
    """The memory of four ranks, from one process for each strategy; no losses, no speeds, and never
    mixed with real runs.
    """
    env = {"STRATEGIES": "dp fsdp", "SIMULATE_GPUS": 4}
    code, out, found = compare(tmp_path, "tiny-gpt2", *SHORT, **env)
    assert code == 0, out
    work, rows = found["work"], by_strategy(found)
    assert (work["simulated_world_size"], work["world_size"], found["same_model"]) == (4, 1, None)
    assert not any("speed" in row or "final_loss" in row for row in rows.values())
    assert rows["fsdp"]["saved"] == pytest.approx(0.75, abs=0.01)


def test_all_strategies_do_the_same_work(all_seven, small_gpt2, script):
    folder, out, found = all_seven
    in_fp32 = ["--precision", "fp32", "--batch_size", "8", "--model", small_gpt2]
    reference = script(*SAME_WORK, *in_fp32, *SMALL)
    assert reference.losses[-1] < reference.losses[0] - 0.1  # it learns more than the tolerance
    rows = by_strategy(found)
    assert list(rows) == STRATEGIES
    assert {row["status"] for row in rows.values()} == {"completed"}
    assert found["reference"] == "dp" and found["same_model"] and found["departing"] == []
    report = folder / f"comparison_results_{MODEL}.md"
    assert report.with_suffix(".png").stat().st_size > 10_000
    losses_of_dp = run_of(folder, "dp").losses
    for name, row in rows.items():  # the numbers of the report, taken again from the raw files
        run = run_of(folder, name)
        results, losses = run.results, run.losses
        off = [abs(a - b) / b for a, b in zip(losses, losses_of_dp, strict=True)]
        medians = [median(off[first : first + 5]) for first in range(len(losses) - 4)]
        assert row["difference"] == max(medians)
        median_step = results["step_seconds"]["median"]
        assert row["samples_per_second"] == results["global_batch_size"] / median_step
        assert row["final_loss"] == losses[-1] and results["precision"] == "bf16"
        assert_close(losses, reference.losses, 1e-2)  # bf16 stays within one percent of fp32
        assert row["planned_bytes"] == pytest.approx(row["memory_bytes"], rel=0.02), name
        # The table, and the exact command.
        for table, times in ((out, 2), (report.with_suffix(".txt").read_text(), 1)):
            rows_of_it = re.findall(rf"^{name} +completed .* {losses[-1]:.4f} .*$", table, re.M)
            assert len(rows_of_it) == times  # on the screen as it completes, and in the report
        assert re.search(rf"--precision bf16 .*--strategy {name}$", report.read_text(), re.M)


def test_memory_saved_on_two_ranks(all_seven):
    """Bytes a parameter in bf16 with Adam: 16 for dp; of ZeRO 2 + 2/2 + 12/2, for stage 3 (2 + 2 +
    12)/2 (1910.02054).

    DeepSpeed's stage 1 has let go of the other ranks' gradients by the end of backward.
    """
    found = all_seven[2]
    rows, parameters = by_strategy(found), found["work"]["parameters"]
    expected = {"dp": 16, "zero1": 9, "zero2": 9, "zero3": 8, "offload": 2, "fsdp": 8}
    for name, each in expected.items():
        near = 0.03 if name in ("zero1", "zero2") else 0.02  # 2 % more for so small a model
        assert rows[name]["memory_bytes"] / parameters == pytest.approx(each, rel=near), name
    assert rows["fsdp"]["saved"] == pytest.approx(0.5, abs=0.02)
    assert rows["infinity"]["memory_bytes"] < rows["offload"]["memory_bytes"]
    # Masters and moments, and gradients.
    assert sum(rows["offload"]["host_categories"].values()) > 6 * parameters


def test_bytes_sent(all_seven):
    """A rank of two sends half of each element that is gathered; twice that in an all-reduce."""
    found = all_seven[2]
    rows, parameters = by_strategy(found), found["work"]["parameters"]
    # Bytes per parameter: dp gradients in fp32; zero1 gradients and parameters in bf16; zero2 and
    # offload reduce gradients after each of two micro-batches.
    for name, sent in {"dp": 4, "zero1": 3, "zero2": 5, "offload": 5}.items():
        assert rows[name]["sent_bytes"] == pytest.approx(sent * parameters, rel=1e-3), name
    # In each micro-batch gathered and scattered. So small a model stays gathered until backward; a
    # larger one is gathered twice (test_equality.py).
    for name in ("zero3", "infinity"):
        volume = rows[name]["volume"]
        assert 3.9 < volume < 5, name
        assert rows[name]["sent_bytes"] == pytest.approx(volume * parameters, rel=1e-3), name
    # Both embeddings and the last norm stay gathered from forward to backward.
    outermost = (300 + 64) * 64 + 2 * 64
    expected = 2 * (2 - outermost / parameters) + 1  # scattered once a step
    assert rows["fsdp"]["volume"] == pytest.approx(expected, rel=1e-3)


def test_the_control_shows_what_the_comparison_can_see(all_seven, tmp_path):
    """A tenth more learning rate, and whether that is beyond the tolerance."""
    folder, _, found = all_seven
    control, runs = found["control"], folder / "comparison_runs" / MODEL
    higher, lr = (run_of(folder, name).metrics[0]["lr"] for name in ("control", "dp"))
    assert higher == pytest.approx(1.1 * lr)
    assert control["difference"] > max(row["difference"] for row in found["strategies"])
    for share, seen in ((0.5, True), (2, False)):
        tolerance = str(share * control["difference"])
        command = [sys.executable, REPORT, runs, "--output_dir", tmp_path, "--tolerance", tolerance]
        out = subprocess.run(command, capture_output=True, text=True).stdout
        assert ("does not detect a fault of this size" not in out.replace("\n   ", " ")) == seen


@pytest.mark.slow
def test_a_short_comparison_without_matplotlib(tmp_path, compare):
    """It has the tables and no pictures. By default it accumulates in fp32, and it is too short for
    its control.
    """
    broken = tmp_path / "broken" / "matplotlib" / "__init__.py"
    broken.parent.mkdir(parents=True)
    broken.write_text("raise ImportError('planted')")
    python = {"PYTHON": sys.executable, "PYTHONPATH": tmp_path / "broken"}
    args = ["--seq_length", "16", "--max_steps", "1"]
    code, out, found = compare(tmp_path, *args, STRATEGIES="dp zero2", **python)
    assert code == 0, out
    work = found["work"]
    assert (work["batch_size"], work["gradient_accumulation_steps"]) == (1, 4)
    assert work["precision"] == "fp32"
    assert found["same_model"] and found["conclusive"] is False and "✅ Same model" not in out
    assert by_strategy(found)["zero2"]["norm_difference"] < 1e-2
    assert out.count("pip install matplotlib") == 1 and "Traceback" not in out
    assert not [*tmp_path.glob("*.png")] and (tmp_path / "comparison_results_tiny-gpt2.md").exists()


@pytest.mark.slow
@pytest.mark.parametrize("by", ["a flag", "a run file"])
def test_the_precision_that_is_given_is_kept(tmp_path, compare, by):
    run_file = tmp_path / "run.yaml"
    run_file.write_text("precision: bf16\n")
    flags = ["--bf16"] if by == "a flag" else ["--config", run_file]
    args = [*flags, "--seq_length", "16", "--max_steps", "1"]
    code, out, found = compare(tmp_path, *args, STRATEGIES="dp")
    assert code == 0 and found["work"]["precision"] == "bf16", out


@pytest.mark.slow
def test_resume_does_only_what_is_missing(all_seven, compare):
    folder, _, before = all_seven
    runs = folder / "comparison_runs" / MODEL
    files = [runs / name / "1" / "results.json" for name in STRATEGIES if name != "zero1"]
    times = [file.stat().st_mtime_ns for file in files]
    (runs / "zero1" / "1" / "outcome.txt").write_text("interrupted\n")
    code, out, found = compare(folder, MODEL, *BF16, name=MODEL, RESUME=1)
    assert code == 0, out
    assert by_strategy(found)["zero1"]["final_loss"] == by_strategy(before)["zero1"]["final_loss"]

    code, out, _ = compare(folder, MODEL, *BF16, "--lr", "9e-4", RESUME=1)
    assert code == 2 and "another comparison" in out and "9e-4" in out
    assert [file.stat().st_mtime_ns for file in files] == times


# Stands in for the script in a copy of the project: one strategy each has another learning rate,
# crashes, hangs, runs out of memory, and loses a rank to SIGKILL, as the kernel's out-of-memory
# killer does it.
PLANTED = """
import os, runpy, sys
strategy = sys.argv[sys.argv.index("--strategy") + 1]
os.environ["FAULT_SCRIPT"] = os.path.join(os.path.dirname(os.path.abspath(__file__)), "original.py")
os.environ["FAULT"] = {
    "zero2": "crash:1:3", "zero3": "hang:0:3", "fsdp": "kill:1:3",
}.get(strategy, "none")
if strategy == "zero1":
    sys.argv += ["--lr", "1.2e-3"]
runpy.run_path(%r, run_name="__main__")
"""


@pytest.mark.slow
def test_planted_faults_get_their_status_and_the_others_complete(tmp_path, all_seven, compare):
    """(all_seven has compiled what DeepSpeed needs, which would count as a hang here, and shows how
    fast this machine is.)
    """
    limit = 20 + 2 * int(re.search(r"^dp .* (\d+) s$", all_seven[1], re.M)[1])
    project, work = copy_project(tmp_path / "my project"), tmp_path / "results"
    work.mkdir()
    (project / "real_model_example.py").rename(project / "original.py")
    (project / "real_model_example.py").write_text(PLANTED % str(FAULT))

    env = {"STRATEGIES": "dp zero2 zero3 fsdp zero1", "TIMEOUT": limit, "CONTROL": 0}
    script = project / "compare_strategies.sh"
    code, out, found = compare(work, *SHORT, "--max_steps", "6", script=script, **env)
    rows = by_strategy(found)
    status = {"dp": "completed", "zero1": "completed"}
    status |= {"zero2": "failed", "zero3": "timeout", "fsdp": "oom"}
    assert {name: row["status"] for name, row in rows.items()} == status, out
    assert code == 1 and found["departing"] == ["zero1"]
    assert rows["zero1"]["first_difference"]["last"] == 2  # step 1 comes before any update
    assert rows["zero1"]["likely_causes"] == ["lr"]
    reasons = {name: row["reason"] for name, row in rows.items()}
    assert "SIGKILL" in reasons["fsdp"] and f"{limit} s" in reasons["zero3"]
    assert "a planted crash" in reasons["zero2"]
    assert descendants_of_test() == []


@pytest.mark.slow
def test_without_libaio_infinity_is_skipped_and_dp_may_be_left_out(
    tmp_path, without_libaio, llama, compare
):
    """Also: a model in a folder, the default number of steps, repeats in turn."""
    model = str(llama)
    args = ["--seq_length", "32", "--batch_size", "1", "--dataset", "pydocs", "--precision", "fp32"]
    env = {"STRATEGIES": "infinity zero1", "NUM_GPUS": 1, "REPEATS": 2, **without_libaio}
    code, out, found = compare(tmp_path, model, *args, name=model.replace("/", "_"), **env)
    rows = by_strategy(found)
    assert code == 0, out
    assert rows["infinity"]["status"] == "skipped"
    assert "apt install libaio-dev" in rows["infinity"]["reason"]
    assert (rows["zero1"]["status"], rows["zero1"]["repeats"]) == ("completed", 2)
    assert found["reference"] == "zero1" and found["work"]["steps"] == 30
    assert found["same_model"] is None and found["control"] is None  # nothing was compared
    runs = tmp_path / "comparison_runs" / model.replace("/", "_")
    # infinity would have to be compiled, so the other comes first.
    files = [runs / name / n / "results.json" for n in "12" for name in ("zero1", "infinity")]
    started = [json.loads(file.read_text())["started_at"] for file in files]
    assert started == sorted(started)


@pytest.mark.slow
def test_interrupt_stops_the_running_one_and_reports_the_finished(tmp_path):
    runs = tmp_path / "comparison_runs" / "tiny-gpt2"
    (runs / "dp" / "1").mkdir(parents=True)
    (runs / "dp" / "1" / "results.json").write_text("{}")
    build_ops = PROJECT / "scripts" / "build_ops.py"  # else infinity would be the last one
    subprocess.run([sys.executable, build_ops, "infinity"], check=True)
    process = start(
        ["bash", PROJECT / "compare_strategies.sh", *SHORT, "--max_steps", "6"],
        cwd=tmp_path,
        env={"PYTHON": sys.executable, "NUM_GPUS": 2, "STRATEGIES": "dp infinity fsdp"},
    )
    started = runs / "infinity" / "1" / "results.json"
    wait_for(started.exists, 120, "infinity has not started")  # it is in the middle of its start
    for _ in range(2):  # what a terminal does, and an impatient user
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)
    out, err = finish(process, 60)
    assert process.returncode == 130 and "Traceback" not in err, out + err
    found = json.loads((tmp_path / "comparison_results_tiny-gpt2.json").read_text())
    status = {name: row["status"] for name, row in by_strategy(found).items()}
    assert status == {"dp": "completed", "infinity": "interrupted", "fsdp": "not run"}
    assert descendants_of_test() == []
    assert not list(Path(os.environ["TMPDIR"]).glob("tmp.*"))  # nothing of infinity's files either
    assert (runs.with_name("tiny-gpt2.previous") / "dp" / "1" / "results.json").exists()


@pytest.mark.parametrize(
    "args, env, said",
    [
        ([], {"STRATEGIES": "dp zero9"}, "zero9"),
        ([], {"NUM_GPUS": "0"}, "NUM_GPUS=0"),
        ([], {"STRATEGIES": "dp dp"}, "dp twice"),
        (["gpt2", "--strategy", "dp"], {}, "--strategy is not for a comparison"),
        (["--stratgy", "dp"], {}, "--stratgy"),
    ],
)
def test_wrong_usage(tmp_path, args, env, said, compare):
    code, out, found = compare(tmp_path, *args, **env)
    assert code == 2 and found is None
    assert out.count("❌") == 1 and said in out and "Traceback" not in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_comparisons_of_a_model_in_one_folder(tmp_path, compare):
    (tmp_path / "comparison_runs").mkdir()
    with open(tmp_path / "comparison_runs" / ".tiny-gpt2.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, out, _ = compare(tmp_path, *SHORT)
    assert code == 2 and out.count("❌") == 1 and "Another comparison" in out
