"""tools/benchmarks/gpu_check.sh: how its runner and its report behave, and the checks that a CPU can do.

The runner is tested with small commands instead of training runs.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import FAULT, PROJECT, slow

from tools.benchmarks import gpu_check, gpu_report, gpu_tables
from tools.benchmarks import runner as runner_module
from tools.benchmarks.gpu_report import FAILED, NOT_RUN, PASSED, Machine, Report
from tools.benchmarks.runner import Check, Done, NotPossible, Runner

NO_GPU = Machine(0, 0, ["no GPU"])


def shell(name, script="true", **how):
    return Check(name, ["bash", "-c", script], Path(how.pop("folder", "nowhere")), **how)


def run(checks, folder, seconds=60.0, run_seconds=60.0):
    """Run checks; return the runner, and their rows by name."""
    runner = Runner(checks, folder, seconds, run_seconds, {})
    runner.run(lambda: None)
    return runner, rows(runner)


def rows(runner):
    return {name: (verdict, text) for name, verdict, text in gpu_report.rows_of(runner, "later")}


def times(folder, names):
    """(start, end) of the runs of `timed`."""
    return {n: tuple(map(float, (folder / n).read_text().split())) for n in names}


def timed(name, folder, **how):
    script = f"date +%s.%N > {folder / name}; sleep 0.3; date +%s.%N >> {folder / name}"
    return shell(name, script, **how)


def overlaps(a, b):
    return a[0] < b[1] and b[0] < a[1]


def test_four_at_a_time_and_what_measures_alone(tmp_path):
    names = [f"n{number}" for number in range(6)]
    checks = [timed(name, tmp_path) for name in names]
    checks += [timed("alone", tmp_path, alone=True), timed("last", tmp_path, after=("n0",))]
    background = timed("background", tmp_path, background=True)
    _, found = run([background, *checks], tmp_path)
    assert {verdict for verdict, _ in found.values()} == {PASSED}
    at = times(tmp_path, [*names, "alone", "last", "background"])
    for name in names:
        together = [other for other in names if overlaps(at[name], at[other])]
        assert len([o for o in together if at[o][0] <= at[name][0]]) <= 4
    assert overlaps(at["n0"], at["n3"]) and overlaps(at["n0"], at["background"])
    assert at["n4"][0] >= min(at[name][1] for name in names[:4])
    assert not [name for name in at if name != "alone" and overlaps(at["alone"], at[name])]
    assert at["last"][0] > at["alone"][1]  # in the order of the list


def test_what_depends_on_a_failed_run_does_not_run(tmp_path):
    def not_now(_):
        raise NotPossible("no advice")

    checks = [
        shell("compile", "exit 1"),
        shell("offload", needs=("compile",)),
        shell("infinity", needs=("offload",)),
        shell("zero3", after=("compile",)),
        shell("blocked", blocked="needs a GPU"),
        Check("advised", not_now, tmp_path),
        Check("absent", ["no-such-program"], tmp_path),
    ]
    _, found = run(checks, tmp_path)
    assert found["compile"][0] == FAILED
    assert found["offload"] == (NOT_RUN, "needs compile")
    assert found["infinity"] == (NOT_RUN, "needs offload")
    assert found["zero3"][0] == PASSED
    assert found["blocked"] == (NOT_RUN, "needs a GPU")
    assert found["advised"] == (NOT_RUN, "no advice")
    assert found["absent"][0] == NOT_RUN and "no-such-program" in found["absent"][1]


def test_time_limits(tmp_path):
    child = tmp_path / "child"
    endless = f"echo '❌ too slow'; sleep 100 & echo $! > {child}; wait"
    checks = [shell("endless", endless), shell("fast"), shell("late", after=("endless",))]
    started = time.monotonic()
    _, found = run(checks, tmp_path, seconds=30, run_seconds=2)
    assert found["endless"][0] == FAILED and "❌ too slow" in found["endless"][1]
    assert found["fast"][0] == found["late"][0] == PASSED
    assert time.monotonic() - started < 10
    assert not Path(f"/proc/{child.read_text().strip()}").exists()
    _, found = run([shell("late")], tmp_path, seconds=1, run_seconds=30)
    assert found["late"] == (NOT_RUN, "no time was left of the 1 s")


def test_run_that_the_end_of_the_part_stops_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "SHORTEST_SECONDS", 0.5)
    child = tmp_path / "child"
    endless = f"sleep 100 & echo $! > {child}; wait"
    checks = [shell("fast"), shell("endless", endless), shell("ops", "sleep 99", background=True)]
    checks += [shell("resumed", needs=("endless",))]
    report = Report(tmp_path / "r.md", "bash …", NO_GPU, {}, lambda _: {})
    runner, found = run(checks, tmp_path, seconds=2, run_seconds=30)
    report.parts = {"part": runner}
    report.write()
    assert found["fast"][0] == PASSED
    for name in ("endless", "ops"):
        assert found[name][0] == NOT_RUN
        assert "no time was left of the 2 s: it was stopped after" in found[name][1]
    assert found["resumed"][0] == NOT_RUN
    assert not Path(f"/proc/{child.read_text().strip()}").exists()
    assert FAILED not in {verdict for _, verdict, _ in report.all_rows()}  # for the exit code


def logging(folder, losses, end="completed"):
    """A command that writes the files of a training run."""
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses.items()]
    code = f"""
import json, pathlib
folder = pathlib.Path({str(folder)!r})
folder.mkdir(exist_ok=True)
(folder / "metrics.jsonl").write_text({chr(10).join(lines)!r} + chr(10))
(folder / "results.json").write_text(json.dumps({{"status": {end!r}}}))
"""
    return [sys.executable, "-c", code]


def test_losses_are_compared_with_the_reference(tmp_path):
    def train(name, losses, end="completed", **how):
        folder = tmp_path / name
        command = logging(folder, losses, end)
        return Check(name, command, folder, status="completed", tolerance=1e-3, **how)

    nan = float("nan")
    checks = [
        train("same", {1: 4.0, 2: 3.0}, reference="dp"),
        train("close", {1: 4.001, 2: 3.0}, reference="dp"),
        train("other", {1: 4.0, 2: 3.1}, reference="dp"),
        train("nan", {1: 4.0, 2: nan}, reference="dp"),
        train("short", {1: 4.0}, reference="dp"),
        train("resumed", {2: 3.0}, reference="dp", after_step=1),
        train("dp", {1: 4.0, 2: 3.0}),
        train("lost", {1: 4.0}, "failed"),
        train("no reference", {1: 4.0}, reference="lost"),
    ]
    _, found = run(checks, tmp_path)
    verdicts = {name: verdict for name, (verdict, _) in found.items()}
    assert verdicts == {
        **{"same": PASSED, "close": PASSED, "other": FAILED, "nan": FAILED, "short": FAILED},
        **{"resumed": PASSED, "dp": PASSED, "lost": FAILED, "no reference": NOT_RUN},
    }
    assert "loss off by 3.3e-02 at step 2" in found["other"][1]
    assert "lost failed" in found["no reference"][1]


def test_unreadable_results_are_a_failure_and_no_crash(tmp_path):
    def judge(run):
        return "", run.results["memory"]["peak"]

    runner, found = run([shell("judged", judge=judge, tables=("memory",))], tmp_path)
    assert found["judged"][0] == FAILED and "memory" in found["judged"][1]
    ended = [(check, runner.done[check.name]) for check in runner.checks]
    assert "cannot be made" in gpu_tables.tables_of(ended)["memory"][0]


def test_report_is_complete_after_every_run(tmp_path):
    checks = [shell(f"n{number}", f"echo ❌ no; exit {number % 2}") for number in range(3)]
    checks += [shell("blocked", blocked="needs a GPU"), shell("last", after=("n0", "n1", "n2"))]
    runner = Runner(checks, tmp_path, 60, 60, {})
    report = Report(
        tmp_path / "r.md", "bash …", NO_GPU, {"part": runner}, lambda _: {"T": ["| a |"]}
    )
    report.write()
    states = []

    def changed():
        report.write()
        text = (tmp_path / "r.md").read_text()
        lines = {line.split(" | ")[0]: line for line in text.splitlines() if line[:2] == "| "}
        for check in checks:
            assert f"| {check.name}" in lines
            if check.name in runner.done:
                verdict = FAILED if check.name == "n1" else PASSED
                assert f"| {verdict} |" in lines[f"| {check.name}"]
            else:
                assert f"| {NOT_RUN} |" in lines[f"| {check.name}"]
        states.append(text.count(f"| {PASSED} |"))
        assert "no GPU" in text and "### T" in text

    runner.run(changed)
    assert states == sorted(states) and states[-1] == 3
    assert "❌ no" in (tmp_path / "r.log").read_text()
    assert set(json.loads((tmp_path / "r.json").read_text())) == {
        f"part: {name}" for name in ("n0", "n1", "n2", "last")
    }
    assert {path.name for path in tmp_path.glob("r.*")} == {"r.md", "r.json", "r.log"}
    assert not list(tmp_path.glob(".partial*"))


def test_machine_is_described_without_importing_packages(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nfor n in 0 1; do echo NVIDIA H100 80GB HBM3, 81559, 580.1; done\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_report, "PACKAGES", ("torch", "no-such-package"))
    machine = gpu_report.describe_machine()
    assert (machine.gpus, machine.gpu_bytes) == (2, 81559 << 20)
    facts = "; ".join(machine.facts)
    assert "H100" in facts and "driver 580.1" in facts and "no no-such-package" in facts
    for visible, count in (("1", 1), ("", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpu_report.describe_machine().gpus == count
    code = "import sys, tools.benchmarks.gpu_check; print({'torch', 'deepspeed'} & {*sys.modules})"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, cwd=PROJECT).stdout == "set()\n"


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_every_check_can_be_reached(tmp_path, gpus):
    machine = Machine(gpus, 80 << 30, [])
    for name, add in gpu_check.PARTS.items():
        part = gpu_check.Part(name, machine, tmp_path / str(gpus))
        add(part)
        names = [check.name for check in part.checks]
        assert len(set(names)) == len(names)
        folders = [c.folder for c in part.checks if c.name != "resume after SIGTERM"]
        assert len({*folders}) == len(folders)
        for check in part.checks:
            assert {*check.after, *check.needs, check.reference} - {""} <= {*names}
            # --only finds what a check depends on.
            chosen = [c.name for c in gpu_check.select(part.checks, [check.name])]
            assert check.name in chosen and {*check.needs} <= {*chosen}


def test_advice_is_found_in_the_log_of_a_run_out_of_memory(tmp_path):
    part = gpu_check.Part("correctness", Machine(1, 80 << 30, []), tmp_path)
    gpu_check.out_of_memory(part)
    first, second, _ = part.checks
    assert f"--batch_size {gpu_check.too_large_batch(80 << 30)}" in " ".join(
        map(str, first.command({}))
    )
    log = "❌ no memory\n  --batch_size 64 --gradient_accumulation_steps 8: 51.2 GB\n"
    run = Done(3, 1.0, log, tmp_path)
    assert first.judge(run)[0] == ""
    words = [str(word) for word in second.command({"out of memory": run})]
    assert words[words.index("--batch_size") + 1] == "64"
    with pytest.raises(NotPossible):
        second.command({"out of memory": Done(3, 1.0, "", tmp_path)})


def test_kernels_of_a_trace():
    def kernel(name, start, duration):
        return {"cat": "kernel", "name": name, "ts": start, "dur": duration}

    head = {"cat": "gpu_user_annotation", "name": "head", "ts": 50, "dur": 20}
    events = [head, kernel("flash_fwd", 0, 20), kernel("sm90_gemm", 20, 20), {"cat": "cpu_op"}]
    events += [kernel("gemm", 50, 10), kernel("unknown", 80, 20)]
    shares = gpu_tables.kernel_shares(events)
    expected = {"attention": 0.2, "matrix products": 0.2, "head": 0.1, "other": 0.2, "idle": 0.3}
    assert {part: share for part, share in shares.items() if share} == pytest.approx(expected)
    assert gpu_tables.kernel_shares([head]) == {}
    # Of a longer trace only whole steps count: what precedes the first head does not.
    whole = [{**head, "ts": 150}, kernel("gemm", 150, 10)]
    shares = gpu_tables.kernel_shares([*events, *whole])
    found = {part: share for part, share in shares.items() if share}
    assert found == pytest.approx({"head": 0.2, "other": 0.4, "idle": 0.4})


ENDLESS = """
import functools, sys
from tools.benchmarks import gpu_check
from distributed_training.programs import run_command_line

def add(part):
    part.add("quick", ["true"])
    for name in ("one", "two", "later"):
        part.add(name, ["bash", "-c", f"sleep 1000.{sys.argv[2]} & wait"], alone=name == "later")

gpu_check.PARTS = {"speed": add}
main = functools.partial(gpu_check.main, ["speed", "--report", sys.argv[1]])
run_command_line(main, printed=False)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT)])
def test_signal_ends_the_runs_and_completes_the_report(tmp_path, number):
    """Also the temporary folder of the runs is removed."""
    folder, mark = tmp_path / "tmp", f"{os.getpid()}{number}"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path / "r.md"), mark],
        cwd=PROJECT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert any(line.startswith("passed quick") for line in process.stdout)
    time.sleep(0.5)
    assert len(processes_with(f"1000.{mark}")) == 4
    process.send_signal(number)
    process.stdout.read()
    assert process.wait(30) == 128 + number
    assert not processes_with(f"1000.{mark}")
    report = (tmp_path / "r.md").read_text()
    assert "| quick | passed |" in report
    for name in ("one", "two"):
        assert f"| {name} | not run | stopped while it ran |" in report
    assert "| later | not run | this program was stopped" in report
    assert not list(folder.iterdir())


def processes_with(word):
    """The processes that have a word in their command lines, without this one and its parent."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word in file.read_text(errors="replace"):
                found.append(file.parent.name)
    return found


@pytest.mark.slow
def test_cpu_checks(tmp_path):
    only = "fp32 fsdp; resume dp under zero3; resume after SIGTERM"
    command = ["bash", "tools/benchmarks/gpu_check.sh", "correctness", "--only", only]
    command += ["--report", str(tmp_path / "report" / "r.md")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "report" / "r.md").read_text()
    names = ["tokens", "fp32 dp", "fp32 fsdp", "resume dp under zero3", "SIGTERM"]
    for name in [*names, "resume after SIGTERM"]:
        assert f"| {name} | passed |" in report
    assert "torch 2." in report


@pytest.mark.slow
def test_broken_run_is_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "SCRIPT", FAULT)
    monkeypatch.setenv("FAULT", "nan:3")
    only = ["--only", "resume dp under zero3", "--report", str(tmp_path / "r.md")]
    assert gpu_check.main(["correctness", *only]) == 1
    out = capsys.readouterr().out
    assert "failed fp32 dp: exit code 1 instead of 0" in out and "The loss is nan" in out
    assert "not run resume dp under zero3: needs fp32 dp" in out
    assert "The loss is nan" in (tmp_path / "r.log").read_text()


def test_usage_errors(tmp_path, capsys):
    report = ["--report", str(tmp_path / "r.md")]
    with pytest.raises(SystemExit) as end:
        gpu_check.main(["memory", *report])
    assert end.value.code == 2
    assert gpu_check.main(["speed", "--only", "fp32 dp", *report]) == 2
    assert "fp32 dp" in capsys.readouterr().out
    assert not (tmp_path / "r.md").exists()
