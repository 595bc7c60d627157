"""Flags that Hugging Face's Trainer has, and what they do to the optimizer and the schedule."""

import json

import pytest
import torch
from conftest import PROJECT

from distributed_training.cli.checks import check_data_paths
from distributed_training.cli.flags import FLAGS, IGNORED, RENAMED
from distributed_training.cli.parse import parse_arguments, read_command_line
from distributed_training.errors import UserError
from distributed_training.strategies.fsdp.options import FsdpOptions
from real_model_example import create_optimizer, parameter_groups


def test_tables_name_existing_flags_once():
    assert {*RENAMED} <= {*FLAGS} and not {*IGNORED} & {*FLAGS}
    names = [name for names in RENAMED.values() for name in names]
    assert len({*names, *IGNORED}) == len(names) + len(IGNORED)


@pytest.mark.parametrize(
    "flags, values",
    [
        (["--learning_rate", "1e-3", "--num_train_epochs", "3.0"], {"lr": 1e-3, "epochs": 3}),
        (["--mixed_precision", "no"], {"precision": "fp32"}),
        (["--bf16", "False", "--fp16", "True"], {"precision": "fp16"}),
        (["--fp16", "false"], {"precision": "fp32"}),
        (["--no_cuda"], {"device": "cpu"}),
        (["--use_cpu", "True", "--device", "cpu"], {"device": "cpu"}),
        (["--use_cpu", "false"], {"device": "auto"}),
        (["--lr_scheduler_type", "constant_with_warmup"], {"lr_scheduler": "constant"}),
        (["--lr_scheduler_type", "warmup_stable_decay"], {"lr_scheduler": "wsd"}),
        (["--lr_scheduler_type", "cosine_with_min_lr"], {"lr_scheduler": "cosine"}),
        (["--optim", "adamw_torch_fused"], {"optim": "adamw"}),
        (["--save_strategy", "steps"], {"save_every": 500}),
        (["--save_strategy", "epoch", "--save_steps", "7"], {"save_every": None}),  # as Trainer
        (["--eval_strategy", "steps", "--eval_steps", "7"], {"eval_every": 7}),
        (["--do_train", "--do_eval"], {"eval": True, "eval_only": False}),
        (["--do_eval", "--save_steps", "9", "--load_best_model_at_end"], {"eval_only": True}),
        (["--resume_from_checkpoint", "True", "--output_dir", "x"], {"resume": ""}),
        (["--use_peft", "--lora_target_modules", "q_proj", "--lora_r", "4"], {"lora_r": 4}),
        (["--lora_r", "4", "--use_rslora", "True"], {"lora_rslora": True, "lora_dora": False}),
        (["--lora_r", "4", "--use_dora"], {"lora_rslora": False, "lora_dora": True}),
        (["--fsdp"], {"strategy": "fsdp"}),
        (["--attn_implementation", "eager"], {"attn_implementation": "eager"}),
        (["--fsdp", "no_shard"], {"strategy": "dp"}),
        (["--deepspeed", "--strategy", "zero3"], {"strategy": "zero3"}),
        ([f"--deepspeed={PROJECT}/ds_config_offload.json"], {"strategy": "offload"}),
        (["--deepspeed", "--ds_config", f"{PROJECT}/ds_config_stage1.json"], {"strategy": "zero1"}),
        (["--learning_rate", "1e-3", "--lr", "1e-4"], {"lr": 1e-4}),  # the last one counts
    ],
)
def test_what_a_flag_sets(flags, values):
    settings = parse_arguments(flags)
    assert {name: settings.flags()[name] for name in values} == values


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--validation_file", "no/such.txt"], "no/such.txt: no such file"),
        (["--train_split", "test"], "--train_split is for datasets of the hub"),
        (["--include", "*.txt"], "for a folder of data"),
    ],
)
def test_data_that_does_not_fit_is_refused(flags, says):
    with pytest.raises(UserError, match=says):
        check_data_paths(parse_arguments(flags).data)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--learning_rat", "2"], "did you mean --learning_rate"),
        (["--label_smoothing_factor", "0.1"], "--label_smoothing_factor: .*docs/COMING_FROM.md"),
        (["--hub_token=secret"], "^((?!secret).)*$"),
        (["--strategy", "zero4"], "zero4"),
        (["--lr", "nan"], "--learning_rate: nan is not a number"),
        (["--dropout", "1.5"], "--dropout: 1.5 is not a number from 0 and below 1"),
        (["--batch_size", "-3"], "-3 is not a whole number from 1"),
        (["--bf16", "--fp16"], "--bf16 and --fp16 both set --precision"),
        (["--fsdp", "--strategy", "zero2"], "--strategy and --fsdp both set --strategy"),
        (["--do_train", "False"], "leaves nothing to do"),
        (["--deepspeed"], "--deepspeed does not fit --strategy dp: give a conf"),
        (["--output_dir", ""], "is a variable of the shell not set"),
        (["--report_to", "mlflow"], "mlflow is not in tensorboard, wandb"),
        (["--eval_only", "--no_eval"], "--eval_only and --no_eval cannot be used together"),
        (["--use_peft"], "--use_peft needs --lora_r"),
        (["--use_dora"], "--lora_dora needs --lora_r|--use_dora needs --lora_r"),
        (["--lora_rslora"], "--lora_rslora needs --lora_r"),
        (
            ["--lora_r=4", "--load_in_4bit", "--strategy=zero3"],
            "4bit does not work under zero3, which would have to shard bitsandbytes' packed",
        ),
        (
            ["--lora_r=4", "--lora_dora", "--load_in_4bit", "--strategy=fsdp"],
            "dora does not work under fsdp with --load_in_4bit: peft",
        ),
        (["--lora_r=4", "--lora_dora", "--strategy=infinity"], "dora does not work under infinity"),
        (["--optim", "muon", "--strategy", "infinity"], "muon does not work under infinity: Dee"),
        (["--streaming", "--max_steps", "2"], "not pydocs"),
        (["--streaming"], "--streaming needs --max_steps"),
        (["--streaming", "--max_steps", "2", "--dataset", "a", "b"], "reads one --dataset"),
        (["--resume"], "--resume needs --output_dir"),
    ],
)
def test_a_flag_that_is_refused(flags, message):
    with pytest.raises(UserError, match=message):
        parse_arguments(flags)


def test_adam_settings_reach_the_optimizer():
    adam = ["--adam_beta1", "0.8", "--adam_beta2", "0.95", "--adam_epsilon", "1e-6"]
    layer = torch.nn.Linear(2, 2)
    training = parse_arguments(adam).training
    optimizer = create_optimizer(parameter_groups(layer, training), layer, training)
    assert optimizer.defaults["betas"] == (0.8, 0.95) and optimizer.defaults["eps"] == 1e-6


def test_weight_decay_is_for_matrices_only():
    training = parse_arguments(["--weight_decay", "0.5"]).training
    layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    groups = parameter_groups(layers, training)
    decay = {p: group["weight_decay"] for group in groups for p in group["params"]}
    found = {name: decay[parameter] for name, parameter in layers.named_parameters()}
    assert found == {"0.weight": 0.5, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0}


def test_fsdp_takes_the_options_of_trainer():
    def options(*flags):
        return parse_arguments(["--fsdp", *flags]).strategy.options

    assert options() == options("full_shard auto_wrap") == FsdpOptions()
    assert options("shard_grad_op auto_wrap").reshard_after_forward is False
    assert options("hybrid_shard auto_wrap").hybrid and options("full_shard,offload").offload


def test_file_of_fsdp(tmp_path):
    """As accelerate writes it; what FSDP2 does not have is named."""

    def read(**content):
        (tmp_path / "fsdp.json").write_text(json.dumps(content))
        return read_command_line(["--strategy=fsdp", f"--fsdp_config={tmp_path}/fsdp.json"])

    line = read(
        fsdp_sharding_strategy="SHARD_GRAD_OP",
        fsdp_mixed_precision="BFLOAT16",
        fsdp_transformer_layer_cls_to_wrap="GPT2Block, Other",
        fsdp_use_orig_params=True,
        backward_prefetch="backward_pre",
        _comment="mine",
    )
    options = line.settings.strategy.options
    assert line.settings.training.precision == "bf16" and options.layers == ("GPT2Block", "Other")
    assert not options.reshard_after_forward and options.wrap_layers
    assert line.notices[0].endswith("option: fsdp_use_orig_params, backward_prefetch")
    assert read(sharding_strategy="no_shard").settings.parallelism.strategy == "dp"
    with pytest.raises(UserError, match=r"fsdp\.json: sharding_strategy HALF"):
        read(sharding_strategy="half")


def test_ignored_flags_are_reported():
    [line] = read_command_line(["--do_train", "--log_level", "info", "--use_cache"]).notices
    assert line.startswith("Ignored") and "--log_level, --use_cache" in line
    assert read_command_line([]).notices == ()
    without = ["--logging_dir", "x", "--report_to", "none"]  # a usual pair in old command lines
    assert read_command_line(without).notices == (
        "--logging_dir is used by --report_to tensorboard only: ignored",
    )
