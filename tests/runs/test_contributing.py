"""What CONTRIBUTING.md adds: its diffs are applied to a copy of the project."""

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import PROJECT, finish, launcher_command, start

FLAGS = """
    --max_steps 4 --seq_length 64 --batch_size 2 --gradient_accumulation_steps 2 --dropout 0
    --no_export --no_eval --precision fp32
    """.split()


def apply(diff: str, project: Path) -> None:
    """Apply a diff without line numbers: the lines with + come after, or before, those with " "."""
    for part in re.split(r"^(?=--- )", diff, flags=re.MULTILINE)[1:]:
        old, new, *hunks = part.splitlines()
        file = project / new.removeprefix("+++ b/")
        lines = [] if old == "--- /dev/null" else file.read_text().splitlines()
        place, added = 0, []
        for line in [*hunks, "@@"]:
            if line.startswith("+"):
                added.append(line[1:])
                continue
            at = lines.index(line[1:], place) if line.startswith(" ") else place
            lines[at:at] = added
            place = at + len(added) + line.startswith(" ")
            added = []
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(lines) + "\n")


def copy_with(title: str, folder: Path) -> Path:
    """A copy of the project with the examples of a section of CONTRIBUTING.md."""
    names = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True)
    for name in names.stdout.splitlines():
        if name.startswith(
            ("distributed_training/", "tools/", "scripts/", "real_model", "ds_config", "compare_")
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, folder / name)
    text = (PROJECT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    for diff in re.findall(r"```diff\n(.*?)```", section, re.DOTALL):
        apply(diff, folder)
    return folder


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The project with both strategies."""
    return copy_with("Adding a strategy", tmp_path_factory.mktemp("copy") / "project")


def losses(copy: Path, strategy: str, folder: Path, *flags: str) -> list[float]:
    """The losses of a run of the copy on two processes."""
    program = [*launcher_command("torchrun", 2), copy / "real_model_example.py"]
    command = [*program, "--strategy", strategy, *FLAGS, "--output_dir", folder, *flags]
    process = start(command, env={"OMP_NUM_THREADS": 1}, cwd=copy)
    out, err = finish(process, 300)
    assert process.returncode == 0, out + err
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def test_a_setting_is_a_flag_and_a_key_of_a_run_file(tmp_path):
    copy = copy_with("Adding a setting", tmp_path / "project")
    (tmp_path / "run.yaml").write_text("label_smoothing: 0.1\n")
    command = [sys.executable, "real_model_example.py", "--config", tmp_path / "run.yaml"]
    run = partial(subprocess.run, cwd=copy, capture_output=True, text=True, check=True)
    assert "label_smoothing: 0.1  # " in run([*command, "--print_config"]).stdout
    given = run([*command, "--label_smoothing=.2", "--print_config"]).stdout
    assert "label_smoothing: 0.2  # --label_smoothing" in given
    help_of_flag = r"--label_smoothing, --label_smoothing_factor \w+\s+share of the target"
    assert re.search(help_of_flag, run([*command, "--help"]).stdout)
    given = run([*command, "--label_smoothing_factor=.3", "--print_config"]).stdout
    assert "label_smoothing: 0.3  # --label_smoothing_factor" in given
    both = [*command, "--simulate_gpus", "2"]
    refused = subprocess.run(both, cwd=copy, capture_output=True, text=True)
    assert refused.returncode == 2 and "--label_smoothing and --simulate_gpus" in refused.stderr
    program = (
        "from distributed_training.records.causes import EFFECT_OF; "
        "from distributed_training.checkpoints.signature import INFORMATIONAL_FLAGS; "
        "print(EFFECT_OF['label_smoothing'], 'label_smoothing' in INFORMATIONAL_FLAGS)"
    )
    assert run([sys.executable, "-c", program]).stdout == "the updates True\n"


PRINT_ROWS = """
import sys
from pathlib import Path
from distributed_training.data.row_files import rows_of_file
from distributed_training.data.rows import RowOptions
from tools.docs.sections import file_types

for row in rows_of_file(Path(sys.argv[1]), RowOptions()):
    print(row.where, [*row.pieces])
print(*file_types(), sep="\\n")
"""


def test_a_data_format_is_one_file(tmp_path):
    copy = copy_with("Adding a dataset format", tmp_path / "project")
    texts = [f"Section {number} has\nlines.\n" for number in range(3)]
    (tmp_path / "all.docs").write_text("---\n".join(texts))
    command = [sys.executable, "-c", PRINT_ROWS, tmp_path / "all.docs"]
    printed = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=True).stdout
    for number, text in enumerate(texts, 1):
        assert f"{tmp_path / 'all.docs'}, section {number} {[text]}\n" in printed
    assert "\n| `.docs` | a section: " in printed


@pytest.mark.slow
def test_a_data_format_is_trained_on(tmp_path):
    copy = copy_with("Adding a dataset format", tmp_path / "project")
    texts = [f"Section {number} has some words.\n" * 20 for number in range(12)]
    (tmp_path / "all.docs").write_text("---\n".join(texts))
    rows = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "all.jsonl").write_text("\n".join(rows) + "\n")
    names = ("all.docs", "all.jsonl")
    trained = [
        losses(copy, "dp", tmp_path / f"run-{name}", "--dataset", tmp_path / name) for name in names
    ]
    assert trained[0] == trained[1]


@pytest.mark.slow
def test_the_optimizer_trains_resumes_and_is_planned(tmp_path):
    copy = copy_with("Adding an optimizer", tmp_path / "project")
    adamax = ["--optim", "adamax", "--lr", "1e-3", "--save_every", "2"]
    reference = losses(copy, "dp", tmp_path / "dp", *adamax)
    assert losses(copy, "dp", tmp_path / "adamw", "--lr", "1e-3") != pytest.approx(reference, 1e-4)
    for strategy, other in (("fsdp", "zero2"), ("zero2", "dp"), ("dp", "fsdp")):
        folder = tmp_path / f"{strategy}-{other}"
        whole = losses(copy, strategy, folder, *adamax)
        assert whole == pytest.approx(reference, rel=1e-5)
        resume = ["--resume", str(folder / "checkpoints" / "step-00000002")]
        resumed = losses(copy, other, tmp_path / f"resumed-{other}", *adamax, *resume)
        assert resumed == pytest.approx(reference[2:], rel=1e-5)
    results = json.loads((tmp_path / "dp" / "results.json").read_text())["memory"]
    measured = results["categories_bytes"]["optimizer"]
    assert results["predicted_bytes"]["optimizer"] == pytest.approx(measured, rel=0.05)


@pytest.mark.slow
def test_the_examples_train_resume_and_are_planned(copy, tmp_path):
    reference = losses(copy, "dp", tmp_path / "dp")
    averaged = losses(copy, "averaged", tmp_path / "averaged", "--save_every", "2")
    assert averaged == pytest.approx(reference, rel=1e-5)
    assert losses(copy, "dp_fp16", tmp_path / "fp16") == pytest.approx(reference, rel=1e-4)
    sent = {
        name: json.loads((tmp_path / name / "results.json").read_text())[
            "communication_bytes_per_step"
        ]
        for name in ("dp", "fp16", "averaged")
    }
    assert sent["fp16"] / sent["dp"] == pytest.approx(0.5, rel=0.01)
    assert sent["averaged"] / sent["dp"] == pytest.approx(2, rel=0.01)
    assert f"{sent['fp16']:,.0f} bytes" in (PROJECT / "CONTRIBUTING.md").read_text("utf-8")
    resume = ["--resume", str(tmp_path / "averaged" / "checkpoints" / "step-00000002")]
    resumed = losses(copy, "zero3", tmp_path / "zero3", *resume, "--save_every", "1")
    assert resumed == pytest.approx(reference[2:], rel=1e-5)
    resume = ["--resume", str(tmp_path / "zero3" / "checkpoints" / "step-00000003")]
    again = losses(copy, "averaged", tmp_path / "again", *resume)
    assert again == pytest.approx(reference[3:], rel=1e-5)
    plan = [sys.executable, "scripts/plan_memory.py", "--model", "gpt2", "--gpus", "2"]
    planned = subprocess.run(plan, cwd=copy, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^averaged +\d", planned, re.MULTILINE)
