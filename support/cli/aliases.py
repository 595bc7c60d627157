"""Flag names of Hugging Face's Trainer, run_clm.py and other trainers, and what they mean here.

The same names are accepted on the command line and in run files. Any other name is unknown:
docs/COMING_FROM.md says what to use instead.

RENAMED    other names of our flags, with the same values; --help lists them next to ours
IGNORED    flags that have nothing to change here; one line names those that were given
convert_…  what flags that set others do, such as --bf16 and --eval_strategy
"""

from __future__ import annotations

from typing import Any

from support.cli import argument_types as kinds
from support.cli.arguments import Arguments
from support.errors import UserError

RENAMED = {
    "model": ("model_name_or_path", "model_name"),
    "dataset": ("dataset_name", "train_file"),
    "dataset_config": ("dataset_config_name",),
    "train_split": ("dataset_train_split",),
    "eval_split": ("dataset_test_split",),
    "text_column": ("dataset_text_field",),
    "seq_length": ("block_size", "max_seq_length", "max_length"),
    "num_samples": ("max_train_samples", "data_size"),
    "eval_samples": ("max_eval_samples",),
    "batch_size": ("per_device_train_batch_size", "per_gpu_train_batch_size", "micro_batch_size"),
    "eval_batch_size": ("per_device_eval_batch_size", "per_gpu_eval_batch_size"),
    "epochs": ("num_train_epochs", "num_epochs"),
    "lr": ("learning_rate",),
    "lr_scheduler": ("lr_scheduler_type",),
    "warmup_steps": ("num_warmup_steps",),
    "precision": ("mixed_precision",),
    "lora_targets": ("lora_target_modules",),
    "compile": ("torch_compile",),
    "deterministic": ("full_determinism",),
    "eval_first": ("eval_on_start",),
    "eval_every": ("eval_steps",),
    "eval_strategy": ("evaluation_strategy",),
    "load_best_at_end": ("load_best_model_at_end",),
    "ds_config": ("deepspeed_config",),
    "overwrite": ("overwrite_output_dir",),
    "save_every": ("save_steps",),
    "keep_last": ("save_total_limit",),
    "resume": ("resume_from_checkpoint",),
    "gradient_checkpointing": ("activation_checkpointing",),
    "hub_model_id": ("push_to_hub_model_id",),
    "local_rank": ("local-rank",),
}
IGNORED = """
    attn_implementation batch_eval_metrics bf16_full_eval dataloader_in_order
    dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
    dataloader_pin_memory dataloader_prefetch_factor dataset_num_proc ddp_backend
    ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph
    disable_tqdm dispatch_batches enable_jit_checkpoint eval_accumulation_steps
    eval_do_concat_batches eval_use_gather_object fp16_backend fp16_full_eval fp16_opt_level
    half_precision_backend include_for_metrics include_inputs_for_metrics
    include_num_input_tokens_seen include_tokens_per_second jit_mode_eval label_names
    length_column_name liger_kernel_config log_level log_level_replica log_on_each_node
    logging_first_step logging_nan_inf_filter low_cpu_mem_usage overwrite_cache past_index
    prediction_loss_only preprocessing_num_workers ray_scope remove_unused_columns
    restore_callback_states_from_checkpoint save_on_each_node save_safetensors skip_memory_metrics
    torch_empty_cache_steps trust_remote_code use_cache use_fast_tokenizer
    use_legacy_prediction_loop use_liger_kernel
    """.split()

# Converted flags that set the same flag of ours.
SAME = {"bf16": "precision", "fp16": "precision", "deepspeed": "ds_config"}

# Trainer's default of --save_steps, --eval_steps and --logging_steps.
TRAINER_STEPS = 500
# Flags with which --do_eval alone is probably a mistake.
FLAGS_OF_TRAINING = frozenset(
    "epochs max_steps lr eval_strategy eval_every save_strategy save_every".split()
)
# Flags whose defaults are not those of run_clm.py.
DEFAULTS_DIFFER = ("epochs", "batch_size", "seq_length", "weight_decay", "precision")
AT_THE_END = kinds.MOST_STEPS  # as --eval_every: at the end of training only


def names_of(option: str) -> list[str]:
    """Return all spellings of a flag, ours first."""
    return [option, *(f"--{name}" for name in RENAMED.get(option[2:], ()))]


def convert_precision(values: dict[str, Any], below: dict[str, Any]) -> None:
    """Set `precision` from --bf16 and --fp16 [BOOL]; false is fp32, unless the other is true.

    Args:
        values: the flags of the command line or of the run file; changed in place.
        below: the flags that `values` overrides.
    """
    for name in ("bf16", "fp16"):
        value = values.pop(name, None)
        current = values.get("precision", below.get("precision", "auto"))
        if value:
            values["precision"] = name
        elif value is False and current in ("auto", name):
            values["precision"] = "fp32"


def convert_strategy(values: dict[str, Any], below: dict[str, Any], place: str = "") -> None:
    """Set `strategy` and `ds_config` from --deepspeed, --use_deepspeed, --fsdp and --use_fsdp.

    Args:
        values, below: see `convert_precision`.
        place: the run file that has the flags, with ": "; empty for the command line.
    Raises:
        UserError: the flags contradict each other, or a DeepSpeed file is missing.
    """
    dashes = "" if place else "--"
    file_or_switch = values.pop("deepspeed", None)
    if isinstance(file_or_switch, str):
        values["ds_config"], file_or_switch = file_or_switch, True
    deepspeed = values.pop("use_deepspeed", file_or_switch)
    fsdp = values.pop("use_fsdp", None) or values.get("fsdp")
    known = {**below, **values}
    strategy = known.get("strategy")
    if deepspeed and fsdp:
        raise UserError(
            f"{place}{dashes}deepspeed and {dashes}fsdp cannot both hold: leave one out."
        )
    contradicted = (
        ("deepspeed", deepspeed and strategy in ("dp", "fsdp")),
        ("fsdp (or use_fsdp)", fsdp and strategy not in (None, "fsdp")),
    )
    for switch, contradicts in contradicted:
        if contradicts:
            raise UserError(
                f"{place}{dashes}{switch} contradicts {dashes}strategy {strategy}: leave one out."
            )
    if deepspeed and not known.get("ds_config") and strategy is None:
        raise UserError(
            f"{place}{dashes}deepspeed needs a configuration ({dashes}deepspeed_config), or "
            f"{dashes}strategy zero1, zero2, zero3, offload or infinity."
        )
    if fsdp:
        values["strategy"] = "fsdp"
    if deepspeed is False and strategy in (None, "dp", "fsdp"):
        values.pop("ds_config", None)  # a file may configure the library that is off


def convert_trainer(args: Arguments) -> dict[str, Any]:
    """Return what --do_train, --do_eval, --eval_strategy and --save_strategy set.

    Raises:
        UserError: they contradict each other or other flags.
    """
    changes: dict[str, Any] = {}
    eval_only = args.eval_only or (args.do_eval and not args.do_train)
    if args.do_train is False and not eval_only:
        raise UserError(
            "--do_train false leaves nothing to do: add --do_eval to evaluate, or leave it out."
        )
    of_training = sorted(args.given & FLAGS_OF_TRAINING)
    if eval_only and not args.eval_only and args.do_train is None and of_training:
        raise UserError(
            f"--do_eval without --do_train evaluates only, and --{of_training[0]} needs training: "
            "add --do_train to train, or leave one out."
        )
    for what in ("eval", "save"):
        strategy, steps = getattr(args, f"{what}_strategy"), getattr(args, f"{what}_every")
        if strategy in ("no", "epoch", "best") and steps:
            raise UserError(
                f"--{what}_strategy {strategy} and --{what}_steps {steps} cannot both hold: leave "
                "one out."
            )
    if args.save_strategy == "best" and not args.load_best_at_end:
        raise UserError("--save_strategy best needs --load_best_at_end: add it.")
    if args.save_strategy == "epoch":
        changes["save_epochs"] = True
    elif args.save_strategy == "steps":
        changes["save_every"] = args.save_every or TRAINER_STEPS
    if eval_only:
        return changes | {"eval_only": True}
    if args.eval_strategy == "no" and args.do_eval:
        changes["eval_every"] = AT_THE_END
    elif args.eval_strategy == "no" or args.do_eval is False:
        changes["eval"] = False
    elif args.eval_strategy == "steps":  # Trainer's default is --logging_steps
        logged = args.logging_steps if "logging_steps" in args.given else TRAINER_STEPS
        changes["eval_every"] = args.eval_every or logged
    return changes


def lines_for_user(args: Arguments) -> list[str]:
    """Return a line with the ignored flags, and one about defaults that differ from Trainer's."""
    lines = []
    if ignored := sorted(args.given & {*IGNORED}):
        lines.append(f"Ignored, because there is nothing to change here: --{', --'.join(ignored)}")
    different = [name for name in DEFAULTS_DIFFER if name not in args.given]
    if args.do_train and different:
        lines.append(
            f"Without --{', --'.join(different)} the defaults are not run_clm.py's: see "
            "docs/COMING_FROM.md"
        )
    return lines
