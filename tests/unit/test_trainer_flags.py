"""Flags that Hugging Face's Trainer has, and what they do to the optimizer and the schedule."""

import json

import pytest
import torch
from conftest import PROJECT

from real_model_example import create_optimizer, learning_rate, parameter_groups
from support.cli import aliases
from support.cli.flags import FLAGS, build_parser
from support.cli.fsdp_config import FsdpOptions
from support.cli.parse import ignored_flags, parse_arguments
from support.errors import UserError


def test_tables_name_existing_flags_once():
    assert {*aliases.RENAMED} <= {*FLAGS} and not {*aliases.IGNORED} & {*FLAGS}
    names = [name for names in aliases.RENAMED.values() for name in names]
    assert len({*names, *aliases.IGNORED}) == len(names) + len(aliases.IGNORED)


@pytest.mark.parametrize(
    "flags, values",
    [
        (["--learning_rate", "1e-3", "--num_train_epochs", "3.0"], {"lr": 1e-3, "epochs": 3}),
        (["--micro_batch_size", "2"], {"batch_size": 2}),
        (["--mixed_precision", "no"], {"precision": "fp32"}),
        (["--bf16"], {"precision": "bf16"}),
        (["--bf16", "False", "--fp16", "True"], {"precision": "fp16"}),
        (["--fp16", "false"], {"precision": "fp32"}),
        (["--torch_compile", "False"], {"compile": False}),
        (["--lr_scheduler_type", "constant_with_warmup"], {"lr_scheduler": "constant"}),
        (["--optim", "adamw_torch_fused"], {"optim": "adamw"}),
        (["--save_strategy", "epoch"], {"save_epochs": True}),
        (["--save_strategy", "steps"], {"save_every": 500}),
        (["--save_strategy", "epoch", "--save_steps", "7"], {"save_every": None}),  # as Trainer
        (["--save_strategy", "best", "--load_best_model_at_end"], {"load_best_at_end": True}),
        (["--eval_strategy", "steps", "--eval_steps", "7"], {"eval_every": 7}),
        (["--evaluation_strategy", "steps", "--logging_steps", "9"], {"eval_every": 9}),
        (["--eval_strategy", "no"], {"eval": False}),
        (["--eval_strategy", "no", "--do_eval", "--do_train"], {"eval_every": aliases.AT_THE_END}),
        (["--do_train", "--do_eval"], {"eval": True, "eval_only": False}),
        (["--do_train", "--do_eval", "False"], {"eval": False, "eval_only": False}),
        (["--do_eval"], {"eval_only": True}),
        (["--do_eval", "--do_train", "false", "--lr", "1e-3"], {"eval_only": True}),
        (["--resume_from_checkpoint", "True", "--output_dir", "x"], {"resume": ""}),
        (["--resume_from_checkpoint", "a/b"], {"resume": "a/b"}),
        (["--use_peft", "--lora_target_modules", "q_proj", "--lora_r", "4"], {"lora_r": 4}),
        (["--label_names", "a", "b", "--no_dataloader_pin_memory"], {"batch_size": 4}),
        (["--fsdp"], {"strategy": "fsdp"}),
        (["--fsdp", "no_shard"], {"strategy": "dp"}),
        (["--fsdp", ""], {"strategy": "dp"}),
        (["--use_fsdp"], {"strategy": "fsdp"}),
        (["--deepspeed", "--strategy", "zero3"], {"strategy": "zero3"}),
        (["--use_deepspeed", "--strategy", "zero1"], {"strategy": "zero1"}),
        ([f"--deepspeed={PROJECT}/ds_config_offload.json"], {"strategy": "offload"}),
        (["--deepspeed", "--ds_config", f"{PROJECT}/ds_config_stage1.json"], {"strategy": "zero1"}),
        (["--eval", "--no_eval"], {"eval": False}),  # the last one counts
        (["--lr", "1e-3", "--lr", "1e-4"], {"lr": 1e-4}),
    ],
)
def test_what_a_flag_sets(flags, values):
    args = parse_arguments(flags)
    assert {name: getattr(args, name) for name in values} == values


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--learning_rat", "2"], "did you mean --learning_rate"),
        (["--batch-size", "2"], "did you mean --batch_size"),
        (["--label_smoothing_factor", "0.1"], "--label_smoothing_factor: .*docs/COMING_FROM.md"),
        (["--hub_token=secret"], "^((?!secret).)*$"),
        (["--nproc-per-node=2"], "flags of a launcher go before the script"),
        (["run.json"], "run.json is not the value of a flag"),
        (["--strategy", "zero4"], "zero4"),
        (["--learning_rate", "x"], "--learning_rate: x is not a number"),
        (["--lr", "nan"], "--learning_rate: nan is not a number"),
        (["--dropout", "1.5"], "--dropout: 1.5 is not a number from 0 and below 1"),
        (["--batch_size", "-3"], "-3 is not a whole number from 1"),
        (["--seq_length", "1"], "1 is not a whole number from 2"),
        (["--seed", str(2**63)], "--seed"),
        (["--learning_rate", "1e-3", "--lr", "1e-4"], "--learning_rate and --lr are two names"),
        (["--bf16", "--fp16"], "--bf16 and --fp16 both set --precision"),
        (["--precision", "fp32", "--bf16"], "--precision and --bf16 both set"),
        (["--deepspeed", "a.json", "--ds_config", "b.json"], "both set --ds_config"),
        (["--fsdp", "--strategy", "zero2"], "--strategy and --fsdp both set --strategy"),
        (["--save_strategy", "best"], "needs --load_best_at_end"),
        (["--eval_steps", "0.1"], "--eval_steps: 0.1 is not a whole number from 1"),
        (["--do_train", "False"], "leaves nothing to do"),
        (["--fsdp", "full-shard"], "full-shard is not in"),
        (["--use_fsdp", "--deepspeed"], "does not fit --strategy fsdp"),
        (["--deepspeed"], "--deepspeed does not fit --strategy dp: give a conf"),
        (["--deepspeed", "--strategy", "dp"], "does not fit --strategy dp"),
        (["--output_dir", ""], "is a variable of the shell not set"),
        (["--resume", "", "--output_dir", "x"], "--resume.*: it is empty"),
        (["--output_dir", "a\nb"], "control characters"),
        (["--report_to", "mlflow"], "mlflow is not in tensorboard, wandb"),
        (["--eval_only", "--no_eval"], "--eval_only and --no_eval cannot both hold"),
        (["--export_dtype", "bf16", "--no_export"], "--no_export and --export_dtype cannot both"),
        (["--eval_only", "--resume", "--output_dir", "x"], "--eval_only and --resume cannot both"),
        (["--warmup_ratio", "0.1", "--num_warmup_steps", "2"], "--warmup_steps and --warmup_ratio"),
        (["--use_peft"], "--use_peft needs --lora_r"),
        (["--streaming", "--dataset", "x"], "--streaming needs --max_steps"),
        (["--streaming", "--max_steps", "2"], "not pydocs"),
        (["--simulate_gpus", "2", "--max_steps", "1"], "--max_steps 2 or more"),
        (["--resume"], "--resume needs --output_dir"),
    ],
)
def test_a_flag_that_is_refused(flags, message):
    with pytest.raises(UserError, match=message):
        parse_arguments(flags)


def test_help_lists_the_other_names():
    text = " ".join(build_parser().format_help().split())
    assert "--lr, --learning_rate LR peak" in text and "--compile, --torch_compile compile" in text
    assert "--bf16 --precision bf16" in text


def test_adam_settings_reach_the_optimizer():
    adam = ["--adam_beta1", "0.8", "--adam_beta2", "0.95", "--adam_epsilon", "1e-6"]
    args, layer = parse_arguments(adam), torch.nn.Linear(2, 2)
    optimizer = create_optimizer(parameter_groups(layer, args), args)
    assert optimizer.defaults["betas"] == (0.8, 0.95) and optimizer.defaults["eps"] == 1e-6


def test_warmup_ratio_is_a_share_of_all_steps():
    rates = {
        name: [learning_rate(step, 25, parse_arguments([*flags])) for step in range(25)]
        for name, flags in {
            "steps": ("--warmup_steps", "3"),
            "ratio": ("--warmup_ratio", "0.1"),  # 2.5 steps, rounded up
            "none": (),
        }.items()
    }
    assert rates["ratio"] == rates["steps"] != rates["none"]


def test_words_of_fsdp():
    def options(*flags):
        return parse_arguments(["--fsdp", *flags]).fsdp

    assert options() == options("full_shard auto_wrap") == FsdpOptions()
    assert options("shard_grad_op auto_wrap").reshard_after_forward is False
    assert options("hybrid_shard auto_wrap").hybrid and options("full_shard,offload").offload


def test_file_of_fsdp(tmp_path):
    """As accelerate writes it; what FSDP2 does not have is named."""

    def read(**content):
        (tmp_path / "fsdp.json").write_text(json.dumps(content))
        return parse_arguments(["--strategy=fsdp", f"--fsdp_config={tmp_path}/fsdp.json"])

    args = read(
        fsdp_sharding_strategy="SHARD_GRAD_OP",
        fsdp_mixed_precision="BFLOAT16",
        fsdp_transformer_layer_cls_to_wrap="GPT2Block, Other",
        fsdp_use_orig_params=True,
        backward_prefetch="backward_pre",
        _comment="mine",
    )
    assert args.precision == "bf16" and args.fsdp.layers == ("GPT2Block", "Other")
    assert not args.fsdp.reshard_after_forward and args.fsdp.wrap_layers
    assert ignored_flags(args)[0].endswith("option: fsdp_use_orig_params, backward_prefetch")
    assert read(sharding_strategy="no_shard").strategy == "dp"
    for wrong in ({"sharding_strategy": "half"}, {"fsdp_offload_param": True}):
        with pytest.raises(UserError, match=r"fsdp\.json: (sharding_strategy HALF|unknown key)"):
            read(**wrong)


def test_ignored_flags_and_other_defaults_are_reported():
    flags = ["--do_train", "--num_train_epochs", "1", "--log_level", "info", "--use_cache"]
    ignored, defaults = ignored_flags(parse_arguments(flags))
    assert ignored.startswith("Ignored") and "--log_level, --use_cache" in ignored
    assert "--batch_size, --seq_length" in defaults and "--epochs" not in defaults
    assert ignored_flags(parse_arguments([])) == []
    without = ["--logging_dir", "x", "--report_to", "none"]  # a usual pair in old command lines
    assert ignored_flags(parse_arguments(without)) == [
        "--logging_dir is used by --report_to tensorboard only: ignored"
    ]
