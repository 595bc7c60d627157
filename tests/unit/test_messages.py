"""An error of a library gets the advice that fits; secrets do not appear in messages."""

import pytest
from conftest import PROJECT

from support.errors import explain, redact

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
    ("PermissionError: [Errno 13] Permission denied: 'results.json'", "chmod"),
    ("OSError: [Errno 122] Disk quota exceeded: 'file'", "quota -s"),
    ("ModuleNotFoundError: No module named 'deepspeed'", "pip install deepspeed"),
]


@pytest.mark.parametrize("error, said", ERRORS)
def test_library_error_gets_advice(error, said):
    name, _, text = error.partition(": ")
    bold = f"{text}\x1b[0m\nand a second line"  # as torch marks some of its errors
    shown = str(explain(type(name, (Exception,), {})(bold)))
    assert said in shown and not {"\n", "\x1b"} & {*shown}


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
}


def test_secrets_are_redacted(monkeypatch):
    monkeypatch.setenv("MY_KEY", "the-canary-of-my-key")
    # A place, which is no secret.
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(PROJECT))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "https://huggingface.co/api")
    assert {text: redact(text) for text in REDACTED} == REDACTED
