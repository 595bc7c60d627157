"""Flags that exclude each other, and flags that need another one."""

from __future__ import annotations

from support.cli.arguments import Arguments
from support.errors import UserError
from support.known_models import EMBEDDED_MODEL

# Flags that need evaluations; all but the first need them during training.
NEED_EVALUATIONS = ("eval_only", "eval_every", "early_stopping_patience", "load_best_at_end")
_AT_INTERVALS = " ".join(NEED_EVALUATIONS[1:])

# A flag, and those that it excludes.
EXCLUDED = {
    "eval_only": "no_eval save_every save_epochs resume auto_micro_batch lora_r export_hf "
    f"export_dtype push_to_hub {_AT_INTERVALS}",
    "no_save": "save_every save_epochs load_best_at_end",
    "no_export": "export_hf export_dtype merge_lora push_to_hub",
    "no_eval": _AT_INTERVALS,
    "validation_file": "validation_split eval_split",
    "validation_split": "eval_split validation_split_percentage",
    "warmup_steps": "warmup_ratio",
    "text_column": "prompt_column completion_column",
    "profile": "profile_memory simulate_gpus",
    "prefetch": "check show_sample simulate_gpus",
    "show_sample": "check simulate_gpus",
    "check": "simulate_gpus",
    # All ways of --prove make the first step on the same sequences, in fp32.
    "prove": "check prefetch show_sample eval_only simulate_gpus resume streaming load_in_4bit",
    # The length of a stream is not known in advance.
    "streaming": "epochs num_samples eval_split validation_split validation_split_percentage",
    # A simulation trains no model.
    "simulate_gpus": "resume save_every save_epochs eval_only eval_first generate export_hf "
    f"merge_lora push_to_hub {_AT_INTERVALS}",
}
EXCLUDING = [(flag, other) for flag, others in EXCLUDED.items() for other in others.split()]
# A flag, and one that it needs.
NEEDING = [
    *((flag, "lora_r") for flag in ("lora_alpha", "lora_dropout", "lora_targets", "merge_lora")),
    *((flag, "lora_r") for flag in ("use_peft", "load_in_4bit")),
    *((flag, "push_to_hub") for flag in ("hub_model_id", "hub_private_repo")),
    ("resume_force", "resume"),
    ("streaming", "max_steps"),
]


def refuse_conflicts(args: Arguments) -> None:
    """Check that the flags can hold together."""
    for flag, other in EXCLUDING:
        if _is_set(args, flag) and _is_set(args, other):
            raise UserError(f"--{flag} and --{other} cannot both hold: leave one out.")
    for flag, other in NEEDING:
        if _is_set(args, flag) and not _is_set(args, other):
            raise UserError(f"--{flag} needs --{other}.")
    for problem, holds in _other_problems(args).items():
        if holds:
            raise UserError(f"{problem}.")


def _other_problems(args: Arguments) -> dict[str, object]:
    """Return messages, and whether each applies."""
    dataset = args.dataset or ("pydocs" if args.model == EMBEDDED_MODEL else "")
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
            args.streaming and args.early_stopping_patience and not args.eval_every
        ),
        "--streaming reads one --dataset: a file, a folder or a dataset on the hub, not pydocs": (
            args.streaming and (args.mixture or dataset == "pydocs")
        ),
        f"--streaming reads a whole split: --train_split {args.train_split} is a part or several": (
            args.streaming and {*"[+"} & {*(args.train_split or "")}
        ),
    }


def _is_set(args: Arguments, flag: str) -> bool:
    if flag == "no_eval":
        return not args.eval
    if flag == "export_dtype":
        return args.export_dtype != "fp32"
    value = getattr(args, flag)
    return bool(value) or value == ""  # --resume without a path
