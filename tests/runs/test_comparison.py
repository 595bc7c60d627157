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
from conftest import (
    FAULT,
    PROJECT,
    SAME_WORK,
    SPLIT,
    STRATEGIES,
    assert_close,
    descendants_of_test,
    finish,
    skip,
    start,
)

REPORT = PROJECT / "scripts" / "compare_runs.py"
BF16 = [*SAME_WORK, *SPLIT, "--precision", "bf16"]
SMALL = ["--seq_length", "32", "--batch_size", "2", "--precision", "fp32"]


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


@pytest.fixture(scope="module")
def report(preloaded):
    """report(runs, folder, *args) rebuilds the report from saved runs; returns exit code, output
    and the .json.
    """

    def run(runs, folder, *args):
        command = [sys.executable, REPORT, runs, "--output_dir", folder, *args]
        command = preloaded.replace(command) if preloaded else command
        done = subprocess.run(command, capture_output=True, text=True)
        assert "Traceback" not in done.stderr, done.stderr
        file = folder / f"comparison_results_{runs.name}.json"
        return done.returncode, done.stdout, json.loads(file.read_text())

    return run


def by_strategy(found):
    return {row["strategy"]: row for row in found["strategies"]}


def flat(text):
    """Without the breaks inside of sentences."""
    return text.replace("\n   ", " ")


def losses(folder):
    return [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def all_seven(tmp_path_factory, compare):
    """All strategies in bf16 on two processes, in a folder with a space in its name: (folder,
    output, report).
    """
    if not Path("/usr/include/libaio.h").exists():
        skip("infinity needs libaio: apt install libaio-dev")
    folder = tmp_path_factory.mktemp("my work")
    code, out, found = compare(folder, "tiny-gpt2", *BF16)
    assert code == 0, out
    return folder, out, found


def test_planned_stands_beside_measured(all_seven):
    for row in all_seven[2]["strategies"]:
        assert row["planned_bytes"] == pytest.approx(row["memory_bytes"], rel=0.02), row["strategy"]


@pytest.mark.slow
def test_simulated_comparison(tmp_path, compare):
    """The memory of four ranks, from one process for each strategy; no losses, no speeds, and never
    mixed with real runs.
    """
    env = {"STRATEGIES": "dp zero2 fsdp", "SIMULATE_GPUS": 4}
    code, out, found = compare(tmp_path, "tiny-gpt2", *SMALL, **env)
    assert code == 0 and "memory simulation" in flat(out), out
    work, rows = found["work"], by_strategy(found)
    assert (work["simulated_world_size"], work["world_size"], found["same_model"]) == (4, 1, None)
    assert all(row["speed"] is None and row["final_loss"] is None for row in rows.values())
    for row in rows.values():
        assert row["planned_bytes"] == pytest.approx(row["memory_bytes"], rel=0.02)
    assert rows["fsdp"]["saved"] == pytest.approx(0.75, abs=0.01)
    assert (tmp_path / "comparison_results_tiny-gpt2.png").stat().st_size > 10_000


def test_all_strategies_do_the_same_work(all_seven, reference):
    folder, out, found = all_seven
    rows = by_strategy(found)
    assert list(rows) == STRATEGIES
    assert {row["status"] for row in rows.values()} == {"completed"}
    assert found["reference"] == "dp" and found["same_model"] and found["departing"] == []
    runs = folder / "comparison_runs" / "tiny-gpt2"
    of_dp = losses(runs / "dp" / "1")
    for name, row in rows.items():  # the numbers of the report, taken again from the raw files
        raw = losses(runs / name / "1")
        off = [abs(a - b) / b for a, b in zip(raw, of_dp, strict=True)]
        medians = [median(off[first : first + 5]) for first in range(len(raw) - 4)]
        assert row["difference"] == max(medians)
        results = json.loads((runs / name / "1" / "results.json").read_text())
        assert results["precision"] == "bf16"
        assert row["samples_per_second"] == results["samples_per_second"]
        assert row["final_loss"] == raw[-1]
        assert not (runs / name / "1" / "hf").exists()
        assert_close(raw, reference.losses, 1e-2)  # bf16 stays within one percent of fp32
    assert all(name in out for name in STRATEGIES)


def test_memory_saved_on_two_ranks(all_seven):
    """Bytes a parameter in bf16 with Adam: 16 for dp; of ZeRO 2 + 2/2 + 12/2, for stage 3 (2 + 2 +
    12)/2 (1910.02054).

    DeepSpeed's stage 1 has let go of the other ranks' gradients by the end of backward.
    """
    rows = by_strategy(all_seven[2])
    parameters = all_seven[2]["work"]["parameters"]
    expected = {"dp": 16, "zero1": 9, "zero2": 9, "zero3": 8, "offload": 2, "fsdp": 8}
    for name, each in expected.items():
        assert rows[name]["memory_bytes"] / parameters == pytest.approx(each, rel=0.02), name
    assert rows["dp"]["saved"] is None
    assert rows["fsdp"]["saved"] == pytest.approx(0.5, abs=0.02)
    assert rows["infinity"]["memory_bytes"] < rows["offload"]["memory_bytes"]
    # Masters and moments, and gradients; of infinity those of both ranks, and the working copy
    assert sum(rows["offload"]["host_categories"].values()) > 6 * parameters
    assert rows["infinity"]["nvme_bytes"] > 12 * parameters


def test_bytes_sent(all_seven):
    """On two ranks a rank sends half of each element that is gathered or reduced, twice in an
    all-reduce.
    """
    found = all_seven[2]
    rows, parameters = by_strategy(found), found["work"]["parameters"]
    # Bytes per parameter: dp gradients in fp32; zero1 gradients and parameters in bf16; zero2 and
    # offload reduce gradients after each of two micro-batches.
    for name, sent in {"dp": 4, "zero1": 3, "zero2": 5, "offload": 5}.items():
        assert rows[name]["sent_bytes"] == pytest.approx(sent * parameters, rel=1e-3), name
    for name in ("zero3", "infinity"):  # gathered twice, and scattered, in each micro-batch
        volume = rows[name]["volume"]
        assert 6 <= volume < 7, name
        assert rows[name]["sent_bytes"] == pytest.approx(volume * parameters, rel=1e-3), name
    # Both embeddings and the last norm stay gathered from forward to backward.
    outermost = (4096 + 512) * 256 + 2 * 256
    expected = 2 * (2 - outermost / parameters) + 1  # scattered once a step
    assert rows["fsdp"]["volume"] == pytest.approx(expected, rel=1e-3)


def test_control_shows_what_the_comparison_could_see(all_seven, tmp_path, report):
    """A tenth more learning rate, and whether that is beyond the tolerance."""
    folder, out, found = all_seven
    control, runs = found["control"], folder / "comparison_runs" / "tiny-gpt2"
    first_lines = [
        (runs / name / "1" / "metrics.jsonl").read_text().splitlines()[0]
        for name in ("control", "dp")
    ]
    lrs = [json.loads(line)["lr"] for line in first_lines]
    assert lrs[0] == pytest.approx(1.1 * lrs[1])
    assert control["difference"] > max(row["difference"] for row in found["strategies"])
    for share, seen in ((0.5, True), (2, False)):
        tolerance = str(share * control["difference"])
        _, out, again = report(runs, tmp_path, "--tolerance", tolerance)
        assert ("The comparison detects a fault of this size" in flat(out)) == seen
        assert ("does not detect a fault of this size" in flat(out)) != seen
        rows = [{**one["strategies"][1], "attempts": None} for one in (again, found)]
        assert rows[0] == rows[1]  # the attempts name their folders as they were given
    assert "control" not in by_strategy(found)


def test_files(all_seven):
    folder, out, _ = all_seven
    name = "comparison_results_tiny-gpt2"
    for suffix in (".txt", ".json", ".md", ".png"):
        assert f"{name}{suffix}" in out
    text, markdown = ((folder / f"{name}.{suffix}").read_text() for suffix in ("txt", "md"))
    assert all(len(line) <= 80 for line in text.splitlines())
    text = flat(text)
    for strategy in STRATEGIES:  # the table, and the exact command
        assert re.search(rf"^{strategy} +completed ", text, re.M)
        assert re.search(rf"--precision bf16 --strategy {strategy}$", markdown, re.M)
    for pattern in ("torch 2", r"cores? of", r"20\d\d-\d\d-\d\d"):
        assert re.search(pattern, text)
    assert markdown.count("| completed") == 7
    from matplotlib.image import imread

    picture = imread(folder / f"{name}.png")
    assert picture.shape[0] > 600 and picture.shape[1] > 900 and picture[..., :3].std() > 0.05


@pytest.mark.slow
def test_resume_does_only_what_is_missing(all_seven, compare):
    folder, _, before = all_seven
    runs = folder / "comparison_runs" / "tiny-gpt2"
    kept = {
        file: file.stat().st_mtime_ns
        for file in runs.glob("*/1/results.json")
        if file.parent.parent.name not in ("zero1", "control")
    }
    (runs / "zero1" / "1" / "outcome.txt").write_text("interrupted\n")
    code, out, found = compare(folder, "tiny-gpt2", *BF16, RESUME=1)
    assert code == 0 and out.count("(kept)") == 6
    status = {row["strategy"]: row["attempts"][0]["kept"] for row in found["strategies"]}
    assert [name for name, kept in status.items() if not kept] == ["zero1"]
    assert not found["control"]["attempts"][0]["kept"]  # it shows whether the load has changed
    assert by_strategy(found)["zero1"]["status"] == "completed"
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert by_strategy(found)["zero1"]["final_loss"] == by_strategy(before)["zero1"]["final_loss"]

    code, out, _ = compare(folder, "tiny-gpt2", *BF16, "--lr", "9e-4", RESUME=1)
    assert code == 2 and "another comparison" in out and "9e-4" in out
    assert {file: file.stat().st_mtime_ns for file in kept} == kept


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
    limit = 20 + 2 * int(re.search(r"\] dp .*\((\d+) s\)", all_seven[1])[1])
    project, work = tmp_path / "my project", tmp_path / "results"
    work.mkdir()
    shutil.copytree(
        PROJECT / "support", project / "support", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(PROJECT / "scripts", project / "scripts")
    for file in [*PROJECT.glob("ds_config_*.json"), PROJECT / "compare_strategies.sh"]:
        shutil.copy(file, project)
    shutil.copy(PROJECT / "real_model_example.py", project / "original.py")
    (project / "real_model_example.py").write_text(PLANTED % str(FAULT))

    env = {"STRATEGIES": "dp zero2 zero3 fsdp zero1", "TIMEOUT": limit, "CONTROL": 0}
    script = project / "compare_strategies.sh"
    code, out, found = compare(work, *SMALL, "--max_steps", "6", script=script, **env)
    rows = by_strategy(found)
    assert {name: row["status"] for name, row in rows.items()} == {
        "dp": "completed",
        "zero1": "completed",
        "zero2": "failed",
        "zero3": "timeout",
        "fsdp": "oom",
    }, out
    assert code == 1 and found["departing"] == ["zero1"]
    assert rows["zero1"]["departs_at"] == 2  # step 1 comes before any update
    said = flat(out)
    assert "SIGKILL" in rows["fsdp"]["reason"]
    assert "zero1: the losses differ from those of dp from step 2" in said
    assert "a planted crash" in rows["zero2"]["reason"]
    assert "comparison_runs/tiny-gpt2/zero2/1/log.txt" in said
    assert f"{limit} s" in rows["zero3"]["reason"]
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
    assert rows["zero1"]["status"] == "completed" and rows["zero1"]["saved"] is None
    assert found["reference"] == "zero1"
    assert found["same_model"] is None and found["control"] is None  # nothing was compared
    assert "One process cannot show" in flat(out)
    assert found["work"]["steps"] == found["step_cap"] == 30
    assert "30 steps (the comparison's default cap), 2 repeats" in flat(out)
    infinity, zero1 = (rows[name]["attempts"] for name in ("infinity", "zero1"))
    started = [run["started_at"] for pair in zip(infinity, zero1, strict=True) for run in pair]
    assert started == sorted(started) and len(started) == 4


@pytest.mark.slow
def test_interrupt_stops_the_running_one_and_reports_the_finished(tmp_path):
    earlier = tmp_path / "comparison_runs" / "tiny-gpt2" / "dp" / "1"
    earlier.mkdir(parents=True)
    (earlier / "results.json").write_text("{}")
    process = start(
        ["bash", PROJECT / "compare_strategies.sh", *SMALL, "--max_steps", "6"],
        cwd=tmp_path,
        env={"PYTHON": sys.executable, "NUM_GPUS": 2, "STRATEGIES": "dp infinity fsdp"},
    )
    runs = tmp_path / "comparison_runs" / "tiny-gpt2"
    until = time.monotonic() + 120
    while not (runs / "infinity" / "1" / "results.json").exists():  # in the middle of its start
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.1)
    for _ in range(2):  # what a terminal does, and an impatient user
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)
    out, err = finish(process, 60)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    found = json.loads((tmp_path / "comparison_results_tiny-gpt2.json").read_text())
    status = {name: row["status"] for name, row in by_strategy(found).items()}
    assert status == {"dp": "completed", "infinity": "interrupted", "fsdp": "not run"}
    assert descendants_of_test() == []
    assert not list(Path(os.environ["TMPDIR"]).glob("tmp.*"))  # nothing of infinity's files either
    previous = tmp_path / "comparison_runs" / "tiny-gpt2.previous"
    assert (previous / "dp" / "1" / "results.json").exists()


@pytest.mark.parametrize(
    "args, env, said",
    [
        ([], {"STRATEGIES": "dp zero9"}, "zero9"),
        ([], {"NUM_GPUS": "0"}, "NUM_GPUS=0"),
        ([], {"REPEATS": "two"}, "REPEATS=two"),
        ([], {"TIMEOUT": "-1"}, "TIMEOUT=-1"),
        ([], {"RESUME": "yes"}, "RESUME=yes"),
        ([], {"STRATEGIES": "dp dp"}, "dp twice"),
        ([], {"STRATEGIES": " "}, "STRATEGIES is empty"),
        (["."], {}, "MODEL is ."),
        (["gpt2", "--strategy", "dp"], {}, "--strategy is not for a comparison"),
        (["--output_dir=here"], {}, "--output_dir is not for a comparison"),
        (["--stratgy", "dp"], {}, "--stratgy"),
        (["./no/such/model"], {}, "no such folder"),
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
        code, out, _ = compare(tmp_path, *SMALL)
    assert code == 2 and out.count("❌") == 1 and "Another comparison" in out


def test_report_of_nothing(tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        command = [sys.executable, REPORT, folder]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.count("❌") == 1
        assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, stage", [("zero3", 3), pytest.param("zero2", 2, marks=pytest.mark.soak)]
)
def test_deepspeeds_own_logger_counts_the_same_bytes(script, tmp_path, strategy, stage):
    config = json.loads((PROJECT / f"ds_config_stage{stage}.json").read_text())
    config["comms_logger"] = {"enabled": True, "verbose": False, "prof_all": True, "debug": False}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    args = [*SMALL, "--max_steps", "6", "--no_eval", "--strategy", strategy]
    fault = {"FAULT": f"witness:{tmp_path / 'counts.json'}"}
    options = {"launcher": "torchrun", "ranks": 2, "program": FAULT, "env": fault}
    run = script(*args, "--ds_config", tmp_path / "ds.json", **options)
    theirs = json.loads((tmp_path / "counts.json").read_text())
    ours = run.results["communication_per_step"]
    for name, operations in {
        "all_reduce": ("all_reduce",),
        "all_gather": ("all_gather_into_tensor",),
        "reduce_scatter": ("reduce_scatter_tensor",),
    }.items():
        total = sum(
            int(size) * calls for op in operations for size, calls in theirs.get(op, {}).items()
        )
        # DeepSpeed notes a rank's part of a gathered tensor
        total *= 2 if name == "all_gather" else 1
        mine = sum(
            found["message_bytes"] for key, found in ours.items() if key.startswith(f"{name} ")
        )
        assert mine == pytest.approx(total / (run.results["steps"] - 2), rel=1e-3, abs=100), name
