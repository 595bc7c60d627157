"""The trainer behind real_model_example.py, as a package that any program can import.

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
files        checks of the user's files, atomic writes, caches
rank_shares  --rank_shares: from shares of the ranks to whole sequences
train_state  counters, best evaluation and early stopping of a run
errors       exceptions that end a run, exit codes, what library errors mean; secrets are removed
entry_points the commands that pip installs
process      output that cannot fail, signal handlers before the run has its own, versions
programs     command lines of the tools, and programs that they run
optimizers   the optimizers of --optim, and what they need
other_optimizers  creates those other than AdamW
known_models the embedded model and GPT-2, whose shape is known without a file
loss_chunks  how the loss is computed, in chunks of the logits
gpu_generations  compute capabilities, and what attention kernels can do
patches      patches of torch, transformers and bitsandbytes
console      lines and progress bars
text_tables  tables of text
units        units of memory, and numbers as people read them
"""

import sys
from pathlib import Path

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

VERSION = "0.8.0"  # the only place; pyproject.toml reads it
PACKAGE = Path(__file__).resolve().parent
# The folder of real_model_example.py, tools/, scripts/ and ds_config_*.json: of the clone, or
# what pip has installed of it (pyproject.toml).
PROJECT = PACKAGE / "project" if (PACKAGE / "project").is_dir() else PACKAGE.parent
