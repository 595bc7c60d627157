"""All command-line flags, in one table for each group of --help.

Nothing heavy is imported here, so that --help and argument errors appear at once.
"""

from __future__ import annotations

import argparse

from support import VERSION
from support.cli import argument_types as kinds
from support.cli.aliases import CONVERTED, hidden_rows, names_of
from support.cli.argument_types import NEWEST, Parser, flag, switch
from support.cli.run_file import SWITCHES
from support.known_models import EMBEDDED_MODEL
from support.optimizers import OPTIMIZERS
from support.strategy import STRATEGIES

EXIT_CODES = """\
exit codes: 0 completed, 1 failed, 2 wrong usage or bad input, 3 out of memory,
75 stopped by a signal and saved. Launchers may turn any but 0 into their own:
programs read "status" in results.json."""


def off_unless(name: str, text: str) -> list[tuple[str, dict]]:
    """Return the rows of --NAME, which is off by default, and of --no_NAME, not in --help."""
    off = {"action": "store_false", "dest": name, "default": argparse.SUPPRESS}
    return [switch(f"--{name}", text), (f"--no_{name}", {**off, "help": argparse.SUPPRESS})]


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
    switch(
        "--show_sample",
        "print the first training sequence as tokens, with those that are trained marked, and "
        "train nothing",
    ),
    flag(
        "--prove N",
        kinds.ranks,
        "make one step on the model and data in several ways, also with --strategy on N ranks and "
        "with transformers.Trainer, and compare loss, gradient and update (default N: all GPUs, "
        "else 2)",
        nargs="?",
        const=True,
    ),
)
RUN_FILE = (
    flag("--config FILE", kinds.name, "YAML with these flags; the command line overrides it"),
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
    flag(
        "--model_revision REV",
        kinds.word,
        "branch, tag or commit of a model on the hub (default: main)",
    ),
    switch("--from_scratch", "take the architecture only; random weights drawn from --seed"),
    flag("--dropout", kinds.probability, "dropout probability (default: the model's own)"),
    *on_unless(
        "fused_gelu",
        "compute GPT-2's activation as gelu_new, not as the same function in one kernel",
    ),
    switch("--gradient_checkpointing", "recompute activations in the backward pass to save memory"),
    flag(
        "--lora_r R",
        kinds.rank_of_adapters,
        "train low-rank adapters of this rank (LoRA) and leave the model as it is "
        "(default: train all of it)",
    ),
    flag("--lora_alpha A", kinds.positive_float, "scale adapters by A / R (default: 2 R)"),
    flag("--lora_dropout", kinds.probability, "dropout before the adapters", default=0.0),
    flag(
        "--lora_targets LIST",
        kinds.layer_names,
        "layers that get one, by the end of their names with commas between, or all-linear "
        "(default: those that are usual for the architecture)",
    ),
    switch(
        "--merge_lora", "export the whole model with the adapters added, instead of the adapters"
    ),
    switch(
        "--load_in_4bit",
        "keep the frozen weights in 4 bits (QLoRA: NF4, double quantization); needs --lora_r and "
        "bitsandbytes",
    ),
    switch("--compile", "compile the model with torch.compile"),
)
DATA = (
    flag(
        "--dataset NAME",
        kinds.name,
        "pydocs (embedded), wikitext, a file or folder (.txt .jsonl .json .csv .parquet), or "
        "a hub dataset; or several, also with weights: A:0.7 B:0.3 (default: pydocs for "
        "tiny-gpt2, else wikitext)",
        nargs="+",
    ),
    flag(
        "--include PATTERNS",
        kinds.name_patterns,
        "files of a folder to read, such as '*.txt' or 'books/*.md,*.txt' "
        "(default: all that are not hidden or empty)",
    ),
    flag("--dataset_config", kinds.word, "configuration name of a hub dataset"),
    flag(
        "--dataset_revision REV",
        kinds.word,
        "branch, tag or commit of a hub dataset (default: main)",
    ),
    flag(
        "--train_split SPLIT",
        kinds.word,
        "split of a hub dataset to train on, also a part as 'train[:10%%]' (default: train)",
    ),
    flag(
        "--eval_split SPLIT",
        kinds.word,
        "split of a hub dataset to evaluate on (default: validation, if there is one)",
    ),
    flag(
        "--text_column",
        kinds.word,
        "column or key that holds the text (default: the format that a row's keys show: messages, "
        "ShareGPT, prompt and completion, Alpaca, else text)",
    ),
    flag("--prompt_column", kinds.word, "column or key that holds the prompt"),
    flag(
        "--completion_column",
        kinds.word,
        "column or key that holds the completion, which is trained on",
    ),
    flag(
        "--validation_file FILE",
        kinds.name,
        "file or folder to evaluate on (default: the corpus's own validation split)",
    ),
    flag(
        "--validation_split SHARE",
        kinds.share,
        "share of the corpus to hold out for evaluation "
        "(default: 0.1 where there is no validation split)",
    ),
    flag(
        "--max_bad_rows N",
        kinds.natural_int,
        "skip up to N rows that cannot be used, and name them",
        default=0,
    ),
    flag(
        "--chat_template FILE",
        kinds.name,
        "Jinja template for conversations (default: the tokenizer's own, else a plain one)",
    ),
    switch(
        "--streaming",
        "read and tokenize while training, for a corpus larger than the disk; needs --max_steps",
    ),
    flag(
        "--shuffle_buffer N",
        kinds.positive_int,
        "sequences among which --streaming shuffles, over all ranks",
        default=1000,
    ),
    flag(
        "--seq_length",
        kinds.block_length,
        "tokens in a sequence (default: 256 for tiny-gpt2, else 512, or as many "
        "as the model has positions)",
    ),
    *off_unless(
        "isolate_documents",
        "let tokens attend to their own document only, where a sequence has several "
        "(default: to all earlier tokens of the sequence)",
    ),
    switch(
        "--packing",
        "put several conversations or pairs into a sequence, instead of padding; each attends to "
        "itself only",
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
    flag("--batch_size N", kinds.batch, "sequences per GPU in a micro-batch", default=4),
    flag(
        "--eval_batch_size N",
        kinds.batch,
        "sequences per GPU in a batch of an evaluation (default: --batch_size)",
    ),
    flag(
        "--gradient_accumulation_steps", kinds.batch, "micro-batches per optimizer step", default=1
    ),
    switch(
        "--auto_micro_batch",
        "if memory runs out in the first steps, start again with half of --batch_size and twice "
        "the accumulation, until the run fits",
    ),
    flag("--epochs", kinds.epochs, "passes over the data (default: 1, or what --max_steps needs)"),
    flag("--max_steps", kinds.max_steps, "stop after this many optimizer steps"),
    flag(
        "--lr",
        kinds.rate,
        "peak learning rate (default: 5e-5, adapters 2e-4, random weights 5e-4; sgd 0.1)",
    ),
    flag(
        "--lr_scheduler NAME",
        kinds.scheduler,
        "decay after warm-up: linear, cosine, constant",
        default="linear",
        choices=("linear", "cosine", "constant"),
    ),
    flag("--warmup_steps", kinds.warmup_steps, "steps of linear warm-up", default=0),
    flag("--warmup_ratio", kinds.ratio, "warm-up as a share of all steps, rounded up", default=0.0),
    flag(
        "--optim NAME",
        kinds.optimizer,
        "adamw, adamw_8bit (bitsandbytes), adafactor, sgd, or Trainer's name of one of them",
        default="adamw",
        choices=tuple(OPTIMIZERS),
    ),
    flag("--adam_beta1", kinds.probability, "AdamW's decay of the first moment", default=0.9),
    flag("--adam_beta2", kinds.probability, "AdamW's decay of the second moment", default=0.999),
    flag("--adam_epsilon", kinds.positive_float, "AdamW's epsilon", default=1e-8),
    flag("--weight_decay", kinds.natural_float, "none on biases and norms", default=0.01),
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
        "--eval_every N",
        kinds.steps,
        "evaluate every N optimizer steps and at the end, instead of after each epoch",
    ),
    flag(
        "--early_stopping_patience K",
        kinds.positive_int,
        "stop after K evaluations in a row that were no better than the best (default: never)",
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
    flag("--ds_config FILE", kinds.name, "DeepSpeed JSON instead of ds_config_*.json"),
    flag("--fsdp_config FILE", kinds.name, "FSDP's options in JSON, as accelerate writes them"),
    flag(
        "--nvme_path DIR",
        kinds.name,
        "where infinity keeps its files (default: the temporary folder, TMPDIR)",
    ),
)
CLUSTER = (
    flag("--ddp_timeout", kinds.seconds, "seconds until a collective times out", default=1800),
    flag(
        "--hang_seconds N",
        kinds.seconds,
        "write every rank's stack to hang_report.txt in --output_dir if a collective waits longer "
        "(default: a tenth of --ddp_timeout)",
    ),
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
    flag("--save_every N", kinds.steps, "save a checkpoint every N steps (default: never)"),
    switch("--save_epochs", "write a checkpoint at the end of each epoch"),
    flag("--keep_last K", kinds.positive_int, "keep the newest K checkpoints only (default: all)"),
    switch("--no_save", "write no checkpoint, not even when a signal stops the run"),
    flag(
        "--resume PATH",
        kinds.checkpoint,
        "continue from the newest whole checkpoint in --output_dir (from the start if there is "
        "none), or from PATH",
        nargs="?",
        const=NEWEST,
    ),
    switch("--resume_force", "resume although the text, the batch or the seed has changed"),
    flag(
        "--export_hf DIR",
        kinds.name,
        "where the trained model goes, for from_pretrained (default: hf in --output_dir)",
    ),
    switch("--no_export", "do not write the trained model"),
    flag(
        "--export_dtype",
        ("fp32", "bf16", "fp16"),
        "type of the exported weights (default: %(default)s, as they are trained)",
        default="fp32",
    ),
    switch("--push_to_hub", "push the exported model to the Hugging Face hub at the end"),
    flag(
        "--hub_model_id NAME",
        kinds.repository,
        "repository to push to, with or without an owner (default: the name of --output_dir)",
    ),
    switch("--hub_private_repo", "create that repository as a private one"),
    flag(
        "--generate PROMPT",
        kinds.prompt,
        "print a continuation of this text at the end; after conversations, the answer to it",
    ),
    flag("--logging_steps", kinds.steps, "optimizer steps between two lines", default=10),
    flag(
        "--report_to LIST",
        kinds.reporters,
        "tensorboard, wandb, or both with a comma between (default: none; "
        "metrics.jsonl is always written)",
        default=[],
    ),
    flag(
        "--logging_dir DIR",
        kinds.name,
        "where the files of --report_to tensorboard go (default: tensorboard in --output_dir)",
    ),
    flag("--run_name NAME", kinds.word, "name of the run in the trackers"),
    flag(
        "--project NAME",
        kinds.word,
        "wandb's project (default: WANDB_PROJECT, else distributed-training; of a resumed run, its "
        "own)",
    ),
    flag(
        "--tags LIST",
        kinds.tags,
        "words for the run in the trackers, with commas between",
        default=[],
    ),
    switch("--quiet", "print warnings and errors only"),
)
DEBUGGING = (
    switch(
        "--profile_memory",
        "show memory after each phase and by kind of state (slows the last step on a CPU)",
    ),
    flag(
        "--simulate_gpus N",
        kinds.ranks,
        "measure the memory of rank 0 of N in this one process: real allocations, nothing "
        "communicated, no losses (3 steps)",
    ),
    flag(
        "--memory_snapshot FILE",
        kinds.name,
        "write PyTorch's snapshot of the GPU's memory, for pytorch.org/memory_viz",
    ),
    flag("--profile DIR", kinds.name, "write a trace of 3 steps, for ui.perfetto.dev"),
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
    "flags of Hugging Face's Trainer and run_clm.py that set others": CONVERTED,
}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help in which all names of a flag come before its value: --lr, --learning_rate LR."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        if action.nargs == 0 or action.type is kinds.boolean:
            return names
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{names} {value}"


def build_parser() -> Parser:
    """Build the parser of all flags, with defaults, limits and help."""
    parser = Parser(
        prog="real_model_example.py",
        usage="%(prog)s [flags]",
        description="Fine-tune a causal language model under one of seven data-parallel "
        "strategies.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
        formatter_class=lambda prog: HelpFormatter(prog, max_help_position=30, width=80),
    )
    parser.add_argument("--version", action="version", version=f"distributed-training {VERSION}")
    for name, options in COMMANDS:
        parser.add_argument(name, **options)
    for title, rows in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, options in rows:
            group.add_argument(*names_of(name), **options)
    for name, options in (*(switch(f"--{name}", "") for name in SWITCHES), *hidden_rows()):
        parser.add_argument(name, **{**options, "help": argparse.SUPPRESS})
    return parser
