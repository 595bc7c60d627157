"""Flags that Hugging Face's Trainer has, and what they do to the optimizer and the schedule."""

import ast
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.cli import aliases
from support.cli.flags import GROUPS, HelpFormatter, build_parser
from support.cli.fsdp_config import FsdpOptions
from support.cli.parse import ignored_flags, parse_arguments
from support.cli.run_file import as_yaml
from support.data.batches import evaluation_batches
from support.errors import UserError
from support.strategies.optimizer import create, learning_rate

ADAM = ["--adam_beta1", "0.8", "--adam_beta2", "0.95", "--adam_epsilon", "1e-6"]


def test_tables_name_existing_flags_once():
    ours = {name[2:] for rows in GROUPS.values() for name, _ in rows}
    assert {*aliases.RENAMED, *aliases.DEFAULTS} <= ours
    assert not {*aliases.IGNORED, *aliases.REFUSED} & ours
    assert not {*aliases.IGNORED} & {*aliases.REFUSED}


# The flags of run_clm.py, next to those of Trainer.
RUN_CLM = """
    model_name_or_path model_type config_overrides config_name tokenizer_name cache_dir
    use_fast_tokenizer model_revision token trust_remote_code dtype torch_dtype low_cpu_mem_usage
    dataset_name dataset_config_name train_file validation_file max_train_samples max_eval_samples
    streaming block_size overwrite_cache validation_split_percentage preprocessing_num_workers
    keep_linebreaks
""".split()


def flags_of_trainer() -> dict[str, bool]:
    """The fields of TrainingArguments, and whether they are true by default; read, not imported."""
    folder = Path(importlib.util.find_spec("transformers").origin).parent
    tree = ast.parse((folder / "training_args.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    fields = [n for n in classes["TrainingArguments"].body if isinstance(n, ast.AnnAssign)]
    return {
        field.target.id: "default=True" in ast.unparse(field)
        for field in fields
        if not field.target.id.startswith(("_", "framework"))
    }


def test_every_flag_of_trainer_and_run_clm_is_known():
    """Used, ignored or refused with a reason: none is reported as a typing error."""
    known = {*build_parser()._option_string_actions}
    fields = flags_of_trainer()
    assert {"learning_rate", "data_seed", "hub_token"} <= {*fields}
    off = {f"no_{name}" for name, on in fields.items() if on}
    assert "no_dataloader_pin_memory" in off
    assert not {f"--{name}" for name in {*fields, *off, *RUN_CLM}} - known


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--no_keep_linebreaks"], "--keep_linebreaks cannot be used here: .*true is accepted"),
        (["--data_seed", "7"], "--data_seed the value of --seed is accepted"),
        (["--model", "gpt2", "--tokenizer_name", "opt"], "the value of --model is accepted"),
        (["--adafactor"], "use --optim adafactor"),
        (["--streaming", "--max_train_samples", "9"], "^--streaming and --max_train_samples can"),
        (["--no_save", "--save_steps", "9"], "^--no_save and --save_steps cannot"),
        (["--save_strategy", "best"], "needs --load_best_at_end"),
        (["--eval_steps", "0.1"], "--eval_steps: 0.1 .* shares of all steps are not used"),
        (["run.json"], "run.json is the value of no flag: did you mean --config run.json"),
        (["--report_to", "tensorboard", "wandb"], "wandb .*: write several with commas between"),
    ],
)
def test_what_to_use_instead_of_a_flag(flags, message):
    with pytest.raises(UserError, match=message):
        parse_arguments(flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--no_dataloader_pin_memory", "--no_remove_unused_columns"],
        ["--seed", "7", "--data_seed", "7"],
        ["--model", "gpt2", "--tokenizer_name", "gpt2", "--config_name", "gpt2"],
        ["--save_strategy", "best", "--load_best_model_at_end"],
        [
            "--activation_checkpointing",
            "--activation_checkpointing_kwargs",
            '{"use_reentrant": false}',
        ],
    ],
)
def test_flags_that_change_nothing(flags):
    parse_arguments(flags)


def test_help_lists_the_other_names():
    text = " ".join(build_parser().format_help().split())
    assert "--lr, --learning_rate LR peak" in text and "--compile, --torch_compile compile" in text
    assert "--bf16 --precision bf16" in text
    assert build_parser().formatter_class("x").__class__ is HelpFormatter


def test_adam_settings_reach_both_optimizers():
    optimizer = create(torch.nn.Linear(2, 2), parse_arguments(ADAM))
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


def test_words_of_fsdp_are_printed_in_a_run_file(tmp_path):
    args = parse_arguments(["--fsdp", "shard_grad_op offload"])
    (tmp_path / "run.yaml").write_text(as_yaml(args))
    again = parse_arguments(["--config", str(tmp_path / "run.yaml")])
    assert again.fsdp == args.fsdp and not again.fsdp.reshard_after_forward


def test_ignored_flags_and_other_defaults_are_reported():
    args = parse_arguments(["--do_train", "--num_train_epochs", "1", "--log_level", "info"])
    lines = "\n".join(ignored_flags(args))
    assert "--log_level is ignored" in lines and "--seq_length 256 (there 1024)" in lines
    assert "--batch_size 4 (there 8)" in lines and "--validation_split 0.1 (there 0.05)" in lines
    same = ["--model", "gpt2", "--bf16", "--per_device_train_batch_size", "8"]
    line = ignored_flags(parse_arguments(["--do_train", *same]))[-1]
    assert "--seq_length 512 (there" in line and "batch" not in line and "precision" not in line
    assert "--epochs" not in lines and not hasattr(args, "log_level")
    assert ignored_flags(parse_arguments([])) == []
    without = ["--logging_dir", "x", "--report_to", "none"]  # a usual pair in old command lines
    assert ignored_flags(parse_arguments(without)) == [
        "--logging_dir is used by --report_to tensorboard only: ignored"
    ]


class Sequences:
    """Five sequences of two tokens, as evaluation_batches reads them."""

    num_sequences = 5

    def tokens(self, indices) -> int:
        return 2 * len(indices)

    def read(self, indices):
        return torch.zeros(len(indices), 2), torch.zeros(len(indices), 2), None

    def take(self, count):
        assert count == 5
        return self


@pytest.mark.parametrize("flags, sizes", [((), [2, 2, 2]), (("--eval_batch_size", "3"), [3, 3])])
def test_batches_of_an_evaluation(flags, sizes):
    ctx = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    args = parse_arguments(["--batch_size", "2", *flags])
    batches, count = evaluation_batches(Sequences(), args, ctx)
    assert [len(batch[0]) for batch in batches] == sizes and count == len(sizes)
