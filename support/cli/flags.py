"""The parser of all command-line flags.

Nothing heavy is imported here, so that --help and argument errors appear at once.
"""

from __future__ import annotations

import argparse

from support import VERSION
from support.cli import argument_types as kinds
from support.cli.argument_types import Parser, positive_int
from support.cli.run_file import OTHER_NAMES, SWITCHES
from support.known_models import EMBEDDED_MODEL
from support.strategy import STRATEGIES

# --resume without a path. Not a string, so that `--resume "$UNSET"`, an empty path, is an error.
NEWEST = True
EXIT_CODES = """\
exit codes: 0 completed, 1 failed, 2 wrong usage or bad input, 3 out of memory,
75 stopped by a signal and saved. Launchers may turn any but 0 into their own:
programs read "status" in results.json."""


def build_parser() -> argparse.ArgumentParser:
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
    parser.add_argument(
        "--check",
        action="store_true",
        help="try everything that the run needs of this machine and its network, and train nothing",
    )
    parser.add_argument(
        "--prefetch",
        action="store_true",
        help="download and tokenise what the run needs, for machines without a network, "
        "and train nothing",
    )
    add = parser.add_argument_group("run file").add_argument
    add(
        "--config",
        type=kinds.name,
        metavar="FILE",
        help="YAML with any of these flags by name; the command line wins",
    )
    add(
        "--print_config", action="store_true", help="print the resolved run as such a file, and end"
    )

    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        type=kinds.name,
        default=EMBEDDED_MODEL,
        help="tiny-gpt2 (embedded, needs no network), gpt2, gpt2-medium, gpt2-large, gpt2-xl, any "
        "causal language model on the Hugging Face hub, or a local folder (default: %(default)s)",
    )
    add(
        "--from_scratch",
        action="store_true",
        help="take the architecture only; random weights drawn from --seed",
    )
    add(
        "--dropout",
        type=kinds.probability,
        help="dropout probability everywhere in the model (default: the model's own)",
    )
    add("--fused_gelu", action=argparse.BooleanOptionalAction, default=True, help=argparse.SUPPRESS)
    add(
        "--no_fused_gelu",
        action="store_false",
        dest="fused_gelu",
        default=argparse.SUPPRESS,
        help="compute GPT-2's activation as transformers writes it (gelu_new), "
        "and not as the same function in one kernel",
    )
    add(
        "--gradient_checkpointing",
        action="store_true",
        help="recompute activations in the backward pass to save memory",
    )
    add(
        "--lora_r",
        type=kinds.rank_of_adapters,
        metavar="R",
        help="train low-rank adapters of this rank (LoRA) and leave the model as it is "
        "(default: train all of it)",
    )
    add(
        "--lora_alpha",
        type=kinds.positive_float,
        metavar="A",
        help="scale the adapters by A / R (default: 2 R)",
    )
    add(
        "--lora_dropout",
        type=kinds.probability,
        default=0.0,
        help="dropout before the adapters (default: %(default)s)",
    )
    add(
        "--lora_targets",
        type=kinds.layer_names,
        metavar="LIST",
        help="layers that get one, by the end of their names with commas between, or all-linear "
        "(default: those that are usual for the architecture)",
    )
    add(
        "--merge_lora",
        action="store_true",
        help="export the whole model with the adapters added, instead of the adapters",
    )
    add("--compile", action="store_true", help="compile the model with torch.compile")

    add = parser.add_argument_group("data").add_argument
    add(
        "--dataset",
        type=kinds.name,
        help="pydocs (embedded), wikitext, a file or folder (.txt .jsonl .json .csv .parquet), or "
        "a hub dataset (default: pydocs for tiny-gpt2, else wikitext)",
    )
    add(
        "--include",
        type=kinds.name_patterns,
        metavar="PATTERNS",
        help="files of a folder to read, such as '*.txt' or 'books/*.md,*.txt' "
        "(default: all that are not hidden or empty)",
    )
    add("--dataset_config", type=kinds.name, help="configuration name of a hub dataset")
    add(
        "--text_column",
        type=kinds.name,
        help="column or key that holds the text (default: messages, or prompt and completion, "
        "where a row has them, else text)",
    )
    add(
        "--validation_file",
        type=kinds.name,
        metavar="FILE",
        help="file or folder to evaluate on (default: the corpus's own validation split)",
    )
    add(
        "--validation_split",
        type=kinds.share,
        metavar="SHARE",
        help="share of the corpus to hold out for evaluation "
        "(default: 0.1 where there is no validation split)",
    )
    add(
        "--max_bad_rows",
        type=kinds.natural_int,
        default=0,
        metavar="N",
        help="leave out up to so many rows that cannot be used, and name them "
        "(default: %(default)s)",
    )
    add(
        "--chat_template",
        type=kinds.name,
        metavar="FILE",
        help="Jinja template for conversations (default: the tokenizer's own, else a plain one)",
    )
    add(
        "--streaming",
        action="store_true",
        help="read and tokenise while training, without a cache, "
        "for a corpus larger than the disk; needs --max_steps",
    )
    add(
        "--shuffle_buffer",
        type=positive_int,
        default=1000,
        metavar="N",
        help="blocks among which --streaming shuffles, over all ranks (default: %(default)s)",
    )
    add(
        "--seq_length",
        type=kinds.block_length,
        help="tokens in a block (default: 256 for tiny-gpt2, else 512, or as many "
        "as the model has positions)",
    )
    add(
        "--num_samples",
        type=kinds.sequences,
        help="train on this many blocks in total, over all ranks (default: all)",
    )
    add(
        "--cache_dir",
        type=kinds.name,
        help="where tokenised data is kept (default: distributed_training under HF_HOME, else "
        "~/.cache/huggingface)",
    )

    add = parser.add_argument_group("training").add_argument
    add(
        "--batch_size",
        type=kinds.batch,
        default=4,
        help="blocks per GPU in a micro-batch (default: %(default)s)",
    )
    add(
        "--gradient_accumulation_steps",
        type=kinds.batch,
        default=1,
        help="micro-batches per optimizer step (default: %(default)s)",
    )
    add(
        "--epochs",
        type=kinds.steps,
        help="passes over the data (default: 1, or as many as --max_steps needs)",
    )
    add("--max_steps", type=kinds.steps, help="stop after this many optimizer steps")
    add(
        "--lr",
        type=kinds.rate,
        help="peak learning rate (default: 5e-5, for adapters 2e-4, for random weights 5e-4)",
    )
    add(
        "--lr_scheduler",
        choices=("linear", "cosine", "constant"),
        default="linear",
        help="how the rate falls after warm-up (default: %(default)s)",
    )
    add(
        "--warmup_steps",
        type=kinds.natural_steps,
        default=0,
        help="steps of linear warm-up (default: %(default)s)",
    )
    add(
        "--weight_decay",
        type=kinds.natural_float,
        default=0.01,
        help="AdamW's; none on biases and norms (default: %(default)s)",
    )
    add(
        "--max_grad_norm",
        type=kinds.natural_float,
        default=1.0,
        help="clip the gradient's norm; 0 = never (default: %(default)s)",
    )
    add(
        "--precision",
        type=kinds.precision,
        choices=("auto", "fp32", "bf16", "fp16"),
        default="auto",
        help="auto: bf16 where the device does it well, fp16 on older GPUs, else fp32 "
        "(default: %(default)s)",
    )
    add(
        "--seed",
        type=kinds.seed,
        default=42,
        help="weights, order of the data, dropout (default: %(default)s)",
    )
    add(
        "--deterministic",
        action="store_true",
        help="only deterministic kernels (slower); a model that needs another one is an error",
    )
    add("--eval", action=argparse.BooleanOptionalAction, default=True, help=argparse.SUPPRESS)
    add(
        "--no_eval",
        action="store_false",
        dest="eval",
        default=argparse.SUPPRESS,
        help="no evaluation (default: after each epoch)",
    )
    add("--eval_first", action="store_true", help="evaluate before training, too")
    add("--eval_only", action="store_true", help="evaluate and do not train")
    add(
        "--eval_every",
        type=kinds.steps,
        metavar="N",
        help="evaluate every N optimizer steps and at the end, instead of after each epoch",
    )
    add(
        "--early_stopping_patience",
        type=kinds.steps,
        metavar="K",
        help="stop after K evaluations in a row that were no better than the best (default: never)",
    )
    add(
        "--load_best_at_end",
        action="store_true",
        help="keep a checkpoint of the best evaluation, and end with its weights "
        "(default: with the last ones)",
    )
    add(
        "--eval_samples",
        type=kinds.sequences,
        help="evaluate on this many blocks (default: --num_samples, else all)",
    )

    add = parser.add_argument_group("strategy").add_argument
    add(
        "--strategy",
        choices=tuple(STRATEGIES),
        default="dp",
        help="dp, zero1, zero2, zero3, offload (optimizer on the CPU), infinity (optimizer and "
        "parameters on NVMe), fsdp (default: %(default)s)",
    )
    add(
        "--ds_config",
        type=kinds.name,
        metavar="FILE",
        help="your own DeepSpeed JSON instead of ds_config_*.json",
    )
    add(
        "--fsdp_config",
        type=kinds.name,
        metavar="FILE",
        help="JSON with FSDP's options, as accelerate and transformers write it",
    )
    add(
        "--nvme_path",
        type=kinds.name,
        metavar="DIR",
        help="where infinity keeps its files (default: the temporary folder, TMPDIR)",
    )
    add = parser.add_argument_group("cluster").add_argument
    add(
        "--ddp_timeout",
        type=kinds.seconds,
        default=1800,
        help="seconds until a collective gives up (default: %(default)s)",
    )
    # The deepspeed launcher passes it; it is ignored, and RANK is used.
    add("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    add(
        "--local-rank",
        type=int,
        dest="local_rank",
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )

    add = parser.add_argument_group("output").add_argument
    add(
        "--output_dir",
        type=kinds.name,
        help="folder for results.json and metrics.jsonl (default: runs/<model>-<strategy>-<time>)",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace another run's results in --output_dir, or what is in --export_hf",
    )
    add(
        "--save_every",
        type=kinds.steps,
        metavar="N",
        help="write a checkpoint every N optimizer steps (default: none)",
    )
    add("--save_epochs", action="store_true", help="write a checkpoint at the end of each epoch")
    add(
        "--keep_last",
        type=kinds.steps,
        metavar="K",
        help="keep the newest K checkpoints only (default: all)",
    )
    add(
        "--no_save",
        action="store_true",
        help="write no checkpoint, not even when a signal stops the run",
    )
    add(
        "--resume",
        nargs="?",
        const=NEWEST,
        type=kinds.name,
        metavar="PATH",
        help="go on from the newest whole checkpoint in --output_dir (from the start if there is "
        "none), or from PATH",
    )
    add(
        "--resume_force",
        action="store_true",
        help="resume although the text, the batch or the seed is another",
    )
    add(
        "--export_hf",
        type=kinds.name,
        metavar="DIR",
        help="where the trained model goes, for from_pretrained (default: hf in --output_dir)",
    )
    add("--no_export", action="store_true", help="do not write the trained model")
    add(
        "--export_dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="type of the exported weights (default: %(default)s, as they are trained)",
    )
    add(
        "--generate",
        type=kinds.prompt,
        metavar="PROMPT",
        help="print a continuation of this text at the end",
    )
    add(
        "--logging_steps",
        type=kinds.steps,
        default=10,
        help="optimizer steps between two lines (default: %(default)s)",
    )
    add(
        "--report_to",
        type=kinds.reporters,
        default=[],
        metavar="LIST",
        help="tensorboard, wandb, or both with a comma between (default: none; "
        "metrics.jsonl is always written)",
    )
    add(
        "--logging_dir",
        type=kinds.name,
        metavar="DIR",
        help="where the files of --report_to tensorboard go (default: tensorboard in --output_dir)",
    )
    add("--quiet", action="store_true", help="print warnings and errors only")

    add = parser.add_argument_group("debugging").add_argument
    add(
        "--profile_memory",
        action="store_true",
        help="show memory after each phase and by kind of state (slows the last step on a CPU)",
    )
    add(
        "--simulate_gpus",
        type=kinds.ranks,
        metavar="N",
        help="measure the memory of rank 0 of N in this one process: real allocations, nothing "
        "communicated, no losses (3 steps)",
    )
    add(
        "--memory_snapshot",
        type=kinds.name,
        metavar="FILE",
        help="write PyTorch's snapshot of the GPU's memory, for pytorch.org/memory_viz",
    )
    add(
        "--profile",
        type=kinds.name,
        metavar="DIR",
        help="write a trace of 3 steps, for ui.perfetto.dev",
    )
    add("--verbose", action="store_true", help="show third-party messages and tracebacks")
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
    hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for alias, dest in OTHER_NAMES.items():
        parser.add_argument(
            f"--{alias}", dest=dest, type=flags[dest].type, choices=flags[dest].choices, **hidden
        )
    parser.add_argument("--deepspeed", nargs="?", type=kinds.name, action=_Deepspeed, **hidden)
    for switch in SWITCHES:
        parser.add_argument(f"--{switch}", action="store_true", help=argparse.SUPPRESS)
