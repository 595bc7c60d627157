"""How a run ends when something is wrong: one clear line and an exit code that means something."""

from __future__ import annotations

EXIT_COMPLETED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_OUT_OF_MEMORY = 3
EXIT_PREEMPTED = 75

OUT_OF_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "Cannot allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


LESS_MEMORY = ("Try a smaller --batch_size with more --gradient_accumulation_steps, --gradient_checkpointing, a shorter "
               "--seq_length, or a strategy that shards more (zero2, zero3, offload).")  # fmt: skip


class UserError(Exception):
    """Something the user can put right. Its text is the one line that says what to do."""

    exit_code = EXIT_USAGE
    status = "failed"
    kind = "usage"


class MissingRequirement(UserError):
    """This machine lacks what the strategy needs: a library, a compiler, a suitable disk. Another strategy may run."""

    kind = "missing_requirement"


class TrainingError(UserError):
    """The run was set up rightly but cannot go on, for example because the loss is no longer finite."""

    exit_code = EXIT_FAILED
    kind = "training"


class OutOfMemory(UserError):
    """The device or the host had no memory left."""

    exit_code = EXIT_OUT_OF_MEMORY
    status = "oom"
    kind = "out_of_memory"


class Preempted(Exception):
    """The run was asked to stop, and has saved a checkpoint; all ranks raise it after the same step.

    Attributes:
        engine: what must be taken down.
    """

    def __init__(self, engine):
        super().__init__()
        self.engine = engine


def explain(error: BaseException) -> UserError:
    """Turn any exception into the error that is shown: the library's first line, or what to do about it.

    Args:
        error: what was raised, by this project or by a library.
    Returns:
        The error itself if it is already one of ours, else one with a message of a single line.
    """
    if isinstance(error, UserError):
        return error
    name, lines = type(error).__name__, str(error).strip().splitlines()
    if name == "ValidationError" and hasattr(error, "errors"):  # pydantic's, of DeepSpeed's configuration
        first = error.errors()[0]
        return UserError(f"DeepSpeed configuration: {'.'.join(map(str, first['loc']))}: {first['msg']}.")
    text = lines[0].strip() if lines else ""
    # CUDA raises torch.OutOfMemoryError; the CPU allocator raises a RuntimeError whose text is all there is to go by.
    if name == "OutOfMemoryError" or isinstance(error, MemoryError) or any(sign in str(error) for sign in OUT_OF_MEMORY_SIGNS):
        return OutOfMemory(f"Out of memory: {text or name}. {LESS_MEMORY}")
    if isinstance(error, ModuleNotFoundError) and error.name == "deepspeed":
        return MissingRequirement("This strategy needs DeepSpeed: pip install deepspeed. dp and fsdp run without it.")
    if name in ("MissingCUDAException", "CUDAMismatchException"):  # DeepSpeed's builder, before it compiles an op
        return MissingRequirement(
            "This strategy compiles a DeepSpeed op with the CUDA toolkit of torch's CUDA version, which was not found: install "
            f"it, or set CUDA_HOME (module load cuda on a cluster). DeepSpeed says: {text}"
        )
    if isinstance(error, KeyboardInterrupt):
        return TrainingError("Interrupted: stopped before the end; nothing more was written.")
    if "No space left on device" in str(error) or "Disk quota exceeded" in str(error):  # safetensors raises no OSError
        where = getattr(error, "filename", None) or "a file"
        return TrainingError(f"No space left on the device while writing {where}: free some space. Checkpoints that were "
                             "complete before are untouched.")  # fmt: skip
    return TrainingError(f"{name}: {text} (run again with --verbose to see where)")
