"""An error of a library gets the advice that fits."""

import pytest

from support.errors import explain

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
    ("OSError: [Errno 122] Disk quota exceeded: 'file'", "quota -s"),
    ("ModuleNotFoundError: No module named 'deepspeed'", "pip install deepspeed"),
]


def test_an_error_of_torch_is_shown_without_its_bold_letters():
    shown = str(explain(RuntimeError("\x1b[1mtensor\x1b[0m is on cpu\nand a second line")))
    assert "tensor is on cpu" in shown and "\x1b" not in shown and "second" not in shown


@pytest.mark.parametrize("error, said", ERRORS)
def test_library_error_gets_advice(error, said):
    name, _, text = error.partition(": ")
    shown = str(explain(type(name, (Exception,), {})(text)))
    assert said in shown and "\n" not in shown


@pytest.mark.parametrize(
    "text, on_host",
    [
        ("CUDA error: out of memory; cudaHostAlloc(&ptr, size, flags) failed", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory", True),
    ],
)
def test_whose_memory_is_out(text, on_host):
    error = explain(RuntimeError(text))
    assert error.on_host == on_host and "Out of memory" in str(error)
