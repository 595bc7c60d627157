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
    ("eval_only", "save_every save_epochs", "an evaluation writes no checkpoint"),
    ("eval_only", "resume", "it evaluates --model"),
    ("eval_only", "auto_micro_batch", "nothing is trained: use --eval_batch_size"),
    ("eval_only", "lora_r", "it evaluates --model as it is, and new adapters change nothing"),
    ("eval_only", "export_hf export_dtype", "nothing is trained"),
    ("no_save", "save_every save_epochs", ""),
    ("no_save", "load_best_at_end", "the best weights are loaded from a checkpoint"),
    ("no_export", "export_hf export_dtype", ""),
    ("no_export", "merge_lora", "the adapters are merged for the export"),
    ("no_export", "push_to_hub", "the exported model is pushed"),
    ("eval_only", "push_to_hub", "nothing is trained"),
    ("validation_file", "validation_split eval_split", ""),
    ("validation_split", "eval_split validation_split_percentage", ""),
    ("warmup_steps", "warmup_ratio", ""),
    (
        "text_column",
        "prompt_column completion_column",
        "a row is a text, or a prompt and a completion",
    ),
    ("profile", "profile_memory simulate_gpus", "both need torch's profiler"),
    ("prefetch", "check show_sample", ""),
    ("check", "show_sample", ""),
    ("simulate_gpus", "show_sample", ""),
    ("prefetch", "simulate_gpus", ""),
    ("prove", "check prefetch show_sample", ""),
    ("prove", "eval_only simulate_gpus", "it trains one step"),
    ("prove", "resume", "the gradient is read from the moments of Adam's first step"),
    ("prove", "streaming", "all ways must read the same sequences"),
    ("prove", "load_in_4bit", "all ways compute in fp32"),
    ("check", "simulate_gpus", "--check tests real ranks"),
    ("streaming", "epochs num_samples", UNKNOWN_LENGTH),
    ("streaming", "eval_split", "a stream is evaluated on --validation_file"),
    (
        "streaming",
        "validation_split validation_split_percentage",
        f"{UNKNOWN_LENGTH} (use --validation_file)",
    ),
    ("no_eval", _AT_INTERVALS, "it needs evaluations"),
    ("eval_only", _AT_INTERVALS, "it needs training"),
    (
        "simulate_gpus",
        "resume save_every save_epochs eval_only eval_first generate export_hf eval_every "
        "early_stopping_patience load_best_at_end merge_lora push_to_hub",
        "a simulation trains no model",
    ),
)
EXCLUDING = [(flag, other, why) for flag, others, why in _GROUPS for other in others.split()]

# A flag, one that it needs, and why.
NEEDING = (
    ("lora_alpha", "lora_r", ""),
    ("lora_dropout", "lora_r", ""),
    ("lora_targets", "lora_r", ""),
    ("merge_lora", "lora_r", ""),
    ("use_peft", "lora_r", "without it the whole model is trained (TRL's default is 16)"),
    ("load_in_4bit", "lora_r", "weights in 4 bits are frozen, and only adapters are trained"),
    ("resume_force", "resume", ""),
    ("hub_model_id", "push_to_hub", ""),
    ("hub_private_repo", "push_to_hub", ""),
    ("streaming", "max_steps", UNKNOWN_LENGTH),
)


def refuse_conflicts(args: Arguments) -> None:
    """Check that the flags can hold together."""
    for flag, other, reason in EXCLUDING:
        if _is_set(args, flag) and _is_set(args, other):
            reason = f" ({reason})" if reason else ""
            raise UserError(f"--{flag} and --{other} cannot both hold{reason}: leave one out.")
    for flag, other, reason in NEEDING:
        if _is_set(args, flag) and not _is_set(args, other):
            raise UserError(f"--{flag} needs --{other}" + (f": {reason}." if reason else "."))
    if args.resume == "" and args.output_dir is None:
        raise UserError(
            "--resume needs --output_dir, the run to continue; or name a checkpoint: --resume PATH."
        )
    if _is_set(args, "prove") and args.optim != "adamw":
        raise UserError(
            f"--prove reads the gradient from AdamW's moments: leave --optim {args.optim} out."
        )
    if args.hang_seconds and args.hang_seconds >= args.ddp_timeout:
        raise UserError(
            f"--hang_seconds {args.hang_seconds} must be less than --ddp_timeout "
            f"{args.ddp_timeout}, after which the run ends."
        )
    if args.use_peft is False and args.lora_r:
        raise UserError("--use_peft false and --lora_r cannot both hold: leave one out.")
    if args.packing and "isolate_documents" in args.given and not args.isolate_documents:
        raise UserError("--packing always isolates examples: leave --no_isolate_documents out.")
    if args.simulate_gpus and args.max_steps == 1:
        raise UserError(
            "--simulate_gpus needs --max_steps 2 or more: the first step creates Adam's states."
        )
    if args.streaming:
        _check_streaming(args)


def _check_streaming(args: Arguments) -> None:
    if args.early_stopping_patience and not args.eval_every:
        raise UserError(
            "--early_stopping_patience needs --eval_every with --streaming, which has no epochs "
            "after which to evaluate."
        )
    if args.mixture:
        raise UserError(
            "--streaming reads one dataset, and --dataset names several: leave out --streaming, or "
            "name a folder."
        )
    reads_pydocs = args.dataset == "pydocs" or (not args.dataset and args.model == EMBEDDED_MODEL)
    if reads_pydocs:
        raise UserError(
            "--streaming reads files or a dataset on the hub, and pydocs is a part of Python: "
            "leave it out."
        )
    if args.train_split and any(sign in args.train_split for sign in "[+"):
        raise UserError(
            f"--streaming reads a whole split, and --train_split {args.train_split} is a part or "
            "several: name one split."
        )


def _is_set(args: Arguments, flag: str) -> bool:
    if flag == "no_eval":
        return not args.eval
    if flag == "export_dtype":
        return args.export_dtype != "fp32"
    value = getattr(args, flag)
    return bool(value) or value == ""  # --resume without a path
