"""Attacks on what is generated and on what starts a run: values of flags, files of hosts,
environments, allocations.

The generated scripts run in a real bash; srun, torchrun, deepspeed, ssh and scontrol are stubs that
record how they are called.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attacks import Attack, table
from conftest import PROJECT, Run

from support.cli.run_file import OTHER_NAMES

# --------------------------------------------------------------------------------------- generating


@pytest.fixture
def generate(tmp_path, monkeypatch, capfd):
    """generate(*args) runs scripts/distributed_setup.py in a folder with a run file, in this
    process.
    """
    import distributed_setup

    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("batch_size: 2\n")

    def run(*args) -> Run:
        monkeypatch.setattr(sys, "argv", ["scripts/distributed_setup.py", *map(str, args)])
        try:
            distributed_setup.main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        return Run(code, out, err, 0, tmp_path)

    return run


LAUNCHER, SLURM = ["launcher", "--config", "config.yaml"], ["slurm", "--config", "config.yaml"]
PAYLOADS = {
    "line end": "x\ntouch executed",
    "carriage return": "x\r\ntouch executed #",
    "next line": "x\u0085touch executed",
    "line separator": "x\u2028touch executed",
    "right to left": "x\u202etouch executed",
    "bytes that are not UTF-8": "x\udcff",
    "command substitution": "$(touch executed)",
    "backticks": "`touch executed`",
    "quotes": "'; touch executed; '",
    "double quotes": '"; touch executed; "',
    "separator": "x; touch executed",
    "placeholder": "@MADE_BY@",
    "unknown placeholder": "@NOPE@",
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


# These are much like others, and a bash for each takes a while.
LATER = (
    "double quotes",
    "separator",
    "backticks",
    "unknown placeholder",
    "an option",
    "placeholder of the digest",
)


@pytest.mark.attack
@pytest.mark.parametrize(
    "payload", [pytest.param(name, marks=[pytest.mark.soak] * (name in LATER)) for name in PAYLOADS]
)
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
        assert len(run.err.splitlines()) == 1 and run.error.startswith("❌ --"), run.err
        assert set(tmp_path.rglob("*")) - before <= {tmp_path / "hosts.txt"}
        return
    assert unicodedata_is_plain(value)
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


def unicodedata_is_plain(value):
    return all(character.isprintable() for character in value)


@pytest.mark.attack
@pytest.mark.parametrize(
    "name", ["my run.sh", "می\u200cخواهم.sh", "👩\u200d🔬", "x" * 200, "#", "%n"]
)
def test_a_name_that_is_only_unusual(generate, stubs, tmp_path, name):
    for flags in (LAUNCHER, SLURM):
        assert generate(*flags, "--output", name).code == 0
        assert stubs.run(["bash", name], tmp_path).code == 0


@table(
    Attack(
        "a port that is none",
        args=(*LAUNCHER, "--master_port", "70000"),
        says="--master_port 70000",
    ),
    Attack("5,000 digits", args=(*LAUNCHER, "--num_nodes", "9" * 5000), says="--num_nodes"),
    Attack("Arabic digits", args=(*SLURM, "--time_limit", "١٢:00:00"), says="HH:MM:SS"),
    Attack(
        "a name of 5,000 characters",
        args=(*LAUNCHER, "--output", "x" * 5000),
        code=1,
        says="File name too long",
    ),
    Attack("a folder", args=(*LAUNCHER, "--force", "--output", "."), says="is not a file"),
    Attack(
        "a pipe that nobody writes",
        lambda folder: os.mkfifo(folder / "pipe"),
        (*LAUNCHER, "--output", "pipe"),
        says="is not a file",
    ),
    Attack(
        "the run file itself",
        args=(*LAUNCHER, "--force", "--output", "./config.yaml"),
        says="is the file of --config",
    ),
    Attack(
        "the file of hosts itself",
        lambda folder: (folder / "hosts").write_text("a\n") and None,
        (*LAUNCHER, "--hosts", "hosts", "--force", "--output", "hosts"),
        says="is the file of --hosts",
    ),
    Attack(
        "many hosts, one of them twice",
        lambda folder: (
            (folder / "hosts").write_text("".join(f"n{i}\n" for i in range(200_000)) + "n7\n")
            and None
        ),
        (*LAUNCHER, "--hosts", "hosts"),
        says="line 200001: n7 is listed twice",
    ),
    Attack("a folder as run file", args=("launcher", "--config", "."), says="no such file"),
    Attack("no name of a run file", args=("launcher", "--config="), says="no such file"),
    Attack(
        "a place where no file can be",
        args=(*LAUNCHER, "--output", "/proc/no/run.sh"),
        code=1,
        says="cannot be written",
    ),
    Attack(
        "a file as folder",
        args=(*LAUNCHER, "--output", "config.yaml/run.sh"),
        code=1,
        says="cannot be written",
    ),
    Attack(
        "a host that is listed twice",
        lambda folder: (folder / "hosts").write_text("a\nb\na\n") and None,
        (*LAUNCHER, "--hosts", "hosts"),
        says="line 3: a is listed twice",
    ),
    Attack(
        "slots that differ",
        lambda folder: (folder / "hosts").write_text("a slots=2\nb slots=4\n") and None,
        (*LAUNCHER, "--hosts", "hosts"),
        says="same number of slots",
    ),
    Attack(
        "slots that contradict",
        lambda folder: (folder / "hosts").write_text("a slots=2\n") and None,
        (*LAUNCHER, "--hosts", "hosts", "--num_gpus_per_node", "4"),
        says="contradicts slots=2",
    ),
    Attack(
        "slots that are no number",
        lambda folder: (folder / "hosts").write_text("a slots=many\n") and None,
        (*LAUNCHER, "--hosts", "hosts"),
        says="line 1",
    ),
    Attack(
        "hosts of comments alone",
        lambda folder: (folder / "hosts").write_text("# a\n\n  # b\n") and None,
        (*LAUNCHER, "--hosts", "hosts"),
        says="names no host",
    ),
    Attack(
        "hosts in another encoding",
        lambda folder: (folder / "hosts").write_bytes(b"\xff\xfea\x00") and None,
        (*LAUNCHER, "--hosts", "hosts"),
        says="not UTF-8",
    ),
    Attack(
        "a model with words for sizes",
        lambda folder: (
            (folder / "config.json").write_text('{"n_layer": "12", "n_embd": 8, "vocab_size": 9}')
            and None
        ),
        ("deepspeed", "--model", "."),
        says="whole numbers",
    ),
    Attack(
        "a model whose configuration is a list",
        lambda folder: (folder / "config.json").write_text("[1]") and None,
        ("deepspeed", "--model", "."),
        says="config.json",
    ),
)
def test_generator_refuses(generate, tmp_path, attack):
    args = attack.prepare(tmp_path) or ()
    attack.check(tmp_path, generate(*attack.args, *args))
    assert not Path("scripts").exists() and not Path("config").exists()


@pytest.mark.attack
@pytest.mark.parametrize(
    "name", ["a\ntouch executed", "it's $(touch executed)", "`touch executed`", "-x", "ä b"]
)
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
    "a character less": lambda text: text[:-2] + "\n",
    "Windows line ends": lambda text: text.replace("\n", "\r\n"),
    "another digest": lambda text: re.sub(
        "sha256:.", "sha256:" + ("0" if "sha256:0" not in text else "1"), text
    ),
    "no digest": lambda text: re.sub("sha256:[0-9a-f]*", "", text),
    "empty": lambda text: "",
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


# ----------------------------------------------------------------------- running what was generated


class Stubs:
    """Programs that record their arguments, environment and standard input, in a folder that is
    first on PATH.
    """

    NAMES = ("srun", "torchrun", "deepspeed", "ssh", "scontrol", "module", "sleep")

    def __init__(self, folder: Path):
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir(parents=True)
        for name in self.NAMES:
            self.write(name, "")

    def write(self, name: str, then: str) -> None:
        """A stub that does `then` after it has recorded the call."""
        record = f"printf '%s\\0' \"$@\" > \"$(mktemp '{self.folder}/call.{name}.XXXXXX')\"\n"
        (self.bin / name).write_text(f"#!/bin/bash\n{record}{then}\n")
        (self.bin / name).chmod(0o755)

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of each call."""
        return [
            path.read_text().split("\0")[:-1] for path in sorted(self.folder.glob(f"call.{name}.*"))
        ]

    def run(self, command: list, cwd: Path, env: dict | None = None) -> Run:
        """Run a command; in the environment of a Slurm job with 2 nodes that have 2 GPUs and 4
        cores each.
        """
        job = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "train",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_GPUS_ON_NODE": "2",
            "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
            "SLURM_NTASKS_PER_NODE": "1",
            "VIRTUAL_ENV": "active",
        }
        whole = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        whole |= {**job, **(env or {}), "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env={k: v for k, v in whole.items() if v is not None},
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        return Run(done.returncode, done.stdout, done.stderr, 0, cwd)


@pytest.fixture
def stubs(tmp_path_factory):
    found = Stubs(tmp_path_factory.mktemp("stubs"))
    example = PROJECT / "slurm" / "train_requeue.slurm"
    found.write(
        "scontrol",
        f"""case "$*" in
        "show job"*) echo "   Command={example} --dataset /elsewhere/x.slurm y" ;;
        "show hostnames"*) printf 'n1\\nn2\\n' ;;
        esac""",
    )
    return found


# How a run's folder is named, and the arguments that name it; "run.yaml" has output_dir: from the
# run file.
FOLDERS = {
    "nothing names one": ("runs/train-7", []),
    "two words": ("x y", ["--output_dir", "x y"]),
    "one word": ("x y", ["--output_dir=x y"]),
    "the last counts": ("b'c", ["--output_dir", "a", "--output_dir=b'c"]),
    "the run file": ("from the run file", ["--config", "run.yaml"]),
    "the run file, in one word": ("from the run file", ["--config=run.yaml"]),
    "the command line before the run file": ("a$b", ["--config", "run.yaml", "--output_dir=a$b"]),
    "a value of another flag": ("runs/train-7", ["--dataset=--output_dir=x"]),
    "not ASCII": ("läufe/π", ["--output_dir=läufe/π"]),
}


@pytest.fixture
def requeue(stubs, tmp_path):
    """requeue(folder, results, *args) runs slurm/train_requeue.slurm; the ranks leave `results` in
    a folder.
    """
    (tmp_path / "run.yaml").write_text("training:\n  output_dir: from the run file\n")

    def run(folder, results, *args, code=75, env=None):
        stubs.write(
            "srun",
            f"""mkdir -p "$FOLDER"; printf '%s' "$RESULTS" > "$FOLDER/results.json"; exit {code}""",
        )
        env = {"FOLDER": folder, "RESULTS": results, **(env or {})}
        done = stubs.run(
            ["bash", PROJECT / "slurm" / "train_requeue.slurm", *args], cwd=tmp_path, env=env
        )
        assert done.code == code and "Traceback" not in done.err, done.out + done.err
        return ["requeue", "7"] in stubs.calls("scontrol")

    return run


@pytest.mark.attack
@pytest.mark.parametrize("case", FOLDERS)
def test_a_run_that_was_stopped_is_requeued_wherever_it_writes(
    requeue, stubs, tmp_path, monkeypatch, case
):
    from support.cli.parse import parse_arguments

    monkeypatch.chdir(tmp_path)
    folder, args = FOLDERS[case]
    assert requeue(folder, '{\n  "status": "preempted"\n}', *args)
    [call] = stubs.calls("srun")
    given = call[call.index("--output_dir") :]
    assert parse_arguments(given).output_dir == folder


# What a run leaves that must not run again.
NOT_REPEATED = {
    "completed": '{"status": "completed"}',
    "failed": '{"status": "failed"}',
    "killed": '{"status": "running"}',
    "words elsewhere": """{"status": "failed", "reason": "x \\"status\\": \\"preempted\\""}""",
    "words in the command": """{"command": {"status": "preempted"}, "status": "failed"}""",
    "half": '{"status": "preempted"',
    "a list": '["status", "preempted"]',
    "empty": "",
    "no status": "{}",
}


@pytest.mark.attack
@pytest.mark.parametrize("left", NOT_REPEATED)
def test_a_run_that_failed_is_not_requeued(requeue, left):
    assert not requeue("out", NOT_REPEATED[left], "--output_dir=out", code=1)


@pytest.mark.attack
def test_a_run_that_fails_before_it_trains_is_not_requeued(requeue, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text('{"status": "preempted"}')
    assert not requeue("out", '{"status": "preempted"}', "--output_dir=out", code=2)
    assert not list((tmp_path / "out").glob(".*"))


# What sbatch leaves in the environment, and the ranks on each node, their cores, and the GPUs of
# the step.
ALLOCATIONS = {
    "four requested, one allocated": (
        {"SLURM_GPUS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "1"},
        1,
        4,
        1,
    ),
    "by task": (
        {
            "SLURM_GPUS_PER_TASK": "1",
            "SLURM_GPUS_ON_NODE": "2",
            "SLURM_TRES_PER_TASK": "gres:gpu=1",
        },
        2,
        2,
        2,
    ),
    "by job": ({"SLURM_GPUS": "4", "SLURM_GPUS_ON_NODE": "2"}, 2, 2, 2),
    "by job, with a type": ({"SLURM_GPUS": "a100:4", "SLURM_GPUS_ON_NODE": "2"}, 2, 2, 2),
    "none": ({"SLURM_GPUS_ON_NODE": None, "SLURM_NTASKS_PER_NODE": "2"}, 2, 2, 0),
    "zero": (
        {"SLURM_GPUS_ON_NODE": "0", "SLURM_GPUS_PER_NODE": "0", "SLURM_NTASKS_PER_NODE": "2"},
        2,
        2,
        0,
    ),
    "nodes with different cores": ({"SLURM_JOB_CPUS_PER_NODE": "16,2"}, 2, 1, 2),
}


@pytest.mark.attack
@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("example", ["train_multi_node", "train_srun"])
def test_a_job_uses_what_it_was_allocated(stubs, tmp_path, example, allocation):
    env, ranks, cores, gpus = ALLOCATIONS[allocation]
    stubs.write("srun", 'env | grep ^SLURM_ > "$SEEN"')
    job = stubs.run(
        ["bash", PROJECT / "slurm" / f"{example}.slurm"],
        tmp_path,
        {**env, "SEEN": str(tmp_path / "seen")},
    )
    assert job.code == 0, job.err
    assert f"Job 7 on 2 nodes: n[1-2]; on each node {gpus} GPUs" in job.out
    assert f"Ranks: {2 * ranks} ({ranks} on each node); Master: n1:20007" in job.out
    [call] = stubs.calls("srun")
    assert (f"--gres=gpu:{gpus}" in call) == (gpus > 0)
    assert not re.search("GPUS_PER|TRES_PER", (tmp_path / "seen").read_text())
    if example == "train_srun":
        assert {
            f"--ntasks={2 * ranks}",
            f"--ntasks-per-node={ranks}",
            f"--cpus-per-task={cores}",
        } <= set(call)
    else:
        assert {"--ntasks=2", "--ntasks-per-node=1", f"--cpus-per-task={ranks * cores}"} <= set(
            call
        )
        assert f"--nproc_per_node={ranks}" in call


@table(
    Attack(
        "GPUs that do not divide",
        args=("train_multi_node",),
        env={"SLURM_GPUS": "3", "SLURM_GPUS_ON_NODE": "2"},
        says="3 GPUs cannot be spread evenly over 2 nodes",
    ),
    Attack(
        "fewer cores than GPUs",
        args=("train_srun",),
        env={"SLURM_JOB_CPUS_PER_NODE": "1(x2)"},
        says="2 ranks need 2 cores",
    ),
    Attack(
        "two nodes for a script of one",
        args=("train_single_node",),
        says="one node, and the job has 2",
    ),
    Attack("two nodes for the comparison", args=("compare",), says="one node, and the job has 2"),
    Attack(
        "a project that is none",
        args=("train_srun",),
        env={"TRAINING_PROJECT": "/tmp"},
        says="/tmp is not the project",
    ),
)
def test_a_job_refuses(stubs, tmp_path, attack):
    job = stubs.run(["bash", PROJECT / "slurm" / f"{attack.args[0]}.slurm"], tmp_path, attack.env)
    attack.check(tmp_path, job)
    assert stubs.calls("srun") == []


# What `scontrol show job` prints after Command=, with {file} for the batch script; and the job's
# own variables.
RECORDS = {
    "no arguments": "{file}",
    "arguments with a path": "{file} --dataset /elsewhere/x.slurm y.slurm",
    "an argument with a line end": "{file} --generate a\n   Command=/elsewhere/slurm/train.slurm b",
    "the jobs of an array": "{file}\n   Command={file}",
}


@pytest.mark.attack
@pytest.mark.parametrize("record", RECORDS)
def test_the_project_is_found(stubs, tmp_path, record):
    """From any folder, among them one with modules that have the names of Python's."""
    for name in ("json", "os", "yaml", "support"):
        (tmp_path / f"{name}.py").write_text(
            "raise SystemExit('imported from the working folder')\n"
        )
    (tmp_path / "my project").symlink_to(PROJECT)
    example = f"{tmp_path}/my project/slurm/x.slurm"
    (tmp_path / "record").write_text(f"   Command={RECORDS[record]}\n".replace("{file}", example))
    stubs.write(
        "scontrol", f"""[[ $2 == hostnames ]] && printf 'n1\\nn2\\n' || cat '{tmp_path}/record'"""
    )
    job = stubs.run(["bash", PROJECT / "slurm" / "train_requeue.slurm"], tmp_path)
    assert job.code == 0 and "working folder" not in job.err, job.err
    [call] = stubs.calls("srun")
    assert f"{tmp_path}/my project/real_model_example.py" in call


@pytest.mark.attack
@pytest.mark.parametrize("name", ["a b", "../../outside", "$(touch executed)", "-n", "@NAME@"])
def test_the_name_of_a_job_is_a_name(stubs, tmp_path, name):
    job = stubs.run(
        ["bash", PROJECT / "slurm" / "train_srun.slurm"], tmp_path, {"SLURM_JOB_NAME": name}
    )
    assert job.code == 0, job.err
    [call] = stubs.calls("srun")
    assert call[call.index("--output_dir") + 1] == f"runs/{name.replace('/', '_')}-7"
    assert not (tmp_path / "executed").exists()


# ------------------------------------------------------------------------ which launcher started it

# Task 1 of two, the first of its node; rows add to it or, with None, take away.
TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
EXPORTED = {"RANK": "0", "WORLD_SIZE": "2"}
SLURM_WINS = ("srun", 1, 2, 0, 1, 1, "n1", 20707)
# What happened: the process's environment, that with which its task started ("task": as the
# process's; None: hidden), and (launcher, rank, world size, local rank, local world size, node,
# master's address and port) or an error.
LAUNCHES = {
    "srun alone": (TASK, {}, SLURM_WINS),
    "the batch script exported RANK": (TASK | EXPORTED, EXPORTED, SLURM_WINS),
    "and everything else": (
        TASK
        | EXPORTED
        | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        EXPORTED,
        (*SLURM_WINS[:-1], 29500),
    ),
    "a size of 1": (TASK | {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0"}, SLURM_WINS),
    "a size of 8": (TASK | {"RANK": "0", "WORLD_SIZE": "8"}, {"RANK": "0"}, SLURM_WINS),
    "in a container that hides the task": (TASK | EXPORTED, None, SLURM_WINS),
    "torchrun in each task": (
        TASK
        | {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4",
            "GROUP_RANK": "1",
            "TORCHELASTIC_RUN_ID": "7",
            "MASTER_ADDR": "n1",
            "MASTER_PORT": "1234",
        },
        {},
        ("torchrun", 5, 8, 1, 4, 1, "n1", 1234),
    ),
    "torchrun in each task, after an export": (
        TASK
        | {
            "RANK": "0",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "4",
            "TORCHELASTIC_RUN_ID": "7",
            "MASTER_ADDR": "n1",
            "MASTER_PORT": "1234",
        },
        {"RANK": "0"},
        ("torchrun", 0, 8, 0, 4, 0, "n1", 1234),
    ),
    "deepspeed in one task": (
        TASK
        | {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "3",
            "LOCAL_SIZE": "4",
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1234",
        },
        {},
        ("deepspeed", 3, 4, 3, 4, 0, "127.0.0.1", 1234),
    ),
    "a shell in each task that starts four": (
        TASK
        | {
            "RANK": "6",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "2",
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "n1",
        },
        {},
        ("python", 6, 8, 2, 4, 1, "n1", 29500),
    ),
    "the same in a container": (
        TASK
        | {
            "RANK": "6",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "2",
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "n1",
        },
        None,
        ("python", 6, 8, 2, 4, 1, "n1", 29500),
    ),
    "one srun for each rank": (
        TASK
        | {
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "1",
            "SLURM_STEP_NUM_TASKS": "1",
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "n1",
        },
        {"RANK": "1"},
        ("python", 1, 2, 0, 1, 1, "n1", 29500),
    ),
    "the batch script's own shell": (
        TASK | {"SLURM_STEP_ID": None},
        {},
        ("python", 0, 1, 0, 1, 0, "127.0.0.1", None),
    ),
    "the list of nodes as master": (TASK | {"MASTER_ADDR": "n[1-2]"}, {}, SLURM_WINS),
    "names as master": (TASK | {"MASTER_ADDR": "n1,n2"}, {}, SLURM_WINS),
    "lines as master": (TASK | {"MASTER_ADDR": "n1\nn2"}, {}, SLURM_WINS),
    "localhost as master of two nodes": (TASK | {"MASTER_ADDR": "localhost"}, {}, SLURM_WINS),
    "localhost as master of one node": (
        TASK
        | {
            "MASTER_ADDR": "127.0.0.1",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "2",
        },
        {},
        ("srun", 1, 2, 1, 2, 0, "127.0.0.1", 20707),
    ),
    "another network's name as master": (
        TASK | {"MASTER_ADDR": "n1-ib"},
        {},
        (*SLURM_WINS[:6], "n1-ib", 20707),
    ),
    "uneven nodes": (
        TASK
        | {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "3,1"},
        {},
        ("srun", 3, 4, 0, 1, 1, "n1", 20707),
    ),
    "a count that no memory holds": (
        TASK | {"SLURM_STEP_TASKS_PER_NODE": "1(x99999999999999)"},
        {},
        SLURM_WINS,
    ),
    "the shell of salloc": (
        TASK
        | {
            "SLURM_PROCID": "0",
            "SLURM_NODEID": "0",
            "SLURM_STEP_ID": "4294967290",
            "SLURM_NTASKS": "8",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1",
            "SLURM_STEP_NODELIST": "n1",
        },
        {},
        ("srun", 0, 1, 0, 1, 0, "n1", None),
    ),
    "empty variables": ({"RANK": "", "WORLD_SIZE": ""}, {}, "environment is incomplete"),
    "a local rank below 0": (
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "-1"},
        {},
        "LOCAL_RANK=-1",
    ),
    "a task that is no number": (TASK | {"SLURM_PROCID": "x"}, {}, "environment is incomplete"),
    "a task without its number on the node": (TASK | {"SLURM_LOCALID": None}, {}, "SLURM_LOCALID"),
    "a rank that is no number": ({"RANK": "one", "WORLD_SIZE": "2"}, {}, "one"),
    "a rank that does not fit": ({"RANK": "2", "WORLD_SIZE": "2"}, {}, "RANK=2"),
    "a rank below 0": ({"RANK": "-1", "WORLD_SIZE": "2"}, {}, "RANK=-1"),
    "no ranks": ({"RANK": "0", "WORLD_SIZE": "0"}, {}, "WORLD_SIZE=0"),
    "a local rank that does not fit": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "2"},
        {},
        "LOCAL_RANK=4",
    ),
    "a port that is none": (
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "99999"},
        {},
        "MASTER_PORT=99999",
    ),
    "a port of words": ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "http"}, {}, "http"),
    "5,000 digits": ({"RANK": "9" * 5000, "WORLD_SIZE": "1"}, {}, "digits"),
}


@pytest.mark.attack
@pytest.mark.parametrize("case", LAUNCHES)
def test_detect_launch(stubs, monkeypatch, capfd, case):
    from support.cluster.launch import detect_launch
    from support.errors import UserError

    env, task, wanted = LAUNCHES[case]
    for name in [
        name
        for name in os.environ
        if re.match("SLURM_|MASTER_|RANK|WORLD_SIZE|LOCAL_|CROSS_|TORCHELASTIC", name)
    ]:
        monkeypatch.delenv(name)
    with subprocess.Popen(
        ["sleep", "60"], env={"PATH": os.environ["PATH"], **(task or {})}
    ) as process:
        try:
            while (
                task is not None
                and b"sleep" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
            ):
                pass
            own = {"PATH": f"{stubs.bin}{os.pathsep}{os.environ['PATH']}"}
            own |= {"SLURM_TASK_PID": str(process.pid)} if task is not None else {}
            monkeypatch.setattr(
                os,
                "environ",
                own | {name: value for name, value in env.items() if value is not None},
            )
            if isinstance(wanted, str):
                with pytest.raises(UserError, match=wanted):
                    detect_launch()
                return
            found = detect_launch()
        finally:
            process.kill()
    values = (
        found.launcher,
        found.rank,
        found.world_size,
        found.local_rank,
        found.local_world_size,
        found.node,
        found.master_addr,
        found.master_port,
    )
    assert [
        value for value, want in zip(values, wanted, strict=True) if want not in (value, None)
    ] == [], values
    overruled = "RANK" in env and found.launcher == "srun"
    assert ("RANK=0" in capfd.readouterr().out) == overruled or env["WORLD_SIZE"] != "2"


# ---------------------------------------------------------------------------- over ssh, and secrets

SECRETS = {
    "HF_TOKEN": "hf_CANARYcanaryCANARYcanary1234",
    "WANDB_API_KEY": "canary0123456789abcdef0123456789abcdef",
    "HF_ENDPOINT": "http://user:canary@127.0.0.1:9",
    "MY_PASSWORD": "canary's password",
}


@pytest.fixture
def over_ssh(generate, stubs):
    """The launcher for node1 and node2, where ssh is a shell on this machine; torchrun does what
    the test writes.
    """
    Path("hosts.txt").write_text("node1\nme@node2\n")
    assert generate(*LAUNCHER, "--hosts", "hosts.txt").code == 0
    stubs.write("ssh", 'while [[ $1 != bash ]]; do shift; done; exec "$@"')
    return Path("scripts/run_training.sh").absolute()


@pytest.mark.attack
def test_secrets_reach_the_hosts_and_no_command_line(over_ssh, stubs, tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()
    stubs.write(
        "torchrun",
        f"""cp /proc/$$/environ '{seen}'/environ.$$
        for file in /proc/[0-9]*/cmdline; do cat "$file" 2> /dev/null; echo; done > '{seen}'/commands.$$""",
    )
    odd = [
        "--generate",
        "two words",
        'it\'s $HOME `id` \\ "x"',
        "line\nend",
        "",
        "--dataset=*",
        "ä",
    ]
    done = stubs.run(
        ["bash", over_ssh, *odd],
        tmp_path,
        {**SECRETS, "NCCL_DEBUG": "INFO", "OMP_NAME": "two\nlines"},
    )
    assert done.code == 0, done.out + done.err
    assert len(list(seen.glob("environ.*"))) == len(list(seen.glob("commands.*"))) == 2
    for file in seen.glob("commands.*"):
        assert b"canary" not in file.read_bytes().lower()
    for file in seen.glob("environ.*"):
        found = dict(line.split("=", 1) for line in file.read_text().split("\0") if "=" in line)
        for name in ("HF_TOKEN", "WANDB_API_KEY", "HF_ENDPOINT"):
            assert found[name] == SECRETS[name]
        assert found["OMP_NAME"] == "two\nlines" and found["PWD"] == str(tmp_path)
    assert sorted(call[2] for call in stubs.calls("torchrun")) == ["--node_rank=0", "--node_rank=1"]
    for call in stubs.calls("torchrun"):
        assert call[-len(odd) :] == odd
    assert all("canary" not in " ".join(call).lower() for call in stubs.calls("ssh"))
    assert "canary" not in over_ssh.read_text() + done.out + done.err


@pytest.mark.attack
def test_a_host_that_reads_nothing(over_ssh, stubs, tmp_path):
    """More than a pipe holds, for an ssh that cannot connect."""
    stubs.write("ssh", "exit 255")
    began = time.monotonic()
    done = stubs.run(
        ["bash", over_ssh, "--generate", "x" * 100_000], tmp_path, {"HF_LONG": "y" * 100_000}
    )
    assert done.code == 255 and time.monotonic() - began < 15


@pytest.mark.attack
def test_the_exit_code_of_a_host_is_the_launchers(over_ssh, stubs, tmp_path):
    stubs.write("torchrun", "[[ $3 == --node_rank=0 ]] || exit 7; exec /bin/sleep 30")
    began = time.monotonic()
    assert stubs.run(["bash", over_ssh], tmp_path).code == 7 and time.monotonic() - began < 15


@pytest.mark.attack
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_ranks_end_with_the_launcher(over_ssh, stubs, tmp_path, number):
    """Even with one that is killed: its ends of the connections close, and the hosts notice."""
    stubs.write(
        "torchrun",
        f"""echo $$ >> '{tmp_path}/pids'; trap 'echo asked >> "{tmp_path}/asked"; echo saved; exit' TERM
        for _ in {{1..300}}; do /bin/sleep 0.1; done""",
    )
    env = {
        **os.environ,
        "PATH": f"{stubs.bin}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": "active",
        "TMPDIR": str(tmp_path),
    }
    with open(
        tmp_path / "log", "w"
    ) as log:  # not a pipe: what outlives the launcher would hold it open
        launcher = subprocess.Popen(
            ["bash", over_ssh],
            cwd=tmp_path,
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    wait_for_lines(tmp_path / "pids", 2)
    os.killpg(launcher.pid, number) if number == signal.SIGINT else launcher.send_signal(
        number
    )  # Ctrl-C is for the group
    launcher.wait(20)
    wait_for_lines(tmp_path / "asked", 2)
    if number != signal.SIGKILL:
        wait_for_lines(tmp_path / "log", 2)
        assert {"node1: saved", "me@node2: saved"} <= set(
            (tmp_path / "log").read_text().splitlines()
        )


def wait_for_lines(path: Path, number: int) -> None:
    until = time.monotonic() + 20
    while not path.exists() or len(path.read_text().splitlines()) < number:
        assert time.monotonic() < until, f"{path.name} has not {number} lines"
        time.sleep(0.05)


@pytest.mark.attack
def test_no_secret_in_errors_settings_and_tracebacks(monkeypatch, capfd):
    from support.cli.hub import answers
    from support.cli.parse import parse_arguments
    from support.errors import UserError, explain
    from support.redaction import print_traceback

    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    for kind, name in [
        (UserError, "HF_ENDPOINT"),
        (OSError, "HF_ENDPOINT"),
        (ValueError, "HF_TOKEN"),
        (RuntimeError, "MY_PASSWORD"),
    ]:
        error = kind(f"{SECRETS[name]} is wrong")
        assert "canary" not in str(explain(error)).lower()
        print_traceback(error)
    assert not answers(SECRETS["HF_ENDPOINT"])
    assert parse_arguments(["--model", "gpt2"]).model == "gpt2"
    out, err = capfd.readouterr()
    assert "canary" not in (out + err).lower() and "ValueError" in err


@pytest.mark.attack
@pytest.mark.parametrize(
    "args",
    [
        ("--model", "gpt2"),
        ("--model", "gpt2", "--verbose"),
        ("--print_config",),
        ("--model", "http://u:canary@host/x", "--print_config"),
    ],
    ids=str,
)
def test_no_secret_is_printed_before_the_start(script, tmp_path, args):
    """The hub's address is part of the message that it cannot be reached."""
    run = script(*args, env={**SECRETS, "HF_HOME": tmp_path / "empty", "NO_PROXY": "*"}, ok=False)
    assert "canary" not in (run.out + run.err).lower()
    assert run.code == (0 if "--print_config" in args else 2), run.err


@pytest.mark.attack
@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["dp", "zero1"])
def test_no_secret_in_any_file_of_a_run(script, tmp_path, strategy):
    env = {
        **SECRETS,
        "HTTPS_PROXY": "http://me:canary@127.0.0.1:8",
        "WANDB_MODE": "offline",
        "HF_HOME": tmp_path / "home",
    }
    run = script(
        "--strategy",
        strategy,
        "--num_samples",
        "8",
        "--seq_length",
        "32",
        "--no_eval",
        "--save_every",
        "1",
        "--report_to",
        "tensorboard,wandb",
        "--verbose",
        "--profile",
        tmp_path / "trace",
        env=env,
    )
    files = [
        path for folder in (run.folder, tmp_path) for path in folder.rglob("*") if path.is_file()
    ]
    assert {"README.md", "results.json", "manifest.json", "trace-rank0.json"} <= {
        path.name for path in files
    }
    assert [path for path in files if b"canary" in path.read_bytes().lower()] == []
    assert "canary" not in (run.out + run.err).lower()


# ---------------------------------------------------------------------------------- on a real Slurm

# How sbatch asks (the files ask for 4 GPUs on each node), and tasks, GPUs and ranks on each node.
REQUESTS = {
    "train_multi_node --gres=gpu:1": "2 tasks, 1 GPUs, 1 ranks",
    "train_multi_node --gpus=8": "2 tasks, 4 GPUs, 4 ranks",
    "train_multi_node --gpus-per-node=2 --ntasks-per-node=2": "2 tasks, 2 GPUs, 2 ranks",
    "train_multi_node --gpus-per-node=0": "2 tasks, 0 GPUs, 2 ranks",
    "train_multi_node --gpus-per-task=4": "2 tasks, 4 GPUs, 4 ranks",
    "train_multi_node --exclusive": "2 tasks, 4 GPUs, 4 ranks",
    "train_srun --gres=gpu:1": "2 tasks, 1 GPUs, 1 ranks",
    "train_srun --gpus-per-task=1": "8 tasks, 4 GPUs, 4 ranks",
    "train_srun --gpus-per-node=0": "8 tasks, 0 GPUs, 4 ranks",
    "train_requeue --gres=gpu:2": "4 tasks, 2 GPUs, 2 ranks",
    "train_single_node --gres=gpu:3": "1 tasks, 3 GPUs, 3 ranks",
    "generated --gres=gpu:1": "2 tasks, 1 GPUs, 1 ranks",
    "generated_requeue --gpus-per-node=3": "6 tasks, 3 GPUs, 3 ranks",
}


@pytest.mark.attack
def test_slurm_gives_a_job_what_it_requested(slurm, generate, tmp_path):
    """torchrun and the script are stubs: what they see is what Slurm gave them."""
    for name, more in [("generated", []), ("generated_requeue", ["--requeue"])]:
        assert (
            generate(
                *SLURM,
                "--num_nodes",
                "2",
                "--num_gpus_per_node",
                "4",
                "--output",
                f"{name}.slurm",
                *more,
            ).code
            == 0
        )
    (tmp_path / "bin").mkdir()
    say = """ranks=${ranks:-$((SLURM_NTASKS / SLURM_NNODES))}
        echo "$SLURM_NTASKS tasks, ${SLURM_GPUS_ON_NODE:-0} GPUs, $ranks ranks\""""
    stubs = {
        "torchrun": f"""for word; do [[ $word != --nproc_per_node=* ]] || ranks=${{word#*=}}; done; {say}""",
        "python": f"""[[ $1 == -c ]] && exec {sys.executable} "$@"; {say}""",
    }
    for name, text in stubs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": "active",
    }
    jobs = []
    for number, request in enumerate(REQUESTS):
        name, *options = request.split()
        file = (
            tmp_path / f"{name}.slurm"
            if "generated" in name
            else PROJECT / "slurm" / f"{name}.slurm"
        )
        log = tmp_path / f"{number}.log"
        command = [
            "sbatch",
            f"--output={log}",
            f"--error={log}",
            "--open-mode=append",
            *options,
            file,
        ]
        subprocess.run([*map(str, command)], env=env, check=True, capture_output=True)
        jobs.append((request, log))
    until = time.monotonic() + 90
    while queue := subprocess.run(
        ["squeue", "-h"], capture_output=True, text=True
    ).stdout:  # sbatch --wait looks rarely
        assert time.monotonic() < until, queue
        time.sleep(0.1)
    for request, log in jobs:
        lines, wanted = log.read_text().splitlines(), REQUESTS[request]
        ranks = int(wanted.split()[4])
        nodes = 1 if "single" in request else 2
        assert lines.count(wanted) == int(wanted.split()[0]), f"{request}: {lines}"
        assert any(
            line.startswith(f"Ranks: {nodes * ranks} ({ranks} on each node)") for line in lines
        ), lines


@pytest.mark.attack
def test_srun_after_an_export(slurm):
    """RANK, WORLD_SIZE and a compressed list of nodes come from the batch script, the same in every
    task.
    """
    program = "from support.cluster.launch import detect_launch; print(detect_launch())"
    env = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "node[1-2]",
        "LOCAL_RANK": "0",
    }
    command = [
        "srun",
        "--nodes=2",
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--cpus-per-task=1",
        "--gpus-per-node=0",
        sys.executable,
        "-c",
        program,
    ]
    done = subprocess.run(command, env=env, cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    place = r"rank=(\d+), local_rank=(\d+), world_size=(\d+), local_world_size=(\d+), node=(\d)"
    found = sorted("".join(numbers) for numbers in re.findall(place, done.stdout))
    assert found == ["00420", "11420", "20421", "31421"], done.stdout
    assert (
        done.stdout.count("master_addr='node1'") == 4
        and len(set(re.findall(r"master_port=\d+", done.stdout))) == 1
    )
    assert (
        done.stdout.count("RANK=0 WORLD_SIZE=2 was exported")
        == done.stdout.count("MASTER_ADDR=node[1-2]")
        == 1
    )


# ----------------------------------------------------------------------------------- the comparison

MODELS = [
    "a b",
    "it's",
    '"x"; touch executed',
    "$(touch executed)",
    "`touch executed`",
    "a\ntouch executed",
    "*",
    "-x",
    "../../up",
]
SETTINGS = {
    "NUM_GPUS": "a[$(touch executed)]",
    "SIMULATE_GPUS": "1;touch executed",
    "REPEATS": "1+1",
    "RESUME": "a[$(touch executed)]",
    "TIMEOUT": "9" * 20,
    "CONTROL": "yes",
    "STRATEGIES": "dp $(touch executed)",
}


def other_names(*flags: str) -> list[str]:
    return [f"--{alias}" for alias, flag in OTHER_NAMES.items() if flag in flags]


@pytest.fixture
def compare(stubs, tmp_path):
    """compare(*args, env) runs compare_strategies.sh with a stub for Python."""
    stubs.write(
        "python",
        """case "$*" in *matplotlib*) printf '0\\nfacts\\n' ;; *free_port*) echo 1 ;; esac""",
    )

    def run(*args, env=None):
        env = {
            "STRATEGIES": "dp",
            "CONTROL": "0",
            "PYTHON": str(stubs.bin / "python"),
            **(env or {}),
        }
        done = stubs.run(["bash", PROJECT / "compare_strategies.sh", *args], tmp_path, env)
        assert not list(tmp_path.rglob("executed")) and {
            path.name for path in tmp_path.iterdir()
        } <= {"comparison_runs"}
        return done

    return run


@pytest.mark.attack
@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_the_comparison_is_a_name(compare, stubs, model):
    assert compare(model, f"--dataset={model}").code == 0
    [call] = [call for call in stubs.calls("python") if "torch.distributed.run" in call]
    assert call[call.index("--model") + 1] == model and f"--dataset={model}" in call


@pytest.mark.attack
@pytest.mark.parametrize(
    "flag", ["--deepspeed=x", "--use_fsdp", "--prefetch", *other_names("model", "ds_config")]
)
def test_the_comparison_refuses_other_names_of_what_it_sets(compare, stubs, flag):
    run = compare("x", flag)
    assert run.code == 2 and flag.partition("=")[0] in run.error and stubs.calls("python") == []


@pytest.mark.attack
@pytest.mark.parametrize("flag", ["--max_steps", *other_names("epochs", "num_samples")])
def test_the_comparison_leaves_the_length_to_the_arguments(compare, stubs, flag):
    assert compare("x", flag, "7").code == 0
    [call] = [call for call in stubs.calls("python") if "torch.distributed.run" in call]
    assert ("--max_steps" in call) == (flag == "--max_steps")


@pytest.mark.attack
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_comparison_is_refused(compare, stubs, name):
    run = compare("x", env={name: SETTINGS[name]})
    assert run.code == 2 and name in run.error and stubs.calls("python") == []
