"""Exceptions that end a run, exit codes, and what the user can do about a library's error.

Every exception becomes a `UserError` (see `explain`), whose text is one line for the user.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from support.redaction import redact

EXIT_COMPLETED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_OUT_OF_MEMORY = 3
EXIT_PREEMPTED = 75


class UserError(Exception):
    """An error that is shown to the user; its text says what happened and what to do."""

    exit_code = EXIT_USAGE  # of the process
    status = "failed"  # as written to results.json
    kind = "usage"  # a short name of the class, for programs


class MissingRequirement(UserError):
    """A library, compiler or disk that the strategy needs is missing; another strategy may run."""

    kind = "missing_requirement"


class TrainingError(UserError):
    """A failure after a correct set-up, for example a loss that is not finite."""

    exit_code = EXIT_FAILED
    kind = "training"


class OutOfMemory(UserError):
    """Out of memory on the device."""

    on_host = False

    exit_code = EXIT_OUT_OF_MEMORY
    status = "oom"
    kind = "out_of_memory"


class HostOutOfMemory(OutOfMemory):
    """Out of host memory; on a CPU, the host is the device."""

    on_host = True


class StoppedBySignal(KeyboardInterrupt):
    """A signal that asks the run to end.

    Not a subclass of `Exception`: libraries catch those, and would continue.
    """


class Preempted(Exception):
    """A stop after a request, with a checkpoint saved; all ranks raise it after the same step."""

    def __init__(self, engine):
        super().__init__()
        self.engine = engine  # the wrapped model, which the caller must shut down


@dataclass
class FirstError:
    """The first error of several calls; after it, further calls do nothing.

    For a rank that writes files between collectives. If it raised an exception, the other ranks
    would wait for it in their next collective. Instead it takes part in all collectives, and the
    error is shared with all ranks afterwards.
    """

    error: Exception | None = None

    def attempt(self, function, *args):
        """Call `function` unless an earlier call failed.

        Returns:
            The function's result; None if it failed or was not called.
        """
        if self.error is None:
            try:
                return function(*args)
            except Exception as error:
                self.error = error
        return None

    def __str__(self) -> str:
        return "" if self.error is None else str(explain(self.error))


def first_line(error: BaseException, longest: int | None = None) -> str:
    """Return the first line of an error message, or the class name if it is empty.

    Args:
        longest: the largest number of characters; None: no limit.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:longest]


@contextlib.contextmanager
def refused_as(problem: str, longest: int | None = None) -> Iterator[None]:
    """Convert every exception of this context into a UserError: `problem`, and its first line.

    For libraries that raise a dozen classes: the clients of the hub, and those that read a model's
    files, whose values transformers passes to constructors unchecked.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{problem}: {first_line(error, longest)}") from error


def explain(error: BaseException) -> UserError:
    """Convert any exception into the `UserError` that is shown to the user.

    Returns:
        `error` itself if it is a `UserError`. Otherwise an error with the advice of `TABLE`, or
        with the first line of the library's message. Credentials in the text
        are replaced (see support/redaction.py), also in `error` itself.
    """
    user_error = _explained(error)
    user_error.args = (redact(str(user_error)),)
    return user_error


def _explained(error: BaseException) -> UserError:
    if isinstance(error, UserError):
        return error
    name, lines = type(error).__name__, str(error).strip().splitlines()
    # pydantic's ValidationError, raised for DeepSpeed's configuration
    if name == "ValidationError" and hasattr(error, "errors"):
        detail = error.errors()[0]
        return UserError(
            f"DeepSpeed configuration: {'.'.join(map(str, detail['loc']))}: {detail['msg']}."
        )
    if isinstance(error, StoppedBySignal):
        return TrainingError(str(error))
    if isinstance(error, KeyboardInterrupt):
        return TrainingError("Interrupted before the end; nothing more was written.")
    if advised := look_up(error):
        return advised
    text = lines[0].strip() if lines else ""
    return TrainingError(f"{name}: {text} (run again with --verbose to see where)")


# ------------------------------------------------------------------------ errors of libraries


LESS_MEMORY = (
    "Try a smaller --batch_size with more --gradient_accumulation_steps, "
    "--gradient_checkpointing, a shorter --seq_length, or a strategy that shards more "
    "(zero2, zero3, offload)."
)


@dataclass(frozen=True)
class Entry:
    """One kind of failure."""

    words: str  # a regular expression that is searched in "TypeName: message"
    kind: type[UserError]  # class of the error that is shown
    # What the error means and what to try next. Placeholders: "{said}" is the first line of the
    # library's message, "{where}" the file that it names, "{compiler}" the compiler's first error,
    # "{port}" MASTER_PORT.
    advice: str


# Matches errors of torch.distributed only: the hub's clients and wandb also have connections.
AMONG_RANKS = r"(?=.*([Gg]loo|NCCL|c10d|TCPStore|Dist\w+Error))"

# The first entry that matches is used, so special entries come before general ones.
TABLE = (
    Entry(
        r"^MemoryError|cudaHostAlloc|pin_memory.*(memory|error)|[Cc]an't allocate memory|"
        r"Cannot allocate memory",
        HostOutOfMemory,
        "Out of memory: {said}.",
    ),
    Entry(
        r"OutOfMemoryError|CUDA out of memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|"
        r"CUDA (driver )?error: out of memory|Cuda failure.*out of memory",
        OutOfMemory,
        "Out of memory: {said}.",
    ),
    Entry(r"out of memory", HostOutOfMemory, "Out of memory: {said}."),
    Entry(
        r"does not have a deterministic implementation",
        UserError,
        "{said}: no kernel of this operation for this device is deterministic, so run without "
        "--deterministic.",
    ),
    Entry(
        r"Too many open files",
        TrainingError,
        "{said}: run `ulimit -n 65536` before the run, or in the job script.",
    ),
    Entry(
        r"No space left on device|Disk quota exceeded",
        TrainingError,
        "No space left on the device while writing {where}: free some space (`df -h`, `quota -s`), "
        "or name another folder with --output_dir, --cache_dir, --nvme_path or TMPDIR. "
        "/dev/shm, through which the ranks of a host share data, is enlarged in a container by "
        "docker run --shm-size=8g. Complete checkpoints are unchanged.",
    ),
    Entry(
        r"^ModuleNotFoundError: No module named '(torch|transformers|tokenizers|safetensors|numpy|"
        r"huggingface_hub|accelerate|datasets|pyarrow|psutil|yaml|tqdm|jinja2|packaging|deepspeed)'",
        MissingRequirement,
        "{said}: activate the project's environment (`source .venv/bin/activate`), or install the "
        "packages into yours (`pip install -r requirements.txt`). dp and fsdp need no deepspeed: "
        "without it, pip install deepspeed adds the other strategies.",
    ),
    Entry(
        r"^(MissingCUDAException|CUDAMismatchException)",
        MissingRequirement,
        "This strategy compiles a DeepSpeed op with the CUDA toolkit of torch's CUDA version, "
        "which was not found: install it, or set CUDA_HOME (module load cuda on a cluster). "
        "DeepSpeed's message: {said}",
    ),
    Entry(
        r"Error building extension|Ninja is required|Unable to JIT load",
        MissingRequirement,
        "DeepSpeed could not compile one of its ops. The compiler's first error: {compiler}. "
        "`--check` lists what is missing; dp and fsdp need no compiler.",
    ),
    Entry(
        r"EADDRINUSE|[Aa]ddress already in use",
        TrainingError,
        "Port {port} on this host is in use, usually by another run: choose another port "
        "(torchrun --master_port=29501, deepspeed --master_port=29501, or MASTER_PORT), "
        "or end the other run.",
    ),
    Entry(
        r"Unable to find (address|interface) for|no socket interface found|"
        + AMONG_RANKS
        + r".*(Connection refused|ECONNREFUSED)|connect\(\) failed|"
        r"client socket has (failed|timed out)",
        TrainingError,
        "A rank could not connect to another one: that rank has ended, listens on another network, "
        "or is behind a firewall. Look for its message on the other hosts. `ip addr` lists the "
        "networks of a host: set NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME on CPUs) to one that all "
        "hosts have, or unset it. ({said})",
    ),
    Entry(
        AMONG_RANKS + r".*(Connection (reset|closed) by peer|Broken pipe)|"
        r"remote process has exited|ncclRemoteError",
        TrainingError,
        "The connection to another rank was lost because that rank ended. Look for its message on "
        "its host. Without a message it was killed, usually by the kernel because the host's "
        "memory was full (`dmesg | grep -i oom`), or by the scheduler. ({said})",
    ),
    Entry(
        r"(Watchdog|watchdog).*(timeout|timed out)|"
        + AMONG_RANKS
        + r".*([Tt]imed out|wait timeout after|Timeout)",
        TrainingError,
        "A collective took longer than --ddp_timeout: one rank is much slower than the others, or "
        "has stopped. Check its output and the load of its host. If the first load is slow, "
        "increase --ddp_timeout. TORCH_DISTRIBUTED_DEBUG=DETAIL names the collective that does "
        "not match. ({said})",
    ),
    Entry(
        r"DistBackendError|NCCL error|ncclSystemError|ncclInternalError|ncclUnhandledCudaError",
        TrainingError,
        "NCCL failed: {said}. `NCCL_DEBUG=INFO` shows what it tried; NCCL_SOCKET_IFNAME chooses "
        "the network, NCCL_IB_DISABLE=1 leaves InfiniBand out, NCCL_P2P_DISABLE=1 direct copies "
        "between GPUs. `--check` under the same launcher tests it in seconds.",
    ),
    Entry(
        r"CUDA driver version is insufficient|no kernel image is available|"
        r"forward compatibility was attempted",
        MissingRequirement,
        "This GPU, its driver and this build of torch are incompatible: {said}. Compare "
        "`nvidia-smi` with torch.version.cuda (`--check` shows both), "
        "and install a torch for that CUDA version.",
    ),
)


def look_up(error: BaseException) -> UserError | None:
    """Look up the error to show for a library's exception.

    Returns:
        A new error with the advice of the first entry that matches, or None.
    """
    name, text = type(error).__name__, str(error).strip()
    lines = text.splitlines()
    said = lines[0].strip() if lines else name
    for entry in TABLE:
        if re.search(entry.words, f"{name}: {text}", re.DOTALL):
            where = getattr(error, "filename", None)
            placeholders = {
                "said": said.rstrip("."),
                "where": where or ("{where}" in entry.advice and full_disk()) or "a file",
                "compiler": compiler_error(lines) or said,
                "port": os.environ.get("MASTER_PORT", "29500"),
            }
            return entry.kind(entry.advice.format(**placeholders))
    return None


def compiler_error(lines: list[str]) -> str | None:
    """Return the first line of a build's output that reports an error of a compiler or linker.

    Later errors are usually consequences of the first. None if no line reports an error.
    """
    complaint = r"(fatal )?error:|cannot find|undefined reference|not found|No such file"
    matches = (line for line in lines if re.search(complaint, line))
    return next((line.strip() for line in matches if not line.startswith("Error building")), None)


def full_disk() -> str | None:
    """Return a full disk among the folders that libraries use without naming them, or None."""
    for name, folder in (
        ("TMPDIR", tempfile.gettempdir()),
        ("shared memory", "/dev/shm"),
        ("the current folder", "."),
    ):
        with contextlib.suppress(OSError):
            if shutil.disk_usage(folder).free < 2**20:
                return f"{folder} ({name})"
    return None
