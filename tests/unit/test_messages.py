"""An error of a library gets the advice that fits; secrets do not appear in messages; lines of a
program are shown when it prints them.
"""

import json
import sys

import pytest
from conftest import PROJECT

from distributed_training import console
from distributed_training.console import visible
from distributed_training.errors import (
    UserError,
    explain,
    is_secret_name,
    redact,
    redact_value,
    remember_secrets,
    same_redacted,
)
from distributed_training.files.user_files import read_user_json
from distributed_training.programs import exit_code_of, run_program

# Errors that this machine cannot cause, each with a word of the advice that is shown.
GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc]"
ERRORS = [
    ("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970", "NCCL_DEBUG"),
    ("DistBackendError: Watchdog caught collective operation timeout", "--ddp_timeout"),
    (f"{GLOO} Timed out waiting 4000ms for recv operation", "--ddp_timeout"),
    (f"{GLOO} Connection closed by peer [10.0.0.2]:47", "dmesg"),
    ("RuntimeError: TCPStore: connect() failed: Connection refused", "NCCL_SOCKET_IFNAME"),
    ("RuntimeError: CUDA driver version is insufficient for CUDA runtime version", "nvidia-smi"),
    ("MissingCUDAException: CUDA_HOME does not exist, unable to compile CUDA op(s)", "CUDA_HOME"),
    ("RuntimeError: can't start new thread", "ulimit -u"),
    ("OSError: [Errno 27] File too large: 'train.bin'", "ulimit -f"),
    ("SafetensorError: Error while serializing: I/O error: File too large (os error 27)", "ulimit"),
    ("PermissionError: [Errno 13] Permission denied: 'results.json'", "chmod"),
    ("OSError: [Errno 28] No space left on device: 'file'", "df -i"),
    ("OSError: [Errno 122] Disk quota exceeded: 'file'", "quota -s"),
    ("ModuleNotFoundError: No module named 'deepspeed'", "pip install deepspeed"),
]


@pytest.mark.parametrize("error, said", ERRORS)
def test_library_error_gets_advice(error, said):
    name, _, text = error.partition(": ")
    bold = f"{text}\x1b[0m\nand a second line"  # as torch marks some of its errors
    shown = str(explain(type(name, (Exception,), {})(bold)))
    assert said in shown and not {"\n", "\x1b"} & {*shown}


SYSTEM_ERROR = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled \
system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
{cause}"""


@pytest.mark.parametrize(
    "cause, said",
    [
        ("Error while creating shared memory segment /dev/shm/nccl-b (size 9637888)\n", "nccl-b"),
        ("Cuda failure 2 'out of memory'", "Out of memory: Cuda failure 2"),
        ("", "unhandled system error"),
    ],
)
def test_cause_of_an_error_of_nccl_is_shown(cause, said):
    error = type("DistBackendError", (RuntimeError,), {})(SYSTEM_ERROR.format(cause=cause))
    shown = str(explain(error))
    assert said in shown and "\n" not in shown and ("unhandled" in shown) == (not cause)


@pytest.mark.parametrize(
    "text, on_host",
    [
        ("CUDA error: out of memory; cudaHostAlloc(&ptr, size, flags) failed", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory", True),
    ],
)
def test_out_of_memory_errors_tell_host_from_gpu_memory(text, on_host):
    error = explain(RuntimeError(text))
    assert error.on_host == on_host and "Out of memory" in str(error)


REDACTED = {
    "https://user:canary@host/path": "https://***@host/path",
    "two http://a:canary@x and socks5h://b:canary@y": "two http://***@x and socks5h://***@y",
    "https://huggingface.co/api": "https://huggingface.co/api",
    "token=hf_CANARYcanaryCANARYcanary": "token=***",
    "the value the-canary-of-my-key!": "the value ***!",
    f"{PROJECT}/runs cannot be written": f"{PROJECT}/runs cannot be written",
    "https://host/a?token=canary&n=1#x": "https://host/a?token=***&n=1#x",
    "https://host/a?X-Amz-Signature=canary": "https://host/a?X-Amz-Signature=***",
    "https://host/a?max_tokens=12&key_padding=1": "https://host/a?max_tokens=12&key_padding=1",
    "ghp_CANARYcanaryCANARYcanary": "***",
    "Authorization: Bearer canaryCANARY1234567890": "Authorization: ***",
    "sk-proj-canary_CANARY-1234567890": "***",
    "https://host/#access_token=canary": "https://host/#access_token=***",
    "runs/sk-learn-models-of-the-first-experiment": "runs/sk-learn-models-of-the-first-experiment",
    "hf_models_of_the_first_experiment": "hf_models_of_the_first_experiment",
    "step 12345678 of gpt2, true": "step 12345678 of gpt2, true",
}
SECRET = """
    GH_PAT AZURE_CREDS HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY DB_PASSWORD MYSQL_PWD PGPASSWORD
    REGISTRY_AUTH api_key apiKey token access-token experiment.api_key GOOGLE_CREDENTIALS
    """.split()
HARMLESS = """
    tokens tokens_per_second key_padding eos_token pad_token HF_TOKEN_PATH TOKENIZERS_PARALLELISM
    PATH PWD OLDPWD SSH_AUTH_SOCK XAUTHORITY GIT_AUTHOR_NAME MAX_TOKENS keyboard compatible monkey
    """.split()


def test_secrets_are_redacted(monkeypatch):
    monkeypatch.setenv("MY_KEY", "the-canary-of-my-key")
    # A place, which is no secret.
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(PROJECT))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "https://huggingface.co/api")
    for name, value in {"A_TOKEN": "gpt2", "B_KEY": "true", "C_TOKEN": "12345678"}.items():
        monkeypatch.setenv(name, value)
    assert {text: redact(text) for text in REDACTED} == REDACTED


def test_names_of_secrets():
    assert [name for name in SECRET + HARMLESS if is_secret_name(name)] == SECRET


def test_a_json_value_without_secrets(monkeypatch):
    monkeypatch.setenv("GH_PAT", "the canary")
    value = {
        "tokens": 12345678,
        "eos_token": "</s>",
        "comet": {"api_key": "short", "project": "x", "names": ["a", "of the canary"]},
        "the canary": None,
    }
    cleaned = {**value, "comet": {"api_key": None, "project": "x", "names": ["a", "of ***"]}}
    cleaned["***"] = cleaned.pop("the canary")
    assert redact_value(value, hidden=None) == cleaned


def test_secrets_of_a_configuration_are_hidden_everywhere(monkeypatch):
    monkeypatch.setattr("distributed_training.errors._found_in_files", set())
    remember_secrets({"trackers": [{"api_key": "from-a-file", "project": "my-project"}]})
    assert redact("from-a-file to my-project") == "*** to my-project"


def test_names_in_an_index_of_weights_are_no_secrets(tmp_path):
    """Names of parameters contain "key", which is also a name of secrets."""
    shard = "model-00001-of-00002.safetensors"
    for name in ("attention.query_key_value.weight", "self.key.weight"):
        (tmp_path / "index.json").write_text(json.dumps({name: shard}))
        read_user_json("The index", str(tmp_path / "index.json"))
    assert redact(shard) == shard


@pytest.mark.parametrize(
    "saved, current, same",
    [
        ("/data/the-canary/m", "/data/the-canary/m", True),  # of a version that wrote secrets
        ("/data/***/m", "/data/the-canary/m", True),
        ("/data/***/m", "/data/an-earlier-canary/m", True),
        ("/data/***/m", "/data/the-canary/n", False),
        ("/data/m.x", "/data/mxx", False),
        (8, 8, True),
        (None, "x", False),
    ],
)
def test_a_signature_is_compared_without_secrets(monkeypatch, saved, current, same):
    monkeypatch.setenv("GH_PAT", "the-canary")
    assert same_redacted(saved, current) == same


def test_out_of_memory_names_the_limit_of_the_shell(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (3 << 30, 3 << 30))
    shown = explain(MemoryError())
    assert "`ulimit -v` limits each process to 3.0 GB" in str(shown) and shown.exit_code == 3


def test_lines_of_a_program_arrive_while_it_runs(tmp_path):
    go, received = tmp_path / "go", []
    program = f"""
import pathlib, sys, time
print("compiling", flush=True)
end = time.monotonic() + 10
while not pathlib.Path({str(go)!r}).exists():
    if time.monotonic() > end:
        sys.exit("the line was not received")
    time.sleep(0.01)
print("compiled")
"""

    def receive(line: str) -> None:
        received.append(line)
        go.touch()

    code, output = run_program([sys.executable, "-c", program], on_line=receive)
    assert (code, output) == (0, "compiling\ncompiled\n")
    assert received == output.splitlines()


# Each with what a terminal would do; a page of HTML obeys the last ones, too.
CONTROLS = {
    "\x1b[8mhidden": "\\x1b[8mhidden",
    "\x9b31mred": "\\x9b31mred",  # the C1 form of ESC [
    "good\rbad": "good\\rbad",
    "a\x7f\b\0": "a\\x7f\\x08\\x00",
    "\u202eabc\u2066d": "\\u202eabc\\u2066d",
    "se\u200bcret\u00ad\ufeff": "se\\u200bcret\\xad\\ufeff",
    "\U000e0041\u2028\ud800": "\\U000e0041\\u2028\\ud800",
}


@pytest.mark.parametrize("text, shown", CONTROLS.items())
def test_characters_that_control_a_terminal_are_shown(text, shown, capsys):
    assert visible(text) == shown
    console.write(f"a row: {text}")

    def fail():
        raise UserError(f"the row {text} is bad")

    exit_code_of(fail)
    out, err = capsys.readouterr()
    assert shown in out and shown in err and text not in out + err


def test_other_text_is_shown_as_it_is():
    text = "Zürich, 東京\u3000の 👍 d\u00e9j\u00e0\u00a0vu \\n\n\tindented"
    assert visible(text) == text
