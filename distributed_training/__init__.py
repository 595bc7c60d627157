"""The trainer behind real_model_example.py, as a package that any program can import.

The names in `__all__` are for other programs: docs/PYTHON.md shows them. Each is imported when it
is first used, so `import distributed_training` is fast and does not import PyTorch.

settings     the settings of a run, in sections: each flag with its type, default and help
cli          from the command line to the settings; checks of paths and of the hub
entry        from the command line to a process that may import torch; runs on all ranks
print_flags  --print_config: the flags of a run
hooks        the one place where a tool takes part in a run
ranks        launchers, ranks, rendezvous, failures of ranks
data         from --dataset to batches of token ids
model        model and tokenizer, loss, LoRA, export, generation
strategies   one folder for each engine: DDP, FSDP, DeepSpeed; gradients
checkpoints  saving, resuming, the format, conversion
memory       measured and estimated memory
workload     what the estimate depends on: the model's dimensions, batches, ranks
run          a run from its folder to its results: log, meter, trackers, end
records      what runs have written: reads and compares them
planning     for a program: the memory of a rank, whether it fits, and the cost of the run
trained      trained models, for generation
files        checks of the user's files, atomic writes, caches
rank_shares  --rank_shares: from shares of the ranks to whole sequences
train_state  counters, best evaluation and early stopping of a run
errors       exceptions that end a run, exit codes, what library errors mean; secrets are removed
entry_points the commands that pip installs
process      output that cannot fail, signal handlers before the run has its own, versions
programs     command lines of the tools, and programs that they run
optimizers   one file for each optimizer of --optim
known_models the embedded model and GPT-2, whose shape is known without a file
loss_chunks  how the loss is computed, in chunks of the logits
hardware     what devices can do: generations of GPUs, attention kernels, bf16
pending_copy a tensor's copy in host memory, for which nothing waits until it is read
model_parts  a model's transformer blocks, and the part of a tensor on this rank
patches      patches of torch, transformers and bitsandbytes
console      lines and progress bars
text_tables  tables of text
units        units of memory, and numbers as people read them
arguments    checks of the arguments of the public functions
about        the version, where the project's files are, and the names of its commands
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from distributed_training.about import PACKAGE, PROJECT, VERSION  # noqa: F401  # for programs

if TYPE_CHECKING:
    from distributed_training.checkpoints.convert import convert_checkpoint
    from distributed_training.cli.resolve import resolve_settings
    from distributed_training.errors import UserError
    from distributed_training.planning import Plan, plan
    from distributed_training.records.compare import Comparison, compare_runs
    from distributed_training.records.recorded_run import RecordedRun, read_run
    from distributed_training.settings.settings import Settings
    from distributed_training.strategies.table import STRATEGIES
    from distributed_training.trained.load import open_model

__all__ = [
    "STRATEGIES",
    "Comparison",
    "Plan",
    "RecordedRun",
    "Settings",
    "UserError",
    "compare_runs",
    "convert_checkpoint",
    "open_model",
    "plan",
    "read_run",
    "resolve_settings",
]

if sys.platform == "win32" or sys.version_info < (3, 10):
    # Here, because every program of this project imports this file first, and the next imports fail
    # on such a machine.
    need = (
        "Windows is not supported. Install WSL (wsl --install), and run the same command there."
        if sys.platform == "win32"
        else "Python 3.10 or newer is needed, and this is {}.{}.".format(*sys.version_info)
    )
    print(f"❌ {need}", file=sys.stderr)
    sys.exit(2)

# The module of each public name.
MODULES = {
    "STRATEGIES": "strategies.table",
    "Comparison": "records.compare",
    "Plan": "planning",
    "RecordedRun": "records.recorded_run",
    "Settings": "settings.settings",
    "UserError": "errors",
    "compare_runs": "records.compare",
    "convert_checkpoint": "checkpoints.convert",
    "open_model": "trained.load",
    "plan": "planning",
    "read_run": "records.recorded_run",
    "resolve_settings": "cli.resolve",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562)."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet, and all others."""
    return sorted({*globals(), *__all__})
