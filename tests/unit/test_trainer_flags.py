"""Flags that Hugging Face's Trainer has, and what they do to the optimizer and the schedule."""

import json

import pytest
import torch
from conftest import PROJECT

from real_model_example import create_optimizer, learning_rate, parameter_groups
from support.cli import aliases
from support.cli.flags import FLAGS, HelpFormatter, build_parser
from support.cli.fsdp_config import FsdpOptions
from support.cli.parse import ignored_flags, parse_arguments
from support.errors import UserError

ADAM = ["--adam_beta1", "0.8", "--adam_beta2", "0.95", "--adam_epsilon", "1e-6"]


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
        (["--label_smoothing_factor", "0.1"], "--label_smoothing_factor: see docs/COMING_FROM.md"),
        (["--hub_token=secret"], "^((?!secret).)*$"),
        (["--nproc-per-node=2"], "flag of the launcher"),
        (["--learning_rate", "x"], "argument --learning_rate: x is not a number"),
        (["--learning_rate", "1e-3", "--lr", "1e-4"], "--learning_rate and --lr are two names"),
        (["--bf16", "--fp16"], "--bf16 and --fp16 both set --precision"),
        (["--precision", "fp32", "--bf16"], "--precision and --bf16 both set"),
        (["--deepspeed", "a.json", "--ds_config", "b.json"], "both set --ds_config"),
        (["--streaming", "--max_train_samples", "9"], "^--streaming and --max_train_samples can"),
        (["--no_save", "--save_steps", "9"], "^--no_save and --save_steps cannot"),
        (["--save_strategy", "no", "--save_steps", "7"], "no and --save_steps 7"),
        (["--save_strategy", "best"], "needs --load_best_at_end"),
        (["--eval_steps", "0.1"], "--eval_steps: 0.1 .* shares of all steps are not used"),
        (["--num_train_epochs", "1.5"], "--num_train_epochs: 1.5.*--max_steps"),
        (["--do_train", "False"], "leaves nothing to do"),
        (["--do_eval", "--num_train_epochs", "3"], "--num_train_epochs needs training"),
        (["--use_peft"], "--use_peft needs --lora_r"),
        (["--use_peft", "false", "--lora_r", "4"], "cannot both hold"),
        (["--fsdp", "full-shard"], "full-shard is not in"),
        (["--fsdp", "--strategy", "zero2"], "--fsdp .*contradicts"),
        (["--use_fsdp", "--deepspeed"], "cannot both"),
        (["--deepspeed"], "--deepspeed needs a configuration"),
        (["--deepspeed", "--strategy", "dp"], "contradicts --strategy dp"),
        (["--output_dir", ""], "is a variable of the shell not set"),
        (["--resume", "", "--output_dir", "x"], "--resume: it is empty"),
        (["--seed", str(2**63)], "--seed"),
        (["run.json"], "run.json .*: did you mean --config run.json"),
        (["--report_to", "tensorboard", "wandb"], "wandb .*: write several with commas between"),
        (["--report_to", "mlflow"], "mlflow is not a tracker"),
    ],
)
def test_a_flag_that_is_refused(flags, message):
    with pytest.raises(UserError, match=message):
        parse_arguments(flags)


def test_help_lists_the_other_names():
    text = " ".join(build_parser().format_help().split())
    assert "--lr, --learning_rate LR peak" in text and "--compile, --torch_compile compile" in text
    assert "--bf16 --precision bf16" in text
    assert build_parser().formatter_class("x").__class__ is HelpFormatter


def test_adam_settings_reach_both_optimizers():
    args, layer = parse_arguments(ADAM), torch.nn.Linear(2, 2)
    optimizer = create_optimizer(parameter_groups(layer, args), args)
    assert optimizer.defaults["betas"] == (0.8, 0.95) and optimizer.defaults["eps"] == 1e-6
    for strategy in ("zero1", "zero2", "zero3", "offload", "infinity"):
        params = parse_arguments([*ADAM, "--strategy", strategy]).ds_config_dict["optimizer"][
            "params"
        ]
        assert (params["betas"], params["eps"]) == ([0.8, 0.95], 1e-6)
        params = parse_arguments(["--strategy", strategy]).ds_config_dict["optimizer"]["params"]
        assert (params["betas"], params["eps"]) == ([0.9, 0.999], 1e-8)


def test_adam_settings_of_a_deepspeed_file(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        '{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": '
        '{"lr": "auto", "betas": [0.7, 0.9]}}}'
    )
    args = parse_arguments(["--ds_config", str(file)])
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.7, 0.9, 1e-8)
    assert "eps" not in args.ds_config_dict["optimizer"]["params"]
    with pytest.raises(
        UserError, match=r"adam_beta2 0\.95 contradicts optimizer\.params\.betas 0\.9"
    ):
        parse_arguments(["--ds_config", str(file), "--adam_beta2", "0.95"])


@pytest.mark.parametrize(
    "kind, params, flags, schedule",
    [
        ("WarmupLR", {"warmup_max_lr": "auto"}, [], "constant"),
        ("WarmupDecayLR", {"total_num_steps": "auto"}, ["--warmup_steps", "9"], "linear"),
        (
            "WarmupDecayLR",
            {"warmup_min_lr": 0, "warmup_num_steps": "auto"},
            ["--lr", "1"],
            "linear",
        ),
        ("WarmupLR", {"warmup_num_steps": "auto"}, ["--lr_scheduler", "cosine"], None),
        ("WarmupLR", {"warmup_num_steps": 5, "warmup_max_lr": "auto"}, [], None),
        ("OneCycle", {"cycle_max_lr": "auto"}, [], None),
    ],
)
def test_a_scheduler_of_auto_values_is_ours(tmp_path, kind, params, flags, schedule):
    """As in the examples of Trainer's documentation."""
    file = tmp_path / "ds.json"
    scheduler = {"type": kind, "params": params}
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "scheduler": scheduler}))
    if schedule is None:
        with pytest.raises(UserError, match="scheduler"):
            parse_arguments(["--deepspeed", str(file), *flags])
    else:
        args = parse_arguments(["--deepspeed", str(file), *flags])
        assert args.lr_scheduler == schedule and "scheduler" not in args.ds_config_dict


@pytest.mark.parametrize(
    "params, zero, needs_no_op",
    [
        ({"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}, {}, True),
        ({}, {}, True),
        ({"adam_w_mode": False}, {}, False),
        ({"lr": 1e-3}, {"offload_optimizer": {"device": "cpu"}}, False),
    ],
)
def test_adam_of_a_deepspeed_file_is_pytorchs(tmp_path, params, zero, needs_no_op):
    """DeepSpeed's own is compiled, on a GPU by an nvcc that fits torch."""
    file = tmp_path / "ds.json"
    optimizer = {"type": "Adam", "params": params}
    file.write_text(json.dumps({"zero_optimization": {"stage": 2, **zero}, "optimizer": optimizer}))
    read = parse_arguments(["--deepspeed", str(file)]).ds_config_dict["optimizer"]["params"]
    assert read.get("torch_adam", False) is needs_no_op


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
