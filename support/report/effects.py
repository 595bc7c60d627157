"""The effect on the losses of each thing that may differ between two runs."""

from __future__ import annotations

from dataclasses import dataclass

from support.cli.flags import COMMANDS, GROUPS

# Entries of the run signature that have another name here, because a flag has theirs.
SIGNATURE_NAMES = {
    "dataset": "data digest",
    "blocks": "sequences",
    "validation": "validation digest",
}


@dataclass(frozen=True)
class Effect:
    """What a difference between two runs can change."""

    on: str  # "losses"; "rounding": the losses, up to rounding; "evaluations" only; or "nothing"
    text: str  # the same for the user
    first_step: int = 1  # the first step whose loss it can change


MODEL = Effect("losses", "another model")
WEIGHTS = Effect("losses", "other initial weights")
TOKENS = Effect("losses", "other tokens")
DATA = Effect("losses", "other data")
ORDER = Effect("losses", "changes the order of the data")
BATCH = Effect("losses", "other sequences in each step")
SEQUENCES = Effect("losses", "other sequences")
DROPOUT = Effect("losses", "drops other elements")
RATE = Effect("losses", "changes the learning rate", 2)
UPDATE = Effect("losses", "changes the updates", 2)
FILE = Effect("losses", "the file's content is not recorded: compare the files", 2)
ROUNDING = Effect("rounding", "same result expected")
CODE = Effect("rounding", "same result expected, unless the computation was changed")
MASKS = Effect("rounding", "same result expected (with dropout, other masks)")
RESUMED = Effect("rounding", "same result expected, on a CPU bit for bit")
EVALUATION = Effect("evaluations", "changes evaluations only")
BY_DIGEST = Effect("nothing", "no effect but that on the data, see its digest")
NOTHING = Effect("nothing", "no effect on losses")
UNKNOWN = Effect("losses", "effect not known")

# In the order in which the causes of a difference are named: the entries of the run signature
# (support/checkpoints/compatibility.py), then the other flags and facts of a run.
_EFFECTS = {
    MODEL: "parameters shapes lora_r lora_alpha lora_targets load_in_4bit",
    WEIGHTS: "model model_revision from_scratch",
    TOKENS: "tokenizer template chat_template",
    ORDER: "seed sequences num_samples validation_split validation_split_percentage streaming "
    "shuffle_buffer",
    SEQUENCES: "seq_length packing isolate_documents",
    DROPOUT: "dropout lora_dropout",
    RATE: "lr lr_scheduler warmup_steps warmup_ratio epochs max_steps",
    UPDATE: "optim adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm",
    BATCH: "train_batch_size",
    FILE: "ds_config fsdp_config",
    ROUNDING: "strategy precision fused_gelu compile deterministic gradient_checkpointing backend "
    "gpu cpu cores",
    MASKS: "ranks batch_size gradient_accumulation_steps device",
    CODE: "code_digest",
    RESUMED: "resume resume_force",
    EVALUATION: "eval eval_first eval_only eval_every eval_samples eval_batch_size eval_split "
    "validation_file early_stopping_patience load_best_at_end",
    BY_DIGEST: "dataset dataset_config dataset_revision train_split include text_column "
    "prompt_column completion_column max_bad_rows",
    NOTHING: "host ram_bytes gpu_memory_bytes launcher simulated_world_size cache_dir merge_lora "
    "nvme_path auto_micro_batch",
}
_GROUPS_WITHOUT_EFFECT = ("run file", "cluster", "output", "debugging")
EFFECTS = {
    **{
        flag.removeprefix("--"): NOTHING
        for rows in (COMMANDS, *(GROUPS[name] for name in _GROUPS_WITHOUT_EFFECT))
        for flag, _ in rows
    },
    "frozen weights": WEIGHTS,
    "data digest": DATA,
    "validation digest": EVALUATION,
    "global batch": BATCH,
    **{name: effect for effect, names in _EFFECTS.items() for name in names.split()},
    **{f"{name} version": ROUNDING for name in ("torch", "deepspeed", "transformers", "numpy")},
    **{f"{name} version": ROUNDING for name in ("peft", "cuda", "rocm")},
    **{f"{name} version": BY_DIGEST for name in ("python", "datasets", "tokenizers")},
}
