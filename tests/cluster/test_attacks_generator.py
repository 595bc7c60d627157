"""Attacks on scripts/distributed_setup.py: values of flags, files of hosts, edited files."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from attacks import Attack, table
from generated_scripts import LAUNCHER, SLURM

PAYLOADS = {
    "line end": "x\ntouch executed",
    "line separator": "x\u2028touch executed",
    "bytes that are not UTF-8": "x\udcff",
    "command substitution": "$(touch executed)",
    "quotes": "'; touch executed; '",
    "an option": "-oProxyCommand=touch executed",
    "placeholder of the digest": "# sha256:" + 64 * "0",
}

TARGETS = {
    "master_addr": [*LAUNCHER, "--num_nodes", "2", "--master_addr"],
    "output": [*LAUNCHER, "--output"],
    "output of a job": [*SLURM, "--output"],
    "config": ["launcher", "--config"],
    "hosts": [*LAUNCHER, "--hosts"],
    "venv": [*SLURM, "--venv"],
    "modules": [*SLURM, "--modules"],
    "partition": [*SLURM, "--partition"],
    "account": [*SLURM, "--requeue", "--account"],
    "time_limit": [*SLURM, "--time_limit"],
    "nvme_path": ["deepspeed", "--zero_stage", "3", "--offload_optimizer", "--nvme_path"],
    "layer_class": ["fsdp", "--layer_class"],
}


@pytest.mark.attack
@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("target", TARGETS)
def test_no_value_is_executed(generate, stubs, tmp_path, target, payload):
    """Either one line refuses it, or the file that holds it does in bash what it does with any
    other value.
    """
    value = PAYLOADS[payload]
    name = TARGETS[target][-1]
    if target == "config" and "\udcff" not in value:
        Path(value).write_text("batch_size: 2\n")
    if target == "venv" and "\udcff" not in value:
        (Path(value) / "bin").mkdir(parents=True)
        (Path(value) / "bin" / "activate").write_text("true\n")
    before = set(tmp_path.rglob("*"))
    if target == "hosts":  # the file's content
        Path("hosts.txt").write_bytes(f"{value}\n".encode(errors="surrogateescape"))
        run = generate(*TARGETS[target], "hosts.txt")
    else:
        run = generate(*TARGETS[target][:-1], f"{name}={value}")
    assert run.code in (0, 2), run.out + run.err
    if run.code == 2:
        assert len(run.err.splitlines()) == 1 and run.error.startswith("❌ "), run.err
        assert set(tmp_path.rglob("*")) - before <= {tmp_path / "hosts.txt"}
        return
    [written] = [path for path in set(tmp_path.rglob("*")) - before if path.is_file()]
    if written.suffix == ".json" or target in ("nvme_path", "layer_class"):
        assert (
            value in json.dumps(json.loads(written.read_text()), ensure_ascii=False) or '"' in value
        )
        return
    text = written.read_text()
    assert subprocess.run(["bash", "-n", written]).returncode == 0
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            assert re.match(r"#SBATCH --[a-z-]+(=[^ ]+)?( +#.*)?$", line), line
    stubs.run(["bash", written], cwd=tmp_path)
    assert not list(tmp_path.rglob("executed"))
    assert (
        stubs.calls("torchrun") or stubs.calls("srun") or stubs.calls("ssh") or target == "modules"
    )


@pytest.mark.parametrize("name", ["my run.sh", "می\u200cخواهم.sh", "x" * 200, "#"])
def test_a_name_that_is_only_unusual(generate, stubs, tmp_path, name):
    for flags in (LAUNCHER, SLURM):
        assert generate(*flags, "--output", name).code == 0
        assert stubs.run(["bash", name], tmp_path).code == 0


def hosts(text: str):
    return lambda folder: (folder / "hosts").write_text(text) and None


WITH_HOSTS = (*LAUNCHER, "--hosts", "hosts")


@table(
    Attack("no port", args=(*LAUNCHER, "--master_port", "70000"), says="--master_port: 70000"),
    Attack("a folder", args=(*LAUNCHER, "--force", "--output", "."), says="is not a file"),
    Attack("a folder as run file", args=("launcher", "--config", "."), says="no such file"),
    Attack(
        "a place where no file can be",
        args=(*LAUNCHER, "--output", "/proc/no/run.sh"),
        code=1,
        says="cannot be written",
    ),
    Attack("a host that is listed twice", hosts("a\nb\na\n"), WITH_HOSTS, says="'a' is not"),
    Attack("slots that differ", hosts("a slots=2\nb slots=4\n"), WITH_HOSTS, says="same number"),
    Attack(
        "slots that contradict",
        hosts("a slots=2\n"),
        (*WITH_HOSTS, "--num_gpus_per_node", "4"),
        says="contradicts slots=2",
    ),
    Attack("no number of slots", hosts("a slots=many\n"), WITH_HOSTS, says="a slots=many"),
    Attack("hosts of comments alone", hosts("# a\n\n  # b\n"), WITH_HOSTS, says="name hosts"),
)
def test_generator_refuses(generate, tmp_path, attack):
    args = attack.prepare(tmp_path) or ()
    attack.check(tmp_path, generate(*attack.args, *args))
    assert not Path("scripts").exists() and not Path("config").exists()


@pytest.mark.attack
@pytest.mark.parametrize("name", ["a\ntouch executed", "it's $(touch executed)", "-x"])
def test_the_folder_of_the_run_file_is_a_name(generate, stubs, tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.yaml").write_text("batch_size: 2\n")
    monkeypatch.chdir(tmp_path / name)
    (Path("env") / "bin").mkdir(parents=True)
    (Path("env") / "bin" / "activate").write_text("true\n")
    for flags in [LAUNCHER, [*SLURM, "--venv", "env", "--modules", " , "]]:
        assert generate(*flags, "--output", "run.sh").code == 0
        done = stubs.run(["bash", "run.sh"], Path.cwd(), {"SLURM_JOB_NODELIST": "n1"})
        assert done.code == 0 and not list(tmp_path.rglob("executed")), done.err
    assert str(tmp_path / name / "config.yaml") in stubs.calls("torchrun")[0]
    assert stubs.calls("module") == []


@pytest.mark.attack
def test_hosts_written_on_windows(generate):
    Path("hosts.txt").write_bytes(b"\xef\xbb\xbfnode1 slots=2\r\n\r\nuser@node2 slots=2\t# far\r\n")
    assert generate(*LAUNCHER, "--hosts", "hosts.txt").code == 0
    text = Path("scripts/run_training.sh").read_text()
    assert "hosts=(node1 user@node2)" in text and "--nproc_per_node=2" in text and "\r" not in text


GENERATED = {
    "config/ds_config.json": ["deepspeed"],
    "config/fsdp_config.json": ["fsdp"],
    "scripts/run_training.sh": LAUNCHER,
    "scripts/slurm_job.sh": SLURM,
}

EDITS = {
    "a line more": lambda text: text + "\n",
    "Windows line ends": lambda text: text.replace("\n", "\r\n"),
    "another digest": lambda text: re.sub(
        "sha256:.", "sha256:" + ("0" if "sha256:0" not in text else "1"), text
    ),
    "no digest": lambda text: re.sub("sha256:[0-9a-f]*", "", text),
    "not UTF-8": lambda text: b"\xff",
}


@pytest.mark.attack
@pytest.mark.parametrize("file", GENERATED)
def test_an_unedited_file_is_replaced(generate, file):
    assert generate(*GENERATED[file]).code == 0
    first = Path(file).read_text()
    assert generate(*GENERATED[file], "--output", file).code == 0
    assert Path(file).read_text() != first  # it names the other command
    assert generate(*GENERATED[file]).code == 0
    assert Path(file).read_text() == first and (Path(file).stat().st_mode & 0o100) == (
        0o100 if "scripts" in file else 0
    )


@pytest.mark.attack
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("file", GENERATED)
def test_an_edited_file_is_kept(generate, file, edit):
    assert generate(*GENERATED[file]).code == 0
    edited = EDITS[edit](Path(file).read_text())
    Path(file).write_bytes(edited.encode() if isinstance(edited, str) else edited)
    kept = Path(file).read_bytes()
    run = generate(*GENERATED[file])
    assert run.code == 2 and "--force" in run.error and "--output" in run.error
    assert Path(file).read_bytes() == kept
    assert generate(*GENERATED[file], "--force").code == 0 and Path(file).read_bytes() != kept


@pytest.mark.parametrize("flags", [LAUNCHER, SLURM])
@pytest.mark.parametrize(
    "text, says",
    [("lerning_rate: 1", "did you mean --learning_rate"), ("lr: many", ": many is not a number")],
)
def test_a_run_file_with_an_error_is_refused_before_the_queue(generate, flags, text, says):
    Path("config.yaml").write_text(text)
    run = generate(*flags)
    assert run.code == 2 and "config.yaml: " in run.error and says in run.error
    assert not Path("scripts").exists()


@pytest.mark.parametrize(
    "flags, is_said",
    [
        ([*LAUNCHER, "--use_deepspeed"], False),
        ([*SLURM, "--use_deepspeed"], False),
        ([*SLURM, "--use_deepspeed", "--num_nodes", "2"], True),
        ([*SLURM, "--use_deepspeed", "--requeue"], True),
    ],
)
def test_use_deepspeed_with_another_launcher_is_said(generate, flags, is_said):
    run = generate(*flags)
    assert run.code == 0 and ("--use_deepspeed is for a single node" in run.out) == is_said


# Flags of the generator, and the strategy that its file is for.
DEEPSPEED_FILES = [
    (["--zero_stage", "1"], "zero1"),
    (["--zero_stage", "2"], "zero2"),
    (["--zero_stage", "2", "--offload_optimizer", "--bf16"], "offload"),
    (["--zero_stage", "3", "--fp16"], "zero3"),
    (["--zero_stage", "3", "--offload_optimizer", "--offload_param"], "zero3"),
    (
        ["--zero_stage", "3", "--offload_optimizer", "--offload_param", "--nvme_path", "nvme"],
        "infinity",
    ),
]


@pytest.mark.attack
@pytest.mark.parametrize("flags, strategy", DEEPSPEED_FILES)
def test_the_run_decides_what_the_deepspeed_file_leaves_open(generate, flags, strategy):
    """Batch size, accumulation and clipping of a run file; the file is complete once they are
    filled in.
    """
    from support.cli.ds_config import ModelSizes, complete_ds_config
    from support.cli.parse import parse_arguments

    assert generate("deepspeed", *flags).code == 0
    written = json.loads(Path("config/ds_config.json").read_text())
    assert (
        written["train_micro_batch_size_per_gpu"]
        == written["gradient_accumulation_steps"]
        == "auto"
    )
    assert (
        written["gradient_clipping"] == "auto"
        and written["zero_optimization"]["reduce_scatter"] is True
    )
    Path("config.yaml").write_text(
        "batch_size: 2\ngradient_accumulation_steps: 3\nmax_grad_norm: 0.5\nuse_deepspeed: true\n"
        "deepspeed_config: config/ds_config.json\n"
    )
    args = parse_arguments(["--config", "config.yaml"])
    assert args.strategy == strategy
    whole = complete_ds_config(
        args.ds_config_dict, "fp32", ModelSizes(64, 10**6, 10**5, tied=True), 1, "nvme"
    )
    assert (whole["train_micro_batch_size_per_gpu"], whole["gradient_accumulation_steps"]) == (2, 3)
    assert whole["gradient_clipping"] == 0.5 and whole["train_batch_size"] == 6
    named = [flag.removeprefix("--") for flag in flags if flag in ("--bf16", "--fp16")]
    assert args.precision == (named[0] if named else "auto")
