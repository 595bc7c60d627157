"""All command-line flags, in one table for each group of --help.

Nothing heavy is imported here, so that --help and argument errors appear at once.
"""

from __future__ import annotations

import argparse
from typing import Any

from support import VERSION
from support.cli import argument_types as kinds
from support.cli.argument_types import Parser
from support.cli.run_file import OTHER_NAMES, SWITCHES
from support.known_models import EMBEDDED_MODEL
from support.strategy import STRATEGIES

# --resume without a path. Not a string, so that `--resume "$UNSET"`, an empty path, is an error.
NEWEST = True

EXIT_CODES = """\
exit codes: 0 completed, 1 failed, 2 wrong usage or bad input, 3 out of memory,
75 stopped by a signal and saved. Launchers may turn any but 0 into their own:
programs read "status" in results.json."""


def flag(name: str, kind, text: str, **options) -> tuple[str, dict]:
    """Return a row for a flag with a value.

    Args:
        name: the flag.
        kind: a type (see support/cli/argument_types.py), or a tuple with the allowed values.
        text: its help, to which the default is appended.
        options: further arguments of argparse's `add_argument`.
    """
    if options.get("default") not in (None, []) and "(default:" not in text:
        text += " (default: %(default)s)"
    return name, {"choices" if isinstance(kind, tuple) else "type": kind, "help": text, **options}


def switch(name: str, text: str) -> tuple[str, dict]:
    """Return a row for a flag without a value, which is off by default."""
    return name, {"action": "store_true", "help": text}


def on_unless(name: str, text: str) -> list[tuple[str, dict]]:
    """Return the rows of --no_NAME, and of --NAME, which is on by default and not in --help."""
    on = {"action": argparse.BooleanOptionalAction, "default": True, "help": argparse.SUPPRESS}
    off = {"action": "store_false", "dest": name, "default": argparse.SUPPRESS, "help": text}
    return [(f"--{name}", on), (f"--no_{name}", off)]


COMMANDS = (
    switch(
        "--check",
        "try everything that the run needs of this machine and its network, and train nothing",
    ),
    switch(
        "--prefetch",
        "download and tokenize what the run needs, for machines without a network, "
        "and train nothing",
    ),
)
RUN_FILE = (
    flag(
        "--config",
        kinds.name,
        "YAML with these flags; the command line overrides it",
        metavar="FILE",
    ),
    switch("--print_config", "print the resolved run as such a file, and exit"),
)
MODEL = (
    flag(
        "--model",
        kinds.name,
        "tiny-gpt2 (embedded, needs no network), gpt2, gpt2-medium, gpt2-large, gpt2-xl, any "
        "causal language model on the Hugging Face hub, or a local folder",
        default=EMBEDDED_MODEL,
    ),
    switch("--from_scratch", "take the architecture only; random weights drawn from --seed"),
    flag("--dropout", kinds.probability, "dropout probability (default: the model's own)"),
    *on_unless(
        "fused_gelu",
        "compute GPT-2's activation as gelu_new, not as the same function in one kernel",
    ),
    switch("--gradient_checkpointing", "recompute activations in the backward pass to save memory"),
    flag(
        "--lora_r",
        kinds.rank_of_adapters,
        "train low-rank adapters of this rank (LoRA) and leave the model as it is "
        "(default: train all of it)",
        metavar="R",
    ),
    flag(
        "--lora_alpha", kinds.positive_float, "scale adapters by A / R (default: 2 R)", metavar="A"
    ),
    flag("--lora_dropout", kinds.probability, "dropout before the adapters", default=0.0),
    flag(
        "--lora_targets",
        kinds.layer_names,
        "layers that get one, by the end of their names with commas between, or all-linear "
        "(default: those that are usual for the architecture)",
        metavar="LIST",
    ),
    switch(
        "--merge_lora", "export the whole model with the adapters added, instead of the adapters"
    ),
    switch("--compile", "compile the model with torch.compile"),
)
DATA = (
    flag(
        "--dataset",
        kinds.name,
        "pydocs (embedded), wikitext, a file or folder (.txt .jsonl .json .csv .parquet), or "
        "a hub dataset (default: pydocs for tiny-gpt2, else wikitext)",
    ),
    flag(
        "--include",
        kinds.name_patterns,
        "files of a folder to read, such as '*.txt' or 'books/*.md,*.txt' "
        "(default: all that are not hidden or empty)",
        metavar="PATTERNS",
    ),
    flag("--dataset_config", kinds.word, "configuration name of a hub dataset"),
    flag(
        "--text_column",
        kinds.word,
        "column or key that holds the text (default: messages, or prompt and completion, "
        "where a row has them, else text)",
    ),
    flag(
        "--validation_file",
        kinds.name,
        "file or folder to evaluate on (default: the corpus's own validation split)",
        metavar="FILE",
    ),
    flag(
        "--validation_split",
        kinds.share,
        "share of the corpus to hold out for evaluation "
        "(default: 0.1 where there is no validation split)",
        metavar="SHARE",
    ),
    flag(
        "--max_bad_rows",
        kinds.natural_int,
        "skip up to N rows that cannot be used, and name them",
        default=0,
        metavar="N",
    ),
    flag(
        "--chat_template",
        kinds.name,
        "Jinja template for conversations (default: the tokenizer's own, else a plain one)",
        metavar="FILE",
    ),
    switch(
        "--streaming",
        "read and tokenize while training, for a corpus larger than the disk; needs --max_steps",
    ),
    flag(
        "--shuffle_buffer",
        kinds.positive_int,
        "sequences among which --streaming shuffles, over all ranks",
        default=1000,
        metavar="N",
    ),
    flag(
        "--seq_length",
        kinds.block_length,
        "tokens in a sequence (default: 256 for tiny-gpt2, else 512, or as many "
        "as the model has positions)",
    ),
    flag("--num_samples", kinds.sequences, "sequences to train on, over all ranks (default: all)"),
    flag(
        "--cache_dir",
        kinds.name,
        "where tokenized data is kept (default: distributed_training under HF_HOME, else "
        "~/.cache/huggingface)",
    ),
)
TRAINING = (
    flag("--batch_size", kinds.batch, "sequences per GPU in a micro-batch", default=4),
    flag(
        "--gradient_accumulation_steps", kinds.batch, "micro-batches per optimizer step", default=1
    ),
    flag("--epochs", kinds.steps, "passes over the data (default: 1, or what --max_steps needs)"),
    flag("--max_steps", kinds.steps, "stop after this many optimizer steps"),
    flag(
        "--lr", kinds.rate, "peak learning rate (default: 5e-5, adapters 2e-4, random weights 5e-4)"
    ),
    flag(
        "--lr_scheduler", ("linear", "cosine", "constant"), "decay after warm-up", default="linear"
    ),
    flag("--warmup_steps", kinds.natural_steps, "steps of linear warm-up", default=0),
    flag("--weight_decay", kinds.natural_float, "AdamW's; none on biases and norms", default=0.01),
    flag(
        "--max_grad_norm", kinds.natural_float, "clip the gradient's norm; 0 = never", default=1.0
    ),
    flag(
        "--precision",
        kinds.precision,
        "auto: bf16 where the device does it well, fp16 on older GPUs, else fp32",
        default="auto",
        choices=("auto", "fp32", "bf16", "fp16"),
    ),
    flag("--seed", kinds.seed, "weights, order of the data, dropout", default=42),
    switch(
        "--deterministic",
        "only deterministic kernels (slower); a model that needs another one is an error",
    ),
    *on_unless("eval", "no evaluation (default: after each epoch)"),
    switch("--eval_first", "evaluate before training, too"),
    switch("--eval_only", "evaluate and do not train"),
    flag(
        "--eval_every",
        kinds.steps,
        "evaluate every N optimizer steps and at the end, instead of after each epoch",
        metavar="N",
    ),
    flag(
        "--early_stopping_patience",
        kinds.steps,
        "stop after K evaluations in a row that were no better than the best (default: never)",
        metavar="K",
    ),
    switch(
        "--load_best_at_end",
        "save the best evaluation's weights, and end with them (default: the last)",
    ),
    flag(
        "--eval_samples",
        kinds.sequences,
        "sequences to evaluate (default: --num_samples, else all)",
    ),
)
STRATEGY = (
    flag(
        "--strategy",
        tuple(STRATEGIES),
        "dp, zero1, zero2, zero3, offload (optimizer on the CPU), infinity (optimizer and "
        "parameters on NVMe), fsdp",
        default="dp",
    ),
    flag("--ds_config", kinds.name, "DeepSpeed JSON instead of ds_config_*.json", metavar="FILE"),
    flag(
        "--fsdp_config",
        kinds.name,
        "FSDP's options in JSON, as accelerate writes them",
        metavar="FILE",
    ),
    flag(
        "--nvme_path",
        kinds.name,
        "where infinity keeps its files (default: the temporary folder, TMPDIR)",
        metavar="DIR",
    ),
)
CLUSTER = (
    flag("--ddp_timeout", kinds.seconds, "seconds until a collective times out", default=1800),
    # The deepspeed launcher passes it; it is ignored, and RANK is used.
    ("--local_rank", {"type": int, "default": -1, "help": argparse.SUPPRESS}),
)
OUTPUT = (
    flag(
        "--output_dir",
        kinds.name,
        "folder for results.json and metrics.jsonl (default: runs/<model>-<strategy>-<time>)",
    ),
    switch(
        "--overwrite", "replace another run's results in --output_dir, or what is in --export_hf"
    ),
    flag(
        "--save_every", kinds.steps, "save a checkpoint every N steps (default: never)", metavar="N"
    ),
    switch("--save_epochs", "write a checkpoint at the end of each epoch"),
    flag(
        "--keep_last", kinds.steps, "keep the newest K checkpoints only (default: all)", metavar="K"
    ),
    switch("--no_save", "write no checkpoint, not even when a signal stops the run"),
    flag(
        "--resume",
        kinds.name,
        "continue from the newest whole checkpoint in --output_dir (from the start if there is "
        "none), or from PATH",
        nargs="?",
        const=NEWEST,
        metavar="PATH",
    ),
    switch("--resume_force", "resume although the text, the batch or the seed has changed"),
    flag(
        "--export_hf",
        kinds.name,
        "where the trained model goes, for from_pretrained (default: hf in --output_dir)",
        metavar="DIR",
    ),
    switch("--no_export", "do not write the trained model"),
    flag(
        "--export_dtype",
        ("fp32", "bf16", "fp16"),
        "type of the exported weights (default: %(default)s, as they are trained)",
        default="fp32",
    ),
    flag(
        "--generate", kinds.prompt, "print a continuation of this text at the end", metavar="PROMPT"
    ),
    flag("--logging_steps", kinds.steps, "optimizer steps between two lines", default=10),
    flag(
        "--report_to",
        kinds.reporters,
        "tensorboard, wandb, or both with a comma between (default: none; "
        "metrics.jsonl is always written)",
        default=[],
        metavar="LIST",
    ),
    flag(
        "--logging_dir",
        kinds.name,
        "where the files of --report_to tensorboard go (default: tensorboard in --output_dir)",
        metavar="DIR",
    ),
    switch("--quiet", "print warnings and errors only"),
)
DEBUGGING = (
    switch(
        "--profile_memory",
        "show memory after each phase and by kind of state (slows the last step on a CPU)",
    ),
    flag(
        "--simulate_gpus",
        kinds.ranks,
        "measure the memory of rank 0 of N in this one process: real allocations, nothing "
        "communicated, no losses (3 steps)",
        metavar="N",
    ),
    flag(
        "--memory_snapshot",
        kinds.name,
        "write PyTorch's snapshot of the GPU's memory, for pytorch.org/memory_viz",
        metavar="FILE",
    ),
    flag("--profile", kinds.name, "write a trace of 3 steps, for ui.perfetto.dev", metavar="DIR"),
    switch("--verbose", "show third-party messages and tracebacks"),
)
GROUPS = {
    "run file": RUN_FILE,
    "model": MODEL,
    "data": DATA,
    "training": TRAINING,
    "strategy": STRATEGY,
    "cluster": CLUSTER,
    "output": OUTPUT,
    "debugging": DEBUGGING,
}


def build_parser() -> Parser:
    """Build the parser of all flags, with defaults, limits and help."""
    parser = Parser(
        prog="real_model_example.py",
        usage="%(prog)s [flags]",
        description="Fine-tune a causal language model under one of seven data-parallel "
        "strategies.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=30, width=80
        ),
    )
    parser.add_argument("--version", action="version", version=f"distributed-training {VERSION}")
    for name, options in COMMANDS:
        parser.add_argument(name, **options)
    for title, rows in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, options in rows:
            group.add_argument(name, **options)
    _add_other_names(parser)
    return parser


class _Deepspeed(argparse.Action):
    """--deepspeed [FILE], as in transformers' Trainer and DeepSpeed's own argument parser."""

    def __call__(self, parser, namespace, values, option_string=None):
        namespace.use_deepspeed = True
        if values is not None:
            namespace.ds_config = values


def _add_other_names(parser: argparse.ArgumentParser) -> None:
    """Add the names that other trainers use for our flags; --help does not list them."""
    flags = {action.dest: action for action in reversed(parser._actions)}
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument("--local-rank", dest="local_rank", type=int, **hidden)
    for alias, dest in OTHER_NAMES.items():
        same: dict[str, Any] = {"type": flags[dest].type, "choices": flags[dest].choices}
        parser.add_argument(f"--{alias}", dest=dest, **same, **hidden)
    parser.add_argument("--deepspeed", nargs="?", type=kinds.name, action=_Deepspeed, **hidden)
    for switch in SWITCHES:
        parser.add_argument(f"--{switch}", action="store_true", help=argparse.SUPPRESS)
