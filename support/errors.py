"""How a run ends when something is wrong: one clear line and an exit code that means something."""

from __future__ import annotations

from support.redaction import redact

EXIT_COMPLETED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_OUT_OF_MEMORY = 3
EXIT_PREEMPTED = 75


class UserError(Exception):
    """Something the user can put right. Its text is the one line that says what to do."""

    exit_code = EXIT_USAGE
    status = "failed"
    kind = "usage"


class MissingRequirement(UserError):
    """This machine lacks what the strategy needs: a library, a compiler, a suitable disk. Another
    strategy may run.
    """

    kind = "missing_requirement"


class TrainingError(UserError):
    """The run was set up rightly but cannot go on, for example because the loss is no longer
    finite.
    """

    exit_code = EXIT_FAILED
    kind = "training"


class OutOfMemory(UserError):
    """The device had no memory left."""

    on_host = False

    exit_code = EXIT_OUT_OF_MEMORY
    status = "oom"
    kind = "out_of_memory"


class HostOutOfMemory(OutOfMemory):
    """The host had no memory left; on a CPU it is the device."""

    on_host = True


class StoppedBySignal(KeyboardInterrupt):
    """A signal asks the run to end. No `Exception`: libraries catch those, and would continue as if
    nothing had happened.
    """


class Preempted(Exception):
    """The run was asked to stop, and has saved a checkpoint; all ranks raise it after the same
    step.

    Attributes:
        engine: what must be taken down.
    """

    def __init__(self, engine):
        super().__init__()
        self.engine = engine


class FirstError:
    """Calls functions until one fails, and then calls no more: for a rank that writes while all
    ranks communicate.

    If it raised, the others would wait for it in their next collective. So it takes part to the
    end, and then all ranks learn of the error.

    Attributes:
        error: what the first function that failed raised; None so far.
    """

    def __init__(self):
        self.error: Exception | None = None

    def attempt(self, function, *args):
        """The function's result; None if it fails, or another one has failed before."""
        if self.error is None:
            try:
                return function(*args)
            except Exception as error:
                self.error = error
        return None

    def __str__(self) -> str:
        return "" if self.error is None else str(explain(self.error))


def explain(error: BaseException) -> UserError:
    """Turn any exception into the error that is shown: what it means and what to do, or the
    library's first line.

    Args:
        error: what was raised, by this project or by a library.
    Returns:
        The error itself if it is already one of ours, else one with a message of a single line;
        without secrets.
    """
    shown = _explained(error)
    shown.args = (redact(str(shown)),)
    return shown


def _explained(error: BaseException) -> UserError:
    from support import advice  # it needs the classes above

    if isinstance(error, UserError):
        return error
    name, lines = type(error).__name__, str(error).strip().splitlines()
    if name == "ValidationError" and hasattr(
        error, "errors"
    ):  # pydantic's, of DeepSpeed's configuration
        first = error.errors()[0]
        return UserError(
            f"DeepSpeed configuration: {'.'.join(map(str, first['loc']))}: {first['msg']}."
        )
    if isinstance(error, StoppedBySignal):
        return TrainingError(str(error))
    if isinstance(error, KeyboardInterrupt):
        return TrainingError("Interrupted: stopped before the end; nothing more was written.")
    if known := advice.look_up(error):
        return known
    text = lines[0].strip() if lines else ""
    return TrainingError(f"{name}: {text} (run again with --verbose to see where)")
