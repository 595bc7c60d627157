"""Exceptions that end a run, exit codes, and what the user can do about a library's error.

Every exception becomes a `UserError` (see `explain`), whose text is one line without secrets.
"""

import contextlib
import functools
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

EXIT_COMPLETED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_OUT_OF_MEMORY = 3
EXIT_PREEMPTED = 75
Value = TypeVar("Value")


class UserError(Exception):
    """An error that is shown to the user; its text says what happened and what to do."""

    exit_code = EXIT_USAGE  # of the process
    status = "failed"  # as written to results.json
    kind: str | None = "usage"  # a short name of the class, for programs; None: not an error
    mark = "❌"  # begins the line on the console


class MissingRequirement(UserError):
    """A library, compiler or disk that the strategy needs is missing; another strategy may run."""

    kind = "missing_requirement"


class TrainingError(UserError):
    """A failure after a correct set-up, for example a loss that is not finite."""

    exit_code = EXIT_FAILED
    kind = "training"


class NotFinite(TrainingError):
    """The loss or the gradient of a step is not finite; all ranks raise it."""


class OutOfMemory(UserError):
    """Out of memory on the device."""

    on_host = False
    exit_code = EXIT_OUT_OF_MEMORY
    status = "oom"
    kind = "out_of_memory"


class HostOutOfMemory(OutOfMemory):
    """Out of host memory; on a CPU, the host is the device."""

    on_host = True


class Stopped(UserError):
    """A stop signal before the first step was complete: not a failure, and no step is lost."""

    exit_code = EXIT_PREEMPTED
    status = "preempted"
    kind = None
    mark = "⏸️ "

    @classmethod
    def by(cls, signal_name: str) -> "Stopped":
        """Return the error of a stop by a signal."""
        return cls(
            f"Stopped by {signal_name} before the first step was complete: nothing was saved. The "
            "same command starts again, with --resume from the checkpoint in its folder, if any."
        )


class StoppedBySignal(KeyboardInterrupt):
    """A signal that asks the run to end.

    Not a subclass of `Exception`: libraries catch those, and would continue.

    Args:
        name: name of the signal.
        loses_steps: whether the run has trained, and saves no checkpoints.
    """

    def __init__(self, name: str, loses_steps: bool):
        super().__init__(f"Stopped by {name}; if another rank failed first, its message is above.")
        self.name, self.loses_steps = name, loses_steps


class Preempted(Exception):
    """A stop after a request, with a checkpoint saved; all ranks raise it after the same step."""

    def __init__(self, model):
        super().__init__()
        self.model = model  # the wrapped model, which the caller must shut down


@dataclass
class FirstError:
    """The first error of several calls; after it, further calls do nothing.

    For a rank that writes files between collectives: the other ranks would wait for it if it raised
    an exception. It takes part in all collectives, and shares the error afterwards.
    """

    error: Exception | None = None

    def attempt(self, function, *args):
        """Call `function` unless an earlier call failed; return its result, or None."""
        if self.error is None:
            try:
                return function(*args)
            except Exception as error:
                self.error = error
        return None

    def __str__(self) -> str:
        return "" if self.error is None else str(explain(self.error))


def first_line(error: BaseException, longest: int | None = None) -> str:
    """Return the first line of an error message, without colors; if it is empty, the class name.

    After a line that ends with a colon, the next one is included.

    Args:
        longest: the largest number of characters; None: no limit.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()  # torch prints some words in bold
    lines = text.splitlines() or [type(error).__name__]
    announces = lines[0].endswith(":") and len(lines) > 1
    return (f"{lines[0]} {lines[1].strip()}" if announces else lines[0])[:longest].strip()


@contextlib.contextmanager
def refused_as(problem: str, longest: int | None = None) -> Iterator[None]:
    """Convert every exception of this context into a UserError: `problem`, and its first line.

    For libraries that raise a dozen classes: clients of the hub, and readers of a model's files.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{problem}: {first_line(error, longest)}") from error


# ----------------------------------------------------------------------------------------- secrets

HIDDEN = "***"
# Names of variables, JSON keys and parameters of URLs whose values are secrets: HF_TOKEN, GH_PAT,
# AWS_SECRET_ACCESS_KEY, api_key, X-Amz-Signature. They are searched in the name in upper case with
# underscores between its words.
SECRET_NAME = re.compile(
    r"TOKEN(?!IZER|S)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|CONNECTION_STRING|WEBHOOK|"
    r"(?<![^_])(KEY|PAT|PASS|SSHPASS|CREDS?|JWT|AUTH|AUTHORIZATION|SIG|SIGNATURE)(?![^_])|_PWD(?![^_])"
)
# Of these the values are no secrets: HF_TOKEN_PATH, SSH_AUTH_SOCK, key_padding, eos_token.
HARMLESS_NAME = re.compile(
    r"_(PATH|FILE|DIR|HOME|SOCK|NAME|TYPE|ALGORITHM|LENGTH|SIZE|COUNT|LIMIT|PADDING|MASK|TIMEOUT)$|"
    r"_PER_|^(BOS|EOS|PAD|UNK|SEP|CLS|MASK|IMAGE|AUDIO|VIDEO|SPECIAL|START|END|STOP)_TOKEN"
)
SHORTEST = 8  # characters; shorter values, such as "true", "1" and "gpt2", occur in every text
NUMBER = re.compile(r"[-+.,_\d]+")
# https://user:password@host
IN_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/?#'\"]*@", re.IGNORECASE)
URL_PARAMETER = re.compile(r"([?&#;])([\w.%-]+)=([^&#\s'\"<>]+)")
KNOWN_FORMS = re.compile(
    r"\b(?:(?:hf_|ghp_|gho_|ghs_|github_pat_)[A-Za-z0-9]{20,}|"
    r"(?:Bearer |sk-|glpat-)(?=[\w.-]*\d)[\w.-]{20,})"
)

_found_in_files: set[str] = set()  # secrets of configuration files, see `remember_secrets`


@functools.cache
def is_secret_name(name: str) -> bool:
    """Return whether a variable, key or parameter of this name holds a secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").replace(".", "_").upper()
    return bool(SECRET_NAME.search(words)) and not HARMLESS_NAME.search(words)


def _is_secret(value: str) -> bool:
    """Return whether the value of a secret name is one: long, no number, no path that exists."""
    is_path = os.path.isabs(value) and os.path.exists(value)
    return len(value) >= SHORTEST and not (NUMBER.fullmatch(value) or is_path)


def _secrets() -> list[str]:
    """Return the secrets that this process knows, the longest first: one may contain another."""
    values = {value for name, value in os.environ.items() if is_secret_name(name)}
    return sorted(filter(_is_secret, values | _found_in_files), key=len, reverse=True)


def remember_secrets(value: object) -> None:
    """Treat the values of secret keys in a configuration as secrets wherever they are written."""
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, str) and is_secret_name(str(key)):
                _found_in_files.add(item)
            remember_secrets(item)
    elif isinstance(value, list):
        for item in value:
            remember_secrets(item)


def _redact_parameter(found: re.Match) -> str:
    before, name, value = found.groups()
    return f"{before}{name}={HIDDEN if is_secret_name(name) else value}"


def redact(text: str) -> str:
    """Replace secrets in a text by ***.

    Secrets are credentials in URLs (`user:password@`, `?token=`), tokens of known forms, and the
    values of environment variables and keys of configuration files whose names are secret.
    """
    return _redact(text, _secrets())


def _redact(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    text = URL_PARAMETER.sub(_redact_parameter, IN_URL.sub(rf"\1{HIDDEN}@", text))
    return KNOWN_FORMS.sub(HIDDEN, text)


def redact_value(value: Value, hidden: str | None = HIDDEN) -> Value:
    """Replace secrets in all texts of a JSON value, and the values of keys with secret names.

    Args:
        hidden: the new value of such a key.
    """
    secrets = _secrets()

    def clean(key: object, item: object) -> object:
        if isinstance(item, dict):
            return {_clean_key(k): clean(k, v) for k, v in item.items()}
        if isinstance(item, list | tuple):
            return [clean(key, part) for part in item]
        if not isinstance(item, str):
            return item
        return hidden if is_secret_name(str(key)) and item else _redact(item, secrets)

    def _clean_key(key: object) -> object:
        return _redact(key, secrets) if isinstance(key, str) else key

    return cast(Value, clean(None, value))


def same_redacted(saved: object, current: object) -> bool:
    """Return whether two values are equal, of which secrets may have been replaced by ***.

    The replaced part may be any text: the secret of the saved value may have changed since.
    """
    if not (isinstance(saved, str) and isinstance(current, str)):
        return saved == current
    pattern = ".+".join(map(re.escape, redact(saved).split(HIDDEN)))
    return re.fullmatch(pattern, redact(current), re.DOTALL) is not None


# ------------------------------------------------------------------------------------------ advice


def explain(error: BaseException) -> UserError:
    """Convert any exception into the `UserError` that is shown to the user, without credentials.

    Returns:
        `error` itself if it is a `UserError`. Otherwise an error with the advice of `ADVICE`, or
        with the first line of the library's message.
    """
    if isinstance(error, UserError):
        shown = error
    elif isinstance(error, StoppedBySignal) and not error.loses_steps:
        shown = Stopped.by(error.name)
    elif isinstance(error, KeyboardInterrupt):
        shown = TrainingError(str(error) or "Interrupted before the end; nothing more was written.")
    else:
        text = f"{type(error).__name__}: {first_line(error) if str(error) else ''}"
        shown = look_up(error) or TrainingError(f"{text} (run again with --verbose to see where)")
    shown.args = (redact(str(shown)),)
    return shown


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Convert the errors of libraries for which ADVICE has a row; others stay themselves."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if known := look_up(error):
            raise known from error
        raise


LESS_MEMORY = (
    "Try a smaller --batch_size with more --gradient_accumulation_steps, "
    "--gradient_checkpointing, a shorter --seq_length, or a strategy that shards more "
    "(zero2, zero3, offload)."
)
# Matches errors of torch.distributed only: the hub's clients and wandb also have connections.
AMONG_RANKS = r"(?=.*([Gg]loo|NCCL|c10d|TCPStore|Dist\w+Error))"

# (regular expression that is searched in "TypeName: message", class of the error that is shown,
# what to do). The first row that matches is used. In the advice "{said}" is NCCL's last error or
# the first line of the library's message, "{where}" the file that it names, "{compiler}" the
# compiler's first error, "{port}" MASTER_PORT, and "{limit}" a sentence about `ulimit -v`, if it
# limits this process.
ADVICE: tuple[tuple[str, type[UserError], str], ...] = (
    (
        r"^(?!.*(cudaHostAlloc|pin_memory)).*(OutOfMemoryError|CUBLAS_STATUS_(ALLOC_FAILED|"
        r"NOT_INITIALIZED)|(CUDA|Cuda).*out of memory)",
        OutOfMemory,
        "Out of memory: {said}.",
    ),
    (
        r"^MemoryError|out of memory|[Cc]an(no|')t allocate memory|cudaHostAlloc|pin_memory.*error",
        HostOutOfMemory,
        "Out of memory: {said}.{limit}",
    ),
    (
        r"failed to map segment from shared object",
        MissingRequirement,
        "{said}: too little memory may be mapped, or its disk is mounted with noexec.{limit}",
    ),
    (
        r"can't start new thread|[Uu]nable to start \w* ?thread|pthread_create|"
        r"ThreadPoolBuildError|os error 11\)|^BlockingIOError.*Resource temporarily unavailable",
        TrainingError,
        "No new thread or process can be started ({said}): `ulimit -u` and a container's limit of "
        "pids limit their number. Raise the limit, or end other processes.",
    ),
    (
        r"File too large|os error 27\)",
        TrainingError,
        "A file would exceed the largest size that is allowed ({said}): run `ulimit -f unlimited` "
        "before the run, or use another file system. Complete checkpoints are unchanged.",
    ),
    (
        r"does not have a deterministic implementation",
        UserError,
        "{said}: this operation has no deterministic kernel, so run without --deterministic.",
    ),
    (
        r"Too many open files",
        TrainingError,
        "{said}: run `ulimit -n {files}` before the run, or in the job script.",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        TrainingError,
        "No space left on the device while writing {where}: free space (`df -h`, `quota -s`) or "
        "inodes (`df -i`), or set --output_dir, --cache_dir, --nvme_path or TMPDIR. If /dev/shm "
        "is full in a container: docker run --shm-size=8g. Complete checkpoints are unchanged.",
    ),
    (
        r"^PermissionError",
        UserError,
        "Permission denied for {where}: its owner can allow it with chmod (`ls -ld` shows the "
        "owner; `chmod -R a+rX FOLDER` lets everyone read), or name another file or folder.",
    ),
    (
        r"^ModuleNotFoundError: No module named '[a-z_]+'",
        MissingRequirement,
        "{said}: activate the project's environment (`source .venv/bin/activate`), or pip install "
        "-r requirements.txt. dp and fsdp need no deepspeed: pip install deepspeed adds the rest.",
    ),
    (
        r"^CUDAMismatchException|^MissingCUDAException|Error building extension|Ninja is required|"
        r"Unable to JIT load",
        MissingRequirement,
        "DeepSpeed could not compile one of its ops. The first error: {compiler}. `--check` lists "
        "what is missing; with a GPU also the CUDA toolkit of torch's CUDA version, at CUDA_HOME "
        "(module load cuda on a cluster). dp and fsdp need no compiler.",
    ),
    (
        r"EADDRINUSE|[Aa]ddress already in use",
        TrainingError,
        "Port {port} on this host is in use, usually by another run: end it, or choose another "
        "port (--master_port=29501 of torchrun or deepspeed, or MASTER_PORT).",
    ),
    (
        r"Unable to find (address|interface) for|no socket interface found|connect\(\) failed|"
        r"client socket has (failed|timed out)|ncclRemoteError|remote process has exited|"
        + AMONG_RANKS
        + r".*(Connection (refused|reset|closed)|Broken pipe)",
        TrainingError,
        "The connection to another rank failed. Look for its message on its host; without one it "
        "was killed, usually because the memory was full (`dmesg | grep -i oom`). If it runs, set "
        "NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME on CPUs) to a network of all hosts. ({said})",
    ),
    (
        r"[Ww]atchdog.*(timeout|timed out)|" + AMONG_RANKS + r".*([Tt]imed out|[Tt]imeout)",
        TrainingError,
        "A collective took longer than --ddp_timeout: one rank is much slower than the others, or "
        "stopped. Check its output and the load of its host, or increase --ddp_timeout. ({said})",
    ),
    (
        r"DistBackendError|NCCL error|nccl\w+Error",
        TrainingError,
        "NCCL failed: {said}. `NCCL_DEBUG=INFO` shows what it tried; NCCL_SOCKET_IFNAME chooses "
        "a network, NCCL_IB_DISABLE=1 disables InfiniBand, NCCL_P2P_DISABLE=1 copies between GPUs.",
    ),
    (
        r"CUDA driver version is insufficient|driver on your system is too old|"
        r"no kernel image is available|forward compatibility was attempted",
        MissingRequirement,
        "This GPU, its driver and this build of torch are incompatible: {said}. `nvidia-smi` shows "
        "the driver's CUDA version: install a torch for it.",
    ),
)
# In the output of a build. Later errors are usually consequences of the first.
COMPILER_ERROR = r"^(?!Error building).*(error:|cannot find|undefined reference|No such file).*$"

# In an error of NCCL, the first line of which is its general class ("unhandled system error").
NCCL_CAUSE = r"\nLast error:[ \t]*\n?[ \t]*(\S.*)"


def _memory_limit() -> str:
    """Return a sentence about the limit of this process's address space; "" without a limit."""
    size = resource.getrlimit(resource.RLIMIT_AS)[0]
    if size == resource.RLIM_INFINITY:
        return ""
    return f" `ulimit -v` limits each process to {size / 2**30:.1f} GB: raise it."


def most_open_files() -> int:
    """Return how many open files to allow: 65,536, or the hard limit, which only root can raise."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)


def look_up(error: BaseException) -> UserError | None:
    """Return a new error with the advice of the first row of ADVICE that matches, or None."""
    text, cause = f"{type(error).__name__}: {error}", re.search(NCCL_CAUSE, str(error))
    said = (cause[1].strip() if cause else first_line(error)).rstrip(".")
    for words, kind, advice in ADVICE:
        if re.search(words, text, re.DOTALL):
            compiler = re.search(COMPILER_ERROR, str(error), re.MULTILINE)
            return kind(
                advice.format(
                    said=said,
                    where=getattr(error, "filename", None) or "a file",
                    compiler=compiler[0].strip() if compiler else said,
                    port=os.environ.get("MASTER_PORT", "29500"),
                    limit=_memory_limit(),
                    files=most_open_files(),
                )
            )
    return None
