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
    "batch_size": ("per_device_train_batch_size",),
    "eval_batch_size": ("per_device_eval_batch_size",),
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
}

_ALL_CORES = "the text is tokenized on all cores"
_READ_AHEAD = "a thread reads the next batches"
_SILENT = "--quiet and --verbose choose what is printed"
IGNORED = {
    "preprocessing_num_workers": _ALL_CORES,
    "dataset_num_proc": _ALL_CORES,
    "overwrite_cache": "the cache is renewed whenever the text or the tokenizer changes",
    "dataloader_num_workers": _READ_AHEAD,
    "dataloader_pin_memory": _READ_AHEAD,
    "dataloader_persistent_workers": _READ_AHEAD,
    "dataloader_prefetch_factor": _READ_AHEAD,
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
    "prediction_loss_only": "an evaluation computes the loss only",
    "eval_accumulation_steps": "an evaluation computes the loss only",
    "bf16_full_eval": "an evaluation computes in --precision",
    "fp16_full_eval": "an evaluation computes in --precision",
    "fp16_opt_level": "fp16 is PyTorch's or DeepSpeed's mixed precision",
    "half_precision_backend": "fp16 is PyTorch's or DeepSpeed's mixed precision",
    "ddp_backend": "GPUs use NCCL, and CPU processes gloo",
    "ddp_bucket_cap_mb": "DDP's buckets have PyTorch's default size",
    "use_liger_kernel": "the loss is always computed in chunks of the logits",
}

_TOKENIZER = "the tokenizer is the one of --model"
_SHAPE = "a new model has the architecture of --model: use --from_scratch --model NAME_OR_FOLDER"
_TOKEN = "a token on a command line can be read by every user of the machine: set HF_TOKEN"
_WEIGHTS = "trained weights are kept in fp32, and --precision chooses the type of the computation"
_LOSS = "the loss is the plain mean over the valid tokens"
_BEST = "the best evaluation is the one with the lowest loss"
# Flag -> (values, in lower case and without spaces, that change nothing; the reason to refuse all
# others).
REFUSED = {
    "config_name": ((), _SHAPE),
    "config_overrides": ((), _SHAPE),
    "model_type": ((), _SHAPE),
    "tokenizer_name": ((), _TOKENIZER),
    "use_fast_tokenizer": (("true",), _TOKENIZER),
    "torch_dtype": (("auto", "float32"), _WEIGHTS),
    "dtype": (("auto", "float32"), _WEIGHTS),
    "load_in_8bit": (("false",), "frozen weights have 16 bits, or 4 with --load_in_4bit"),
    "keep_linebreaks": (("true",), "the text is used as it is, with its line breaks"),
    "group_by_length": (("false",), "every strategy uses the same order, drawn from --seed"),
    "train_sampling_strategy": (("random",), "the order of the data is drawn from --seed"),
    "data_seed": ((), "--seed draws the order of the data, too"),
    "dataloader_drop_last": (("false",), "every sequence of an epoch is used"),
    "label_smoothing_factor": (("0", "0.0"), _LOSS),
    "average_tokens_across_devices": (("true",), _LOSS),
    "neftune_noise_alpha": ((), "the embeddings get no noise"),
    "optim_args": ((), "the optimizer's settings are flags of their own: --help lists them"),
    "lr_scheduler_kwargs": ((), "the schedules have no other settings than --warmup_steps"),
    "auto_find_batch_size": (
        ("false",),
        "another batch size would train another model: --auto_micro_batch keeps the global batch",
    ),
    "gradient_checkpointing_kwargs": (
        ('{"use_reentrant":false}',),
        "checkpointing is the variant without reentrant backward",
    ),
    "torch_compile_backend": (("inductor",), "--compile uses inductor in its default mode"),
    "torch_compile_mode": (("default",), "--compile uses inductor in its default mode"),
    "tf32": (("true",), "fp32 multiplies matrices in TF32 where the GPU has it"),
    "use_cpu": (("false",), "GPUs are used if there are any: CUDA_VISIBLE_DEVICES= hides them"),
    "no_cuda": (("false",), "GPUs are used if there are any: CUDA_VISIBLE_DEVICES= hides them"),
    "ddp_find_unused_parameters": (("false",), "every parameter takes part in every step"),
    "logging_strategy": (("steps",), "lines are printed every --logging_steps steps"),
    "eval_delay": (("0", "0.0"), "evaluations begin with the first epoch, or after --eval_every"),
    "metric_for_best_model": (("loss", "eval_loss"), _BEST),
    "greater_is_better": (("false",), _BEST),
    "save_only_model": (("false",), "a checkpoint has all that --resume needs; see --no_save"),
    "save_safetensors": (("true",), "checkpoints are safetensors and JSON"),
    "save_on_each_node": (("false",), "each rank writes its part of a checkpoint once"),
    "ignore_data_skip": (("false",), "a resumed run continues at its position in the data"),
    "do_predict": (("false",), "--eval_only evaluates, and --generate continues a text"),
    "hub_strategy": (("end",), "the model is pushed once, at the end"),
    "hub_always_push": (("true", "false"), "the model is pushed once, at the end"),
    "hub_token": ((), _TOKEN),
    "token": ((), _TOKEN),
    "use_auth_token": ((), _TOKEN),
}

# Trainer's default of --save_steps, --eval_steps and --logging_steps.
TRAINER_STEPS = 500
AT_THE_END = kinds.MOST_STEPS  # as --eval_every: at the end of training only
# Flags with which --do_eval alone is probably a mistake.
FLAGS_OF_TRAINING = (
    *("epochs", "max_steps", "lr", "eval_strategy", "eval_every", "save_strategy", "save_every"),
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
        "--save_strategy", _WHEN, "epoch: --save_epochs. steps: --save_every 500. no: as by default"
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
    hidden = {"nargs": "?", "const": "true", "default": argparse.SUPPRESS}
    return [(f"--{name}", {**hidden, "help": argparse.SUPPRESS}) for name in (*IGNORED, *REFUSED)]


def apply_converted(args) -> None:
    """Set our flags from those of CONVERTED that depend on each other, and remove these.

    Flags of IGNORED and REFUSED are checked and removed, too.

    Args:
        args: the parsed flags, with `given`; changed in place.
    """
    for name in args.given & {*IGNORED, *REFUSED}:
        accepted, reason = REFUSED.get(name, ((), ""))
        if name in REFUSED and "".join(str(getattr(args, name)).lower().split()) not in accepted:
            values = f" {' or '.join(accepted)}" if accepted else ""
            raise UserError(
                f"--{name} cannot be used here: {reason}"
                + (f" (--{name}{values} is accepted)." if values else ".")
            )
        delattr(args, name)
    _check_use_peft(args)
    _apply_tasks(args)
    _apply_strategies(args)
    for name in ("use_peft", "do_train", "do_eval", "eval_strategy", "save_strategy"):
        delattr(args, name)


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
    of_training = sorted(args.given & {*FLAGS_OF_TRAINING})
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
        if strategy in ("no", "epoch") and steps:
            raise UserError(
                f"--{what}_strategy {strategy} and --{what}_steps {steps} cannot both hold: leave "
                "one out."
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
