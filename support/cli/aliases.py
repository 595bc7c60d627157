"""Flag names of Hugging Face's Trainer, run_clm.py and other trainers, and what they mean here.

The same names are accepted on the command line and in run files. Any other name is unknown:
docs/COMING_FROM.md says what to use instead.
"""

from __future__ import annotations

from typing import Any

from support.cli.arguments import Arguments
from support.errors import UserError

# Our flag=other names of it, with the same values; --help lists them next to ours.
_NAMES = """
    model=model_name_or_path,model_name dataset=dataset_name,train_file
    dataset_config=dataset_config_name train_split=dataset_train_split
    eval_split=dataset_test_split text_column=dataset_text_field
    seq_length=block_size,max_seq_length,max_length num_samples=max_train_samples,data_size
    eval_samples=max_eval_samples batch_size=per_device_train_batch_size,micro_batch_size
    eval_batch_size=per_device_eval_batch_size epochs=num_train_epochs,num_epochs
    lr=learning_rate lr_scheduler=lr_scheduler_type warmup_steps=num_warmup_steps
    precision=mixed_precision lora_targets=lora_target_modules compile=torch_compile
    deterministic=full_determinism eval_first=eval_on_start eval_every=eval_steps
    eval_strategy=evaluation_strategy load_best_at_end=load_best_model_at_end
    ds_config=deepspeed_config overwrite=overwrite_output_dir save_every=save_steps
    keep_last=save_total_limit resume=resume_from_checkpoint
    gradient_checkpointing=activation_checkpointing hub_model_id=push_to_hub_model_id
    local_rank=local-rank
    """.split()
RENAMED = {flag: names.split(",") for flag, names in (entry.split("=") for entry in _NAMES)}
# Flags that have nothing to change here; one line names those that were given.
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
TRAINER_STEPS = 500  # Trainer's default of --save_steps and --eval_steps


def expand(values: dict[str, Any], spelled: dict[str, str]) -> None:
    """Set what --bf16, --fp16, --deepspeed and --fsdp set.

    Args:
        values: the flags of the command line or of the run file; changed in place.
        spelled: the option that set each flag; changed in place.
    """

    def put(flag: str, value: str, by: str) -> None:
        if values.setdefault(flag, value) != value:
            other = spelled[flag]
            raise UserError(f"{other} and {spelled[by]} both set --{flag}: leave one out.")
        spelled.setdefault(flag, spelled[by])

    halves = {half: values.pop(half) for half in ("bf16", "fp16") if half in values}
    for half in filter(halves.get, halves):
        put("precision", half, by=half)
    if halves and "precision" not in values:
        put("precision", "fp32", by=next(iter(halves)))
    if file := values.pop("deepspeed", None):
        put("ds_config", file, by="deepspeed")
    if values.get("fsdp"):
        put("strategy", "fsdp", by="fsdp")


def convert_trainer(args: Arguments) -> dict[str, Any]:
    """Return what --do_train, --do_eval, --eval_strategy and --save_strategy set."""
    changes: dict[str, Any] = {}
    if (saves := args.save_strategy) is not None:  # as in Trainer, steps count for "steps" only
        changes["save_every"] = (args.save_every or TRAINER_STEPS) if saves == "steps" else None
        changes["save_epochs"] = args.save_epochs or saves == "epoch"
    if args.eval_only or (args.do_eval and not args.do_train):
        return changes | {"eval_only": True}
    if args.eval_strategy is not None:
        in_steps = args.eval_strategy == "steps"
        changes["eval_every"] = (args.eval_every or TRAINER_STEPS) if in_steps else None
    if args.do_eval is False or (args.eval_strategy == "no" and not args.do_eval):
        changes["eval"] = False
    return changes
