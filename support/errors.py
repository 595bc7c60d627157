"""Exceptions that end a run, and the exit codes that other programs read.

Every exception becomes a `UserError` (see `explain`), whose text is one line for the user.
"""

from __future__ import annotations

from support.redaction import redact

EXIT_COMPLETED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_OUT_OF_MEMORY = 3
EXIT_PREEMPTED = 75


class UserError(Exception):
    """An error that is shown to the user; its text says what happened and what to do.

    Attributes:
        exit_code: of the process.
        status: as written to results.json.
        kind: a short name of the class, for programs.
    """

    exit_code = EXIT_USAGE
    status = "failed"
    kind = "usage"


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
    """A stop after a request, with a checkpoint saved; all ranks raise it after the same step.

    Attributes:
        engine: the wrapped model, which the caller must shut down.
    """

    def __init__(self, engine):
        super().__init__()
        self.engine = engine


class FirstError:
    """The first error of several calls; after it, further calls do nothing.

    For a rank that writes files between collectives. If it raised an exception, the other ranks
    would wait for it in their next collective. Instead it takes part in all collectives, and the
    error is shared with all ranks afterwards.

    Attributes:
        error: the exception of the first function that failed, or None.
    """

    def __init__(self):
        self.error: Exception | None = None

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


def explain(error: BaseException) -> UserError:
    """Convert any exception into the `UserError` that is shown to the user.

    Args:
        error: an exception of this project or of a library.
    Returns:
        `error` itself if it is a `UserError`. Otherwise an error with the advice of
        support/advice.py, or with the first line of the library's message. Credentials in the text
        are replaced (see support/redaction.py), also in `error` itself.
    """
    user_error = _explained(error)
    user_error.args = (redact(str(user_error)),)
    return user_error


def _explained(error: BaseException) -> UserError:
    from support import advice  # not at the top: it imports the classes above

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
        return TrainingError("Interrupted: stopped before the end; nothing more was written.")
    if advised := advice.look_up(error):
        return advised
    text = lines[0].strip() if lines else ""
    return TrainingError(f"{name}: {text} (run again with --verbose to see where)")
