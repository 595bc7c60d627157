"""Flag names of Hugging Face's Trainer, run_clm.py and other trainers, and what they mean here.

The same names are accepted on the command line and in run files.

RENAMED    other names of our flags, with the same values; --help lists them next to ours
CONVERTED  flags that set ours to another value, such as --bf16
IGNORED    flags that have nothing to change here; a line names the reason
REFUSED    flags with another meaning, or with none here; only a value that changes nothing is
           accepted
"""

from __future__ import annotations

import argparse

from support.cli import argument_types as kinds
from support.cli.argument_types import flag, switch
from support.cli.arguments import choose_seq_length
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
    "batch_size": ("per_device_train_batch_size", "per_gpu_train_batch_size"),
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
    "load_best_at_end": ("load_best_model_at_end",),
    "ds_config": ("deepspeed_config",),
    "overwrite": ("overwrite_output_dir",),
    "save_every": ("save_steps",),
    "keep_last": ("save_total_limit",),
    "resume": ("resume_from_checkpoint",),
    "gradient_checkpointing": ("activation_checkpointing",),
    "hub_model_id": ("push_to_hub_model_id",),
}

_ALL_CORES = "the text is tokenized on all cores"
_READ_AHEAD = "a thread reads the next batches"
_SILENT = "--quiet and --verbose choose what is printed"
_LOSS_ONLY = "an evaluation computes the loss only"
_LOSS_SCALING = "fp16 is PyTorch's or DeepSpeed's mixed precision"
IGNORED = {
    "preprocessing_num_workers": _ALL_CORES,
    "dataset_num_proc": _ALL_CORES,
    "overwrite_cache": "the cache is renewed whenever the text or the tokenizer changes",
    "dataloader_num_workers": _READ_AHEAD,
    "dataloader_pin_memory": _READ_AHEAD,
    "dataloader_persistent_workers": _READ_AHEAD,
    "dataloader_prefetch_factor": _READ_AHEAD,
    "dataloader_in_order": _READ_AHEAD,
    "dataloader_multiprocessing_context": _READ_AHEAD,
    "dispatch_batches": _READ_AHEAD,
    "remove_unused_columns": "only the columns of the text are read",
    "trust_remote_code": "code from a model's repository is never executed",
    "attn_implementation": "attention is PyTorch's scaled_dot_product_attention",
    "low_cpu_mem_usage": "weights are always mapped from their file",
    "logging_first_step": "the first step is always logged",
    "log_level": _SILENT,
    "log_level_replica": _SILENT,
    "disable_tqdm": _SILENT,
    "include_num_input_tokens_seen": "metrics.jsonl always counts tokens",
    "include_tokens_per_second": "metrics.jsonl always counts tokens",
    "skip_memory_metrics": "memory is always measured",
    "log_on_each_node": "rank 0 prints for all nodes",
    "logging_nan_inf_filter": "a loss that is not finite stops the run",
    "prediction_loss_only": _LOSS_ONLY,
    "eval_accumulation_steps": _LOSS_ONLY,
    "eval_do_concat_batches": _LOSS_ONLY,
    "eval_use_gather_object": _LOSS_ONLY,
    "batch_eval_metrics": _LOSS_ONLY,
    "include_for_metrics": _LOSS_ONLY,
    "include_inputs_for_metrics": _LOSS_ONLY,
    "use_legacy_prediction_loop": _LOSS_ONLY,
    "past_index": _LOSS_ONLY,
    "jit_mode_eval": "an evaluation runs the model as training does",
    "label_names": "the labels are the tokens",
    "length_column_name": "lengths are counted, not read",
    "bf16_full_eval": "an evaluation computes in --precision",
    "fp16_full_eval": "an evaluation computes in --precision",
    "fp16_opt_level": _LOSS_SCALING,
    "fp16_backend": _LOSS_SCALING,
    "half_precision_backend": _LOSS_SCALING,
    "ddp_backend": "GPUs use NCCL, and CPU processes gloo",
    "ddp_bucket_cap_mb": "DDP's buckets have PyTorch's default size",
    "ddp_broadcast_buffers": "training changes no buffer",
    "ddp_static_graph": "DDP needs no hint",
    "use_liger_kernel": "the loss is always computed in chunks of the logits",
    "liger_kernel_config": "the loss is always computed in chunks of the logits",
    "use_cache": "training uses no cache of keys and values",
    "torch_empty_cache_steps": "PyTorch keeps the memory that it has allocated",
    "enable_jit_checkpoint": "a stop signal always saves a checkpoint",
    "restore_callback_states_from_checkpoint": "there are no callbacks",
    "ray_scope": "there is no search of hyperparameters",
}

_TOKENIZER = "the tokenizer is that of --model: save another one to a copy of the model's folder"
_SHAPE = "a new model has the architecture of --model: use --from_scratch --model NAME_OR_FOLDER"
_TOKEN = "a token on a command line can be read by every user of the machine: set HF_TOKEN"
_WEIGHTS = "trained weights are kept in fp32, and --precision chooses the type of the computation"
_LOSS = "the loss is the plain mean over the valid tokens"
_BEST = "the best evaluation is the one with the lowest loss"
_RECOMPUTED = "checkpointing is the variant without reentrant backward, in every layer"
_MICRO_BATCH = "--batch_size is the micro-batch of each rank"
_DATA_PARALLEL = "the ranks share the data, not a layer: --strategy zero3 shards the parameters"
_CPU = "GPUs are used if there are any: CUDA_VISIBLE_DEVICES= hides them"
_HARDWARE = "training uses NVIDIA or AMD GPUs, else the CPU"
_TRACKIO = "the trackers are tensorboard and wandb (--report_to)"
_SHARDED = "every transformer block is sharded: --fsdp_config FILE chooses other layers"
# Flag -> (values, in lower case and without spaces, that change nothing; the reason to refuse all
# others). A value such as "--seed" means the same value as that flag's.
REFUSED = {
    "config_name": (("--model",), _SHAPE),
    "config_overrides": ((), _SHAPE),
    "model_type": ((), _SHAPE),
    "tokenizer_name": (("--model",), _TOKENIZER),
    "use_fast_tokenizer": (("true",), _TOKENIZER),
    "torch_dtype": (("auto", "float32"), _WEIGHTS),
    "dtype": (("auto", "float32"), _WEIGHTS),
    "load_in_8bit": (("false",), "frozen weights have 16 bits, or 4 with --load_in_4bit"),
    "keep_linebreaks": (("true",), "the text is used as it is, with its line breaks"),
    "group_by_length": (
        ("false",),
        "the order is drawn from --seed; --packing avoids the padding of examples",
    ),
    "train_sampling_strategy": (("random",), "the order of the data is drawn from --seed"),
    "data_seed": (("--seed",), "--seed draws the order of the data, too"),
    "split_batches": (("false",), _MICRO_BATCH),
    "accelerator_config": ((), _MICRO_BATCH),
    "parallelism_config": ((), _DATA_PARALLEL),
    "tp_size": (("0", "1"), _DATA_PARALLEL),
    "mp_parameters": ((), _DATA_PARALLEL),
    "sharded_ddp": (("false",), "use --strategy zero2 or fsdp"),
    "fsdp_min_num_params": (("0",), _SHARDED),
    "fsdp_transformer_layer_cls_to_wrap": ((), _SHARDED),
    "dataloader_drop_last": (("false",), "every sequence of an epoch is used"),
    "label_smoothing_factor": (("0", "0.0"), _LOSS),
    "average_tokens_across_devices": (("true",), _LOSS),
    "neftune_noise_alpha": (("0", "0.0"), "the embeddings get no noise"),
    "adafactor": (("false",), "use --optim adafactor"),
    "optim_target_modules": ((), "every layer has the optimizer --optim; see --lora_targets"),
    "optim_args": ((), "the optimizer's settings are flags of their own: --help lists them"),
    "lr_scheduler_kwargs": ((), "the schedules have no other settings than --warmup_steps"),
    "auto_find_batch_size": (
        ("false",),
        "another batch size would train another model: --auto_micro_batch keeps the global batch",
    ),
    "gradient_checkpointing_kwargs": (('{"use_reentrant":false}',), _RECOMPUTED),
    "activation_checkpointing_kwargs": (('{"use_reentrant":false}',), _RECOMPUTED),
    "torch_compile_backend": (("inductor",), "--compile uses inductor in its default mode"),
    "torch_compile_mode": (("default",), "--compile uses inductor in its default mode"),
    "tf32": (("true",), "fp32 multiplies matrices in TF32 where the GPU has it"),
    "torchdynamo": ((), "use --compile"),
    "use_cpu": (("false",), _CPU),
    "no_cuda": (("false",), _CPU),
    "use_ipex": (("false",), _HARDWARE),
    "use_mps_device": (("false",), _HARDWARE),
    "xpu_backend": ((), _HARDWARE),
    "tpu_num_cores": ((), _HARDWARE),
    "tpu_metrics_debug": (("false",), _HARDWARE),
    "debug": ((), "a loss that is not finite stops the run; --verbose prints tracebacks"),
    "ddp_find_unused_parameters": (("false",), "every parameter takes part in every step"),
    "logging_strategy": (("steps",), "lines are printed every --logging_steps steps"),
    "eval_delay": (("0", "0.0"), "evaluations begin with the first epoch, or after --eval_every"),
    "with_tracking": (("false",), "use --report_to tensorboard or wandb"),
    "trackio_space_id": ((), _TRACKIO),
    "trackio_bucket_id": ((), _TRACKIO),
    "trackio_static_space_id": ((), _TRACKIO),
    "checkpointing_steps": ((), "use --save_every N, or --save_epochs"),
    "metric_for_best_model": (("loss", "eval_loss"), _BEST),
    "greater_is_better": (("false",), _BEST),
    "save_only_model": (("false",), "a checkpoint has all that --resume needs; see --no_save"),
    "save_safetensors": (("true",), "checkpoints are safetensors and JSON"),
    "save_on_each_node": (("false",), "each rank writes its part of a checkpoint once"),
    "ignore_data_skip": (("false",), "a resumed run continues at its position in the data"),
    "do_predict": (("false",), "--eval_only evaluates, and --generate continues a text"),
    "hub_strategy": (("end",), "the model is pushed once, at the end"),
    "hub_always_push": (("true", "false"), "the model is pushed once, at the end"),
    "hub_revision": (("main",), "the model is pushed to the branch main"),
    "push_to_hub_organization": ((), "use --hub_model_id ORGANIZATION/NAME"),
    "push_to_hub_token": ((), _TOKEN),
    "hub_token": ((), _TOKEN),
    "token": ((), _TOKEN),
    "use_auth_token": ((), _TOKEN),
}

# Flags of the tables above with several values.
LISTS = ("include_for_metrics", "label_names")
# Flags of the tables above that are on by default there, and have a --no_… for that reason.
ON_BY_DEFAULT = (
    *("dataloader_pin_memory", "dataloader_in_order", "remove_unused_columns", "log_on_each_node"),
    *("logging_nan_inf_filter", "eval_do_concat_batches", "skip_memory_metrics"),
    *("average_tokens_across_devices", "save_safetensors", "keep_linebreaks"),
    "use_fast_tokenizer",
)

# Trainer's default of --save_steps, --eval_steps and --logging_steps.
TRAINER_STEPS = 500
AT_THE_END = kinds.MOST_STEPS  # as --eval_every: at the end of training only
# Flags with which --do_eval alone is probably a mistake.
FLAGS_OF_TRAINING = frozenset(
    "epochs max_steps lr eval_strategy eval_every save_strategy save_every".split()
)
# Our flag -> (run_clm.py's default, flags that replace it), where the defaults differ.
DEFAULTS: dict[str, tuple[object, tuple[str, ...]]] = {
    "epochs": (3, ("max_steps",)),
    "batch_size": (8, ()),
    "seq_length": (1024, ()),
    "weight_decay": (0, ()),
    "precision": ("fp32", ()),
    "validation_split": (0.05, ("validation_split_percentage", "validation_file", "eval_split")),
    "save_every": (500, ("save_epochs", "save_strategy", "no_save")),
}


class _Precision(argparse.Action):
    """--bf16 and --fp16 [BOOL]; false means fp32, unless the other one is true."""

    def __call__(self, parser, namespace, values, option_string=None):
        ours = self.option_strings[0][2:]
        if values:
            namespace.precision = ours
        elif getattr(namespace, "precision", "auto") in ("auto", ours):
            namespace.precision = "fp32"


class _Deepspeed(argparse.Action):
    """--deepspeed [FILE], as in transformers' Trainer and DeepSpeed's own argument parser."""

    def __call__(self, parser, namespace, values, option_string=None):
        namespace.use_deepspeed = True
        if values is not None:
            namespace.ds_config = values


_BOOLEAN = {"nargs": "?", "const": True, "type": kinds.boolean}
_PRECISION = {**_BOOLEAN, "action": _Precision, "dest": "precision", "default": argparse.SUPPRESS}
_WHEN = ("no", "steps", "epoch")
CONVERTED = (
    ("--bf16", {**_PRECISION, "help": "--precision bf16"}),
    ("--fp16", {**_PRECISION, "help": "--precision fp16"}),
    switch("--use_peft", "train adapters, which needs --lora_r", default=None),
    switch("--do_train", "train, as without this flag", default=None),
    switch("--do_eval", "evaluate; without --do_train, do not train (--eval_only)", default=None),
    flag(
        "--eval_strategy",
        _WHEN,
        "epoch: as by default. steps: --eval_every 500. no: --no_eval, or with --do_eval an "
        "evaluation at the end",
    ),
    flag(
        "--save_strategy",
        (*_WHEN, "best"),
        "epoch: --save_epochs. steps: --save_every 500. no: as by default. best: as by "
        "--load_best_at_end, which it needs",
    ),
    flag(
        "--validation_split_percentage N",
        kinds.whole(1, 99),
        "--validation_split N/100, if the dataset has no validation split",
    ),
    flag(
        "--deepspeed FILE",
        kinds.name,
        "--ds_config FILE",
        nargs="?",
        action=_Deepspeed,
        default=argparse.SUPPRESS,
    ),
    flag(
        "--fsdp OPTIONS",
        kinds.fsdp_options,
        "--strategy fsdp, with options such as 'full_shard auto_wrap offload'",
        nargs="?",
        const="full_shard auto_wrap",
    ),
)
# Further spellings, of older releases of transformers and of torch's launcher.
OLDER = {"--eval_strategy": ("--evaluation_strategy",), "--local_rank": ("--local-rank",)}


def names_of(option: str) -> list[str]:
    """Return all spellings of a flag, ours first."""
    renamed = [f"--{name}" for name in RENAMED.get(option[2:], ())]
    return [option, *renamed, *OLDER.get(option, ())]


def hidden_rows() -> list[tuple[str, dict]]:
    """Return the rows of flags that --help does not list."""
    hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    value = {**hidden, "nargs": "?", "const": "true"}
    values = {**hidden, "nargs": "*"}
    off = {**hidden, "action": "store_const", "const": "false"}
    return [
        *((f"--{name}", values if name in LISTS else value) for name in (*IGNORED, *REFUSED)),
        *((f"--no_{name}", {**off, "dest": name}) for name in ON_BY_DEFAULT),
    ]


def apply_converted(args) -> None:
    """Set our flags from those of CONVERTED that depend on each other, and remove these.

    Flags of IGNORED and REFUSED are checked and removed, too.

    Args:
        args: the parsed flags, with `given`; changed in place.
    """
    for name in sorted(args.given & {*IGNORED, *REFUSED}):
        if name in REFUSED:
            _check_changes_nothing(args, name)
        delattr(args, name)
    _check_use_peft(args)
    _apply_tasks(args)
    _apply_strategies(args)
    for name in ("use_peft", "do_train", "do_eval", "eval_strategy", "save_strategy"):
        delattr(args, name)


def _check_changes_nothing(args, name: str) -> None:
    """Raise a UserError unless a flag of REFUSED has a value that changes nothing."""
    accepted, reason = REFUSED[name]
    value = str(getattr(args, name))
    ours = [str(getattr(args, flag[2:])) for flag in accepted if flag.startswith("--")]
    if value not in ours and "".join(value.lower().split()) not in accepted:
        values = " or ".join(
            f"the value of {flag}" if flag.startswith("--") else flag for flag in accepted
        )
        raise UserError(
            f"--{name} cannot be used here: {reason}"
            + (f" (--{name} {values} is accepted)." if accepted else ".")
        )


def _check_use_peft(args) -> None:
    """Check that --use_peft and --lora_r agree."""
    if args.use_peft and not args.lora_r:
        raise UserError(
            "--use_peft needs --lora_r, without which the whole model is trained: add --lora_r 16, "
            "TRL's default, or leave --use_peft out."
        )
    if args.use_peft is False and args.lora_r:
        raise UserError(
            "--use_peft false and --lora_r cannot both hold (--lora_r trains adapters): leave one "
            "out."
        )


def _apply_tasks(args) -> None:
    """Without --do_train, --do_eval is an evaluation only."""
    if args.do_train is False and not (args.do_eval or args.eval_only):
        raise UserError(
            "--do_train false leaves nothing to do: add --do_eval to evaluate, or leave it out."
        )
    of_training = sorted(args.given & FLAGS_OF_TRAINING)
    if args.do_eval and args.do_train is None and not args.eval_only and of_training:
        raise UserError(
            f"--do_eval without --do_train evaluates only, and --{of_training[0]} needs training: "
            "add --do_train to train, or leave one out."
        )
    if args.do_eval and not args.do_train:
        args.eval_only = True
    if args.do_eval is False and not args.eval_only:
        args.eval = False


def _apply_strategies(args) -> None:
    """Set when to evaluate and when to save, by --eval_strategy and --save_strategy."""
    for what in ("eval", "save"):
        strategy, steps = getattr(args, f"{what}_strategy"), getattr(args, f"{what}_every")
        if strategy in ("no", "epoch", "best") and steps:
            raise UserError(
                f"--{what}_strategy {strategy} and --{what}_steps {steps} cannot both hold: leave "
                "one out."
            )
    if args.save_strategy == "best" and not args.load_best_at_end:
        raise UserError(
            "--save_strategy best needs --load_best_at_end, which saves the weights of the best "
            "evaluation, and ends with them."
        )
    if args.save_strategy == "epoch":
        args.save_epochs = True
    elif args.save_strategy == "steps":
        args.save_every = args.save_every or TRAINER_STEPS
    if args.eval_only:
        return
    if args.eval_strategy == "no" and args.do_eval:
        args.eval_every = AT_THE_END
    elif args.eval_strategy == "no":
        args.eval = False
    elif args.eval_strategy == "steps":  # Trainer's default is --logging_steps
        logged = args.logging_steps if "logging_steps" in args.given else TRAINER_STEPS
        args.eval_every = args.eval_every or logged


def lines_for_user(args) -> list[str]:
    """Return one line for each ignored flag, and one about defaults that differ from Trainer's."""
    lines = [f"--{name} is ignored: {IGNORED[name]}" for name in sorted(args.given & {*IGNORED})]
    # The defaults that depend on other flags, or on nothing that is known yet.
    later = {"seq_length": choose_seq_length(args, None), "validation_split": 0.1}
    ours = {**vars(args), **later, "epochs": 1, "save_every": "never"}
    differing = [
        f"--{name} {ours[name]} (there {theirs})"
        for name, (theirs, instead) in DEFAULTS.items()
        if not args.given & {name, *instead} and ours[name] != theirs
    ]
    if "do_train" in args.given and not args.eval_only and differing:
        lines.append(f"Defaults that differ from run_clm.py's: {', '.join(differing)}")
    return lines
