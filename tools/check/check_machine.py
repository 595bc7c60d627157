"""--check: the software, the GPU and the limits of this machine, and the hub."""

import importlib.util
import os
import resource

import torch

from distributed_training.errors import UserError, most_open_files, redact
from distributed_training.process import versions
from distributed_training.ranks.compiler import check_compile
from distributed_training.ranks.context import DistContext
from distributed_training.ranks.gpus import require_usable
from distributed_training.ranks.tuning import available_cores
from distributed_training.settings.settings import Hub
from distributed_training.strategies.strategy import Strategy
from distributed_training.units import GB
from tools.check.check_line import OK, PROBLEM, WARNING, Line, line_of

GPU = "GPU"  # name of a line
IMPORTED = ("transformers", "datasets", "tokenizers", "safetensors")


def software(strategy: Strategy) -> Line:
    """Name the versions of the packages that the strategy needs."""
    needed = [*IMPORTED, *strategy.packages]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    text = ", ".join(f"{name} {number}" for name, number in versions().items())[len("python ") :]
    text += f"; No module named {', '.join(missing)}" if missing else ""
    return line_of(not missing, "Python", text, "pip install -r requirements.txt", PROBLEM)


def gpu(wanted: str, ctx: DistContext) -> Line:
    """Describe the GPU, or the CPU if --device (`wanted`) or the machine allows nothing else."""
    if ctx.device.type != "cuda":
        try:
            require_usable()
        except UserError as error:
            return Line(PROBLEM, GPU, str(error))
        why = "not used" if wanted == "cpu" else "none found"
        text = f"{why}; training in {ctx.precision} on {available_cores()} CPU cores"
        return Line(OK, GPU, text)
    found = torch.cuda.get_device_properties(ctx.device)
    free, total = torch.cuda.mem_get_info(ctx.device)
    built = torch.version.cuda or f"ROCm {torch.version.hip}"
    text = (
        f"{found.name}, {free / GB:.1f} of {total / GB:.1f} GB free, "
        f"compute capability {found.major}.{found.minor}, CUDA {built}, {ctx.precision}"
    )
    remedy = "another process uses a part of it (nvidia-smi shows which)"
    return line_of(free >= 0.8 * total, GPU, text, remedy)


def compiler(device_type: str, flag: str | None) -> Line | None:
    """Check that a flag which needs torch.compile's compiler has it; None without such a flag."""
    if flag is None:
        return None
    try:
        check_compile(device_type, flag)
    except UserError as error:
        return Line(PROBLEM, "torch.compile", str(error))
    return Line(OK, "torch.compile", "has a compiler")


def requirements(strategy: Strategy, accumulation: int, in_4bit: bool) -> Line | None:
    """Check the releases that the strategy needs, DeepSpeed's ops, and what compiles them."""
    try:
        strategy.check_requirements(accumulation)
        if in_4bit:
            strategy.check_4bit()
    except UserError as error:
        return Line(PROBLEM, "requirements", str(error))
    if not strategy.needed_ops():
        return None
    missing = ", ".join(strategy.missing_ops())
    return Line(OK, "DeepSpeed ops", f"the first run compiles {missing}" if missing else "ready")


def limits() -> Line:
    """Check how many files a process may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most, status = most_open_files(), PROBLEM if files < 128 else WARNING
    remedy = f"ulimit -n {most} before the run"
    if most <= files:
        remedy = "root must raise the hard limit; then ulimit -n 65536 before the run"
    return line_of(files >= 1024, "open files", f"{files} (ulimit -n)", remedy, status)


def hub(asked: Hub) -> Line:
    """Say whether the hub answers, if the run needs it."""
    if asked.problem:
        return Line(PROBLEM, "hub", asked.problem)
    answers = f"{redact(os.environ.get('HF_ENDPOINT', 'https://huggingface.co'))} answers"
    local = "not needed: the model and the dataset are local or cached"
    return Line(OK, "hub", local if asked.offline else answers)
