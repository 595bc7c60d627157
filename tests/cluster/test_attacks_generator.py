"""Attacks on scripts/distributed_setup.py: values of flags, files that exist, wrong run files."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from generated_scripts import LAUNCHER, SLURM

PAYLOADS = {
    "line end": "x\ntouch executed",
    "bytes that are not UTF-8": "x\udcff",
    "command substitution": "$(touch executed)",
    "quotes": "'; touch executed; '",
}

TARGETS = {
    "master_addr": [*LAUNCHER, "--num_nodes", "2", "--master_addr"],
    "output": [*LAUNCHER, "--output"],
    "output of a job": [*SLURM, "--output"],
    "config": ["launcher", "--config"],
    "venv": [*SLURM, "--venv"],
    "modules": [*SLURM, "--modules"],
    "account": [*SLURM, "--requeue", "--account"],
    "nvme_path": ["deepspeed", "--zero_stage", "3", "--offload_optimizer", "--nvme_path"],
}


@pytest.mark.attack
@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("target", TARGETS)
def test_no_value_is_executed(generate, stubs, tmp_path, target, payload):
    """One line refuses it, or in bash the file does what it does with any other value."""
    value = PAYLOADS[payload]
    if target == "config" and "\udcff" not in value:
        Path(value).write_text("batch_size: 2\n")
    if target == "venv" and "\udcff" not in value:
        (Path(value) / "bin").mkdir(parents=True)
        (Path(value) / "bin" / "activate").write_text("true\n")
    before = set(tmp_path.rglob("*"))
    run = generate(*TARGETS[target][:-1], f"{TARGETS[target][-1]}={value}")
    assert run.code in (0, 2), run.out + run.err
    if run.code == 2:
        assert len(run.err.splitlines()) == 1 and run.error.startswith("❌ "), run.err
        assert set(tmp_path.rglob("*")) == before
        return
    [written] = [path for path in set(tmp_path.rglob("*")) - before if path.is_file()]
    if target == "nvme_path":
        assert value in json.dumps(json.loads(written.read_text())) or '"' in value
        return
    assert subprocess.run(["bash", "-n", written]).returncode == 0
    for line in written.read_text().splitlines():
        if line.startswith("#SBATCH"):
            assert re.match(r"#SBATCH --[a-z-]+(=[^ ]+)?( +#.*)?$", line), line
    stubs.run(["bash", written], cwd=tmp_path)
    assert not list(tmp_path.rglob("executed"))
    assert stubs.calls("torchrun") or stubs.calls("srun") or target == "modules"


GENERATED = {
    "config/ds_config.json": ["deepspeed"],
    "config/fsdp_config.json": ["fsdp"],
    "scripts/run_training.sh": LAUNCHER,
    "scripts/slurm_job.sh": SLURM,
}


@pytest.mark.parametrize("file", GENERATED)
def test_an_existing_file_is_replaced_only_with_force(generate, file):
    assert generate(*GENERATED[file]).code == 0
    assert bool(Path(file).stat().st_mode & 0o100) == ("scripts" in file)
    Path(file).write_text("edited")
    run = generate(*GENERATED[file])
    assert run.code == 2 and "--force" in run.error and "--output" in run.error
    assert Path(file).read_text() == "edited"
    assert generate(*GENERATED[file], "--force").code == 0 and Path(file).read_text() != "edited"


@pytest.mark.parametrize("flags", [LAUNCHER, SLURM], ids=["launcher", "slurm"])
@pytest.mark.parametrize(
    "text, says",
    [("lerning_rate: 1", "did you mean --learning_rate"), ("lr: many", ": many is not a number")],
    ids=["key", "value"],
)
def test_a_run_file_with_an_error_is_refused_before_the_queue(generate, flags, text, says):
    Path("config.yaml").write_text(text)
    run = generate(*flags)
    assert run.code == 2 and "config.yaml: " in run.error and says in run.error
    assert not Path("scripts").exists()


def test_the_run_decides_what_the_deepspeed_file_leaves_open(generate):
    """Batch size, accumulation and clipping of a run file; then the file is complete."""
    from support.cli.ds_config import ModelSizes, complete_ds_config
    from support.cli.parse import parse_arguments

    assert generate("deepspeed", "--zero_stage", "3", "--fp16").code == 0
    Path("config.yaml").write_text(
        "batch_size: 2\ngradient_accumulation_steps: 3\nmax_grad_norm: 0.5\nuse_deepspeed: true\n"
        "deepspeed_config: config/ds_config.json\n"
    )
    args = parse_arguments(["--config", "config.yaml"])
    assert (args.strategy, args.precision) == ("zero3", "fp16")
    sizes = ModelSizes(64, 10**6, 10**5, tied=True)
    whole = complete_ds_config(args.ds_config_dict, "fp32", sizes, 1, "nvme")
    assert (whole["train_micro_batch_size_per_gpu"], whole["gradient_accumulation_steps"]) == (2, 3)
    assert whole["gradient_clipping"] == 0.5 and whole["train_batch_size"] == 6
