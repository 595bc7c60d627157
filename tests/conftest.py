"""Fixtures: run the script as a user does, and look at what it printed and wrote."""

import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from packaging.version import Version
from preloaded import Preloaded

from distributed_training.strategies.table import STRATEGIES as ROWS

# Of tests/helpers; their fixtures are for several files.
pytest_plugins = ["cluster_work", "command_lines", "generated_scripts", "written_runs"]

PROJECT = Path(__file__).resolve().parent.parent
SCRIPT = PROJECT / "real_model_example.py"
FAULT = PROJECT / "tests" / "helpers" / "fault.py"
STRATEGIES = list(ROWS)

# Work on which strategies and splits are compared. A global batch of 8 sequences on 37: four
# whole steps, then one of 5 sequences, whose second micro-batch is short by 3. Two epochs make 10
# steps, all of them the same work for every strategy and split. The heavy weight decay makes a
# difference in the parameter groups show.
SAME_WORK = [
    *"--seq_length 32 --num_samples 37 --epochs 2 --dropout 0 --eval_samples 9".split(),
    *"--weight_decay 1 --lr 1e-3".split(),
]
SMALL = ["--from_scratch", "--dataset", "pydocs"]  # for a run of small_gpt2
SPLIT = ["--batch_size", "2", "--gradient_accumulation_steps", "2"]  # on two ranks
# The same with four micro-batches: a sum that loses those in the middle is right for two.
FINE_SPLIT = ["--batch_size", "1", "--gradient_accumulation_steps", "4"]


def slow(*values):
    """The values of a case that `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def soak(*values):
    """The values of a case that only `make soak` runs."""
    return pytest.param(*values, marks=pytest.mark.soak)


def skip(reason: str) -> None:
    """Skip with a reason; where nothing may be skipped (CI), fail with it."""
    if os.environ.get("FAIL_ON_SKIP"):
        pytest.fail(f"would be skipped: {reason}")
    pytest.skip(reason)


def pytest_configure():
    """Give each worker of pytest-xdist its own cores, and let Ctrl-C reach what a test starts."""
    # Threads that spin for a core cost minutes.
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1 and hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[worker::workers] or cores)
    # `make test &` in a script: the shell sets SIGINT to be ignored, and a program that a test
    # starts and stops with Ctrl-C would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# The files that take longest. pytest-xdist gives its workers one file after the other; a long one
# that starts last leaves the other worker without work.
FIRST = """
    slurm_jobs comparison checkpoint memory_prediction equality streaming machines any_strategy
    models check processes own_data export lora
    """.split()


def pytest_collection_modifyitems(items):
    """Run the files of FIRST first."""
    place = {f"test_{name}.py": number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(FIRST)))


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory):
    """A home of its own for every cache but the compiled ops, which take minutes to build."""
    for name in list(os.environ):
        if name.startswith(("HF_", "SLURM_", "OMP_")) or name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
    # To compile the project again takes half a second of each run.
    for name in ("LOCAL_RANK", "PYTHONDONTWRITEBYTECODE"):
        os.environ.pop(name, None)
    os.environ["HF_HOME"] = str(tmp_path_factory.mktemp("home") / "hf")
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("tmp"))
    os.environ["NO_PROXY"] = "127.0.0.1"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    tempfile.tempdir = None
    if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
        compile_ops()


def compile_ops() -> None:
    """Compile DeepSpeed's ops if some are missing; if that fails, the tests report it.

    One worker compiles, on the cores of all, because the others wait for it.
    """
    if ROWS["infinity"].missing_ops():
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        start([sys.executable, PROJECT / "scripts" / "build_ops.py"]).communicate()
        os.sched_setaffinity(0, cores)


@dataclass
class Run:
    """A finished run."""

    code: int = 0
    out: str = ""
    err: str = ""
    seconds: float = 0.0
    folder: Path = Path()

    @property
    def results(self) -> dict:
        return json.loads((self.folder / "results.json").read_text())

    @property
    def metrics(self) -> list[dict]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.metrics if "loss" in record]

    @property
    def error(self) -> str:
        """The script's own line about what went wrong; exactly one is expected."""
        lines = [line for line in (self.out + self.err).splitlines() if "❌" in line]
        assert len(lines) == 1, f"{len(lines)} error lines\n{self.out}\n{self.err}"
        # torchrun prints a traceback of its own when a rank fails; ours must not
        own = self.out + self.err.partition("torch/distributed/elastic")[0]
        assert "Traceback" not in own, self.err
        return lines[0]


def check_schema(folder: Path, metrics: bool = True) -> None:
    """Check that the files of a run have the keys and types of docs/OUTPUTS.md."""
    from schema_check import problems_of_metrics, problems_of_results

    from distributed_training.records.results_types import wrong_key

    run = Run(folder=folder)
    problems = [*problems_of_results(run.results), *filter(None, [wrong_key(run.results)])]
    for record in run.metrics if metrics else ():
        problems += problems_of_metrics(record)
    assert not problems, f"{folder}: {problems}"


def check_permissions(folder: Path) -> None:
    """Check that what a run wrote has the permissions that the umask leaves, whichever library did."""
    umask = os.umask(0o022)
    os.umask(umask)
    wrong = {
        str(path): oct(mode)
        for path in folder.rglob("*")
        if not path.is_symlink()
        and (mode := path.stat().st_mode & 0o777) | 0o111 != (0o777 & ~umask) | 0o111
    }
    assert not wrong, wrong


def launcher_command(launcher: str, ranks: int) -> list[str]:
    """How a user starts `ranks` processes under each launcher."""
    port, main_port = f"--master_port={free_port()}", f"--main_process_port={free_port()}"
    several = ["--cpu"] if ranks == 1 else ["--multi_gpu", f"--num_processes={ranks}"]
    return {
        "python": [sys.executable],
        "torchrun": ["torchrun", f"--nproc_per_node={ranks}", port],
        "deepspeed": ["deepspeed", f"--num_gpus={ranks}", port],
        "accelerate": ["accelerate", "launch", *several, main_port],
        "srun": ["srun", f"--ntasks={ranks}", "--kill-on-bad-exit=1", sys.executable],
    }[launcher]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(command: list, env: dict | None = None, cwd: Path | None = None) -> subprocess.Popen:
    """Start a command in its own session, with Ctrl-C even if the tests run in the background."""

    def prepare():  # both are ignored under & and nohup, and that is inherited
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    return subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd or PROJECT,
        env={**os.environ, **{name: str(value) for name, value in (env or {}).items()}},
        start_new_session=True,
        preexec_fn=prepare,
    )


def finish(process: subprocess.Popen, timeout: float) -> tuple[str, str]:
    """Wait for a command; past its time everything it started is killed and the test fails."""
    try:
        return process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            child.kill()
        out, err = process.communicate()
        pytest.fail(f"not finished after {timeout} s:\n{out[-3000:]}\n{err[-3000:]}")


@pytest.fixture(scope="session")
def preloaded(environment):
    """An interpreter that starts in milliseconds (see preloaded.py), or None.

    With PRELOADED=0 in the environment, and where there is a GPU, which a process must not use after
    a fork, every start is a real one.
    """
    if os.environ.get("PRELOADED") == "0" or Path("/dev/nvidiactl").exists():
        yield None
        return
    interpreter = Preloaded()
    yield interpreter
    interpreter.stop()


@pytest.fixture(scope="session")
def begin(preloaded):
    """begin(command, env, cwd) is `start`, but a fork of a preloaded interpreter runs the command.

    For tests that interrupt a run. Those that look for its processes use `start`.
    """

    def run(command: list, env: dict | None = None, cwd: Path | None = None) -> subprocess.Popen:
        if preloaded:
            own = preloaded.for_torchrun() if command[0] == "torchrun" else {}
            command, env = preloaded.replace(command), {**(env or {}), **own}
        return start(command, env, cwd)

    return run


@pytest.fixture(scope="session")
def script(tmp_path_factory, begin):
    """script(*args, launcher=, ranks=, env=, ok=) runs real_model_example.py and returns a `Run`.

    Under python and torchrun a fork of a preloaded interpreter runs it, unless `real` is true.
    """

    def run(
        *args,
        launcher="python",
        ranks=1,
        env=None,
        ok=True,
        timeout=300,
        program=SCRIPT,
        folder=None,
        cwd=None,
        real=False,
    ) -> Run:
        if "infinity" in args and "PATH" not in (env or {}):
            skip_without_libaio()
        folder = folder or tmp_path_factory.mktemp("run") / "out"
        command = [*launcher_command(launcher, ranks), program, *args]
        if "--output_dir" not in args:
            command += ["--output_dir", folder]
        started, begun_at = time.monotonic(), time.time()
        process = (start if real else begin)(command, env, cwd)
        out, err = finish(process, timeout)
        done = Run(process.returncode, out, err, time.monotonic() - started, Path(folder))
        written = done.folder / "results.json"
        # A resumed run may take over files that a test has damaged.
        if "--resume" not in args and written.is_file() and written.stat().st_mtime >= begun_at:
            check_schema(done.folder, metrics=ok)
            check_permissions(done.folder)
        said = f"exit code {done.code} from {command}\n{out[-3000:]}\n{err[-5000:]}"
        assert done.code == 0 or not ok, said
        return done

    return run


@pytest.fixture(scope="session")
def reference(script):
    """SAME_WORK in fp32 in one process, plain PyTorch, without accumulation."""
    run = script(*SAME_WORK, "--precision", "fp32", "--batch_size", "8")
    assert len(run.losses) == 10
    assert run.losses[-1] < run.losses[0] - 0.5  # it learns, so equal curves mean something
    return run


@pytest.fixture(scope="session")
def fp32_run(script, tmp_path_factory):
    """fp32_run(strategy): SAME_WORK on two ranks; each runs once for all tests that look at it.

    At the end it prints a sample, and the logits that the live model gives for the tokens 0 to 31
    go to `logits.pt`.
    """

    @functools.cache
    def run(strategy):
        folder = tmp_path_factory.mktemp(strategy)
        flags = "--precision fp32 --generate The --profile_memory --strategy".split()
        fault = {"FAULT": f"logits:{folder / 'logits.pt'}"}
        under = {"launcher": "torchrun", "ranks": 2, "program": FAULT, "env": fault}
        # Older releases of DeepSpeed lose them, and are refused.
        is_old = strategy == "offload" and Version(version("deepspeed")) < Version("0.19")
        split = SPLIT if is_old else FINE_SPLIT
        return script(*SAME_WORK, *split, *flags, strategy, **under, folder=folder)

    return run


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """Real English text, about 200 kB: part of the Python reference, one document."""
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "reference.txt"
    path.write_text("\n".join(topics[name] for name in sorted(topics))[:200_000], encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory) -> Path:
    """A folder with a byte-level tokenizer of 300 entries."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    folder, tokenizer = tmp_path_factory.mktemp("tokenizer"), ByteLevelBPETokenizer()
    text = ["the quick brown fox jumps over the lazy dog"]
    tokenizer.train_from_iterator(text, vocab_size=300, special_tokens=["<|end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<|end|>")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory, tiny_tokenizer) -> Path:
    """A small Llama checkpoint: grouped-query attention, untied embeddings, rotary, bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
        **{"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False},
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    shutil.copytree(tiny_tokenizer, folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def small_gpt2(tmp_path_factory, tiny_tokenizer) -> Path:
    """The configuration and tokenizer of a GPT-2 with 123,000 parameters, for runs in bf16: a CPU
    without bf16 instructions emulates them slowly.
    """
    from transformers import GPT2Config

    folder = tmp_path_factory.mktemp("small") / "small-gpt2"
    sizes = {"vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
    GPT2Config(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
    return shutil.copytree(tiny_tokenizer, folder, dirs_exist_ok=True)


def path_without(tmp_path, *names):
    """A PATH with every program but these."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for source in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in source.iterdir() if source.is_dir() else ():
            if not program.name.startswith(names) and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    return folder


def skip_without_libaio() -> None:
    """Skip a test that trains with infinity where libaio is missing."""
    if not Path("/usr/include/libaio.h").exists():
        skip("infinity needs libaio: apt install libaio-dev")


@pytest.fixture
def without_libaio(tmp_path_factory) -> dict:
    """An environment for a run: a compiler that cannot link libaio is what a machine without it
    looks like to DeepSpeed. The other ops are compiled.
    """
    from distributed_training.strategies.deepspeed import ops

    folder = tmp_path_factory.mktemp("without")
    without = '#!/bin/sh\ncase "$*" in *-laio*) exit 1;; esac\nexec /usr/bin/gcc "$@"\n'
    for name in ("gcc", "cc"):
        (folder / name).write_text(without)
        (folder / name).chmod(0o755)
    compiled = folder / ops.ops_folder().name
    compiled.mkdir()
    for op in ("cpu_adam", "pin_memory"):
        (compiled / f"{op}.so").symlink_to(ops.library(op))
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "CC": "gcc", "TORCH_EXTENSIONS_DIR": folder}


@pytest.fixture(scope="session")
def hub_root(tmp_path_factory) -> Path:
    """A folder with a small GPT-2 and a small WikiText, laid out as the hub has them."""
    from local_hub import write_repositories

    root = tmp_path_factory.mktemp("hub")
    write_repositories(root)
    return root


@pytest.fixture
def hub(hub_root):
    """A stand-in for the hub; `hub.url` goes into HF_ENDPOINT. `hub.close()` stops it early."""
    from local_hub import serving

    with serving(hub_root) as server:
        yield server


def skip_without(package: str, *programs: str) -> None:
    """Skip where a program is missing; `package` has it."""
    if missing := [name for name in programs if shutil.which(name) is None]:
        skip(f"needs {', '.join(missing)}: apt install {package}")


def running(cluster):
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def machines():
    """Three hosts of their own on this machine, see machines.py."""
    from machines import Machines

    skip_without("iproute2 util-linux", "ip", "unshare", "nsenter")
    if os.geteuid() != 0:
        skip("needs root to make network namespaces")
    yield from running(Machines(3))


@pytest.fixture(scope="session")
def slurm(machines):
    """A real Slurm with the first two machines as its nodes, stopped at the end."""
    from machines import Slurm

    skip_without("slurm-wlm munge", "munged", "slurmctld", "slurmd", "srun")
    yield from running(Slurm(machines))


@pytest.fixture
def disk(tmp_path):
    """disk(megabytes) mounts an empty file system of that size."""
    mounted = []

    def mount(megabytes: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
            skip("needs root to mount a small tmpfs")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> None:
    """Leave no block free on the file system of a folder."""
    with pytest.raises(OSError), open(folder / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def load_exported(folder):
    """The exported model in its own type, with a check that every weight was found."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def assert_close(values, reference, relative: float) -> None:
    """Two loss curves agree at every step."""
    assert len(values) == len(reference) > 0
    for step, (value, wanted) in enumerate(zip(values, reference, strict=True), 1):
        assert abs(value - wanted) <= relative * abs(wanted), f"step {step}"


def descendants_of_test() -> list[psutil.Process]:
    """Processes of the script that this test session started and that are still alive."""
    home, programs = os.environ["HF_HOME"], r"real_model_example\.py|fault\.py"
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if re.search(programs, " ".join(process.info["cmdline"] or []))
        and (process.info["environ"] or {}).get("HF_HOME") == home
    ]
