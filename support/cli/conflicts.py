"""Flags that exclude each other, and flags that need another one."""

from __future__ import annotations

from support.cli.arguments import Arguments
from support.errors import UserError
from support.known_models import EMBEDDED_MODEL

# Flags that need evaluations; all but the first need them during training.
NEED_EVALUATIONS = ("eval_only", "eval_every", "early_stopping_patience", "load_best_at_end")
_AT_INTERVALS = " ".join(NEED_EVALUATIONS[1:])
UNKNOWN_LENGTH = "the length of a stream is not known in advance"

# A flag, those that it excludes, and why, if that needs an explanation.
_GROUPS = (
    ("eval_only", "no_eval", ""),
    (
        "eval_only",
        "save_every save_epochs resume auto_micro_batch export_hf export_dtype push_to_hub "
        + _AT_INTERVALS,
        "nothing is trained",
    ),
    ("eval_only", "lora_r", "it evaluates --model as it is, and new adapters change nothing"),
    ("no_save", "save_every save_epochs", ""),
    ("no_save", "load_best_at_end", "the best weights are loaded from a checkpoint"),
    ("no_export", "export_hf export_dtype merge_lora push_to_hub", ""),
    ("no_eval", _AT_INTERVALS, "it needs evaluations"),
    ("validation_file", "validation_split eval_split", ""),
    ("validation_split", "eval_split validation_split_percentage", ""),
    ("warmup_steps", "warmup_ratio", ""),
    ("text_column", "prompt_column completion_column", "a row is a text, or a pair"),
    ("profile", "profile_memory simulate_gpus", "both need torch's profiler"),
    ("prefetch", "check show_sample simulate_gpus", ""),
    ("show_sample", "check simulate_gpus", ""),
    ("check", "simulate_gpus", "--check tests real ranks"),
    ("prove", "check prefetch show_sample", ""),
    ("prove", "eval_only simulate_gpus resume", "it trains the first step"),
    ("prove", "streaming load_in_4bit", "all ways read the same sequences and compute in fp32"),
    ("streaming", "epochs num_samples", UNKNOWN_LENGTH),
    (
        "streaming",
        "eval_split validation_split validation_split_percentage",
        f"{UNKNOWN_LENGTH} (use --validation_file)",
    ),
    (
        "simulate_gpus",
        "resume save_every save_epochs eval_only eval_first generate export_hf merge_lora "
        f"push_to_hub {_AT_INTERVALS}",
        "a simulation trains no model",
    ),
)
EXCLUDING = [(flag, other, why) for flag, others, why in _GROUPS for other in others.split()]

# A flag, one that it needs, and why.
NEEDING = (
    *((flag, "lora_r", "") for flag in ("lora_alpha", "lora_dropout", "lora_targets")),
    ("merge_lora", "lora_r", ""),
    ("use_peft", "lora_r", "without it the whole model is trained (TRL's default is 16)"),
    ("load_in_4bit", "lora_r", "weights in 4 bits are frozen, and only adapters are trained"),
    ("resume_force", "resume", ""),
    ("hub_model_id", "push_to_hub", ""),
    ("hub_private_repo", "push_to_hub", ""),
    ("streaming", "max_steps", UNKNOWN_LENGTH),
)


def refuse_conflicts(args: Arguments) -> None:
    """Check that the flags can hold together.

    Raises:
        UserError: two exclude each other, or one needs another.
    """
    for flag, other, reason in EXCLUDING:
        if _is_set(args, flag) and _is_set(args, other):
            reason = f" ({reason})" if reason else ""
            raise UserError(f"--{flag} and --{other} cannot both hold{reason}: leave one out.")
    for flag, other, reason in NEEDING:
        if _is_set(args, flag) and not _is_set(args, other):
            raise UserError(f"--{flag} needs --{other}" + (f": {reason}." if reason else "."))
    for problem, holds in _other_problems(args).items():
        if holds:
            raise UserError(f"{problem}.")


def _other_problems(args: Arguments) -> dict[str, object]:
    """Return messages, and whether each applies."""
    dataset = args.dataset or ("pydocs" if args.model == EMBEDDED_MODEL else "")
    streams, part = args.streaming, {*"[+"} & {*(args.train_split or "")}
    return {
        "--resume needs --output_dir, the run to continue; or name a checkpoint: --resume PATH": (
            args.resume == "" and args.output_dir is None
        ),
        f"--prove reads the gradient from AdamW's moments: leave --optim {args.optim} out": (
            args.prove and args.optim != "adamw"
        ),
        "--packing always isolates examples: leave --no_isolate_documents out": (
            args.packing and "isolate_documents" in args.given and not args.isolate_documents
        ),
        "--simulate_gpus needs --max_steps 2 or more: the first step creates Adam's states": (
            args.simulate_gpus and args.max_steps == 1
        ),
        "--early_stopping_patience needs --eval_every with --streaming, which has no epochs": (
            streams and args.early_stopping_patience and not args.eval_every
        ),
        "--streaming reads one --dataset: a file, a folder or a dataset on the hub, not pydocs": (
            streams and (args.mixture or dataset == "pydocs")
        ),
        f"--streaming reads a whole split: --train_split {args.train_split} is a part or several": (
            streams and part
        ),
    }


def _is_set(args: Arguments, flag: str) -> bool:
    if flag == "no_eval":
        return not args.eval
    if flag == "export_dtype":
        return args.export_dtype != "fp32"
    value = getattr(args, flag)
    return bool(value) or value == ""  # --resume without a path
