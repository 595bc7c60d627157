"""DeepSpeed's file (--ds_config): merged with the flags, checked, and written as it runs."""

import json
from importlib.metadata import version

import pytest
from conftest import PROJECT
from packaging.version import Version

from support.cli.arguments import Arguments
from support.cli.ds_config import (
    ModelSizes,
    check_with_deepspeed,
    complete_ds_config,
    merge,
    write_ds_config,
)
from support.cli.parse import parse_arguments
from support.errors import UserError

STAGE2 = {"zero_optimization": {"stage": 2}}
MODEL = ModelSizes(64, 10**6, 10**5, tied=True)


@pytest.fixture
def write(tmp_path):
    """write(content) -> path of a DeepSpeed file; a dict is added to a file of stage 2."""

    def write_file(content) -> str:
        path = tmp_path / "ds.json"
        text = content if isinstance(content, str) else json.dumps({**STAGE2, **content})
        path.write_text(text)
        return str(path)

    return write_file


def test_merge_changes_neither_the_file_nor_the_arguments():
    content = {**STAGE2, "gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {}}}
    before = json.dumps(content)
    args = Arguments(strategy="zero2", lr=1e-3, batch_size=2)
    resolved = merge(args, content, "ds.json", world_size=3)
    assert json.dumps(content) == before and args.max_grad_norm == 1.0
    assert resolved.flags == {"max_grad_norm": 0.5}
    assert resolved.keys == {"max_grad_norm": "gradient_clipping"}
    assert resolved.config["train_batch_size"] == 6
    assert resolved.config["optimizer"]["params"]["lr"] == 1e-3


@pytest.mark.parametrize(
    "content, flags, values",
    [
        ({}, [], {"strategy": "zero2"}),
        ('{// mine\n"zero_optimization": {"stage": 3,}, # yours\n}', [], {"strategy": "zero3"}),
        ({"train_batch_size": 16}, [], {"gradient_accumulation_steps": 4}),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "7e-5"}}}, [], {"lr": 7e-5}),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.7, 0.9]}}}, [], {"adam_beta1": 0.7}),
        ({"bf16": {"enabled": True}}, [], {"precision": "bf16"}),
        ({"bf16": {"enabled": False}}, [], {"precision": "fp32"}),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}},
            [],
            {"lr": 5e-4},
        ),
        ({"train_micro_batch_size_per_gpu": 2}, ["--batch_size", "2"], {"batch_size": 2}),
        ({"zero_optimization": {"stage": 1}}, ["--strategy", "dp"], {"ds_config_dict": None}),
    ],
)
def test_values_of_the_file_are_used(write, content, flags, values):
    args = parse_arguments(["--ds_config", write(content), *flags])
    assert {name: getattr(args, name) for name in values} == values


@pytest.mark.parametrize(
    "content, flags, says",
    [
        ('{"zero_optimization" {"stage": 2}}', [], "line 1, column 22"),
        ('{"zero_optimization": {"stage": 2}, "a": 1, "a": 2}', [], "key a twice"),
        ("[1]", [], "object"),
        ({"zero_optimization": {"stage": 4}}, [], "must be 1, 2 or 3"),
        ({"zero_optimization": {"stage": "2"}}, [], "must be 1, 2 or 3"),
        ({"zero_optimization": True}, [], "zero_optimization must be an object"),
        ({"bf16": {"enabled": "yes"}}, [], "bf16.enabled must be true or false"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, [], "both bf16 and fp16"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}},
            [],
            "none, cpu or nvme",
        ),
        ({"train_micro_batch_size_per_gpu": -1}, [], "train_micro_batch_size_per_gpu"),
        ({"train_batch_size": 13}, [], "train_batch_size 13, but --batch_size 4"),
        ({}, ["--strategy", "zero3"], "stage 2, but --strategy zero3"),
        ({}, ["--strategy", "offload"], "offload_optimizer.device None, but --strategy offload"),
        ({"gradient_clipping": 1.0}, ["--max_grad_norm", "2"], "--max_grad_norm 2.0 contradicts"),
        (
            {"train_micro_batch_size_per_gpu": 4},
            ["--micro_batch_size", "2"],
            "--micro_batch_size 2 contradicts",
        ),
        ({"bf16": {"enabled": False}}, ["--bf16"], "precision bf16 contradicts bf16.enabled false"),
        ({"scheduler": {"type": "WarmupLR"}}, ["--lr", "0.1"], "--lr contradicts .*WarmupLR"),
        ({"scheduler": {"type": "OneCycle", "params": {"a": "auto"}}}, [], "by numbers"),
        ({"optimizer": {"type": "SGD"}}, ["--optim", "sgd"], "remove the section"),
        ({"optimizer": {"type": "SGD"}}, ["--adam_beta2", "0.9"], "--adam_beta2 is for Adam"),
    ],
)
def test_what_cannot_hold_is_refused(write, content, flags, says):
    with pytest.raises(UserError, match=says):
        parse_arguments(["--ds_config", write(content), *flags])


@pytest.mark.parametrize(
    "content, says",
    [
        ({"gradient_acumulation_steps": 2}, "did you mean gradient_accumulation_steps"),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_sise": 5}},
            "key zero_optimization.reduce_bucket_sise: did you mean reduce_bucket_size",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"pin_memry": True}}},
            "zero_optimization.offload_optimizer.pin_memry: did you mean pin_memory",
        ),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}}, "reduce_bucket_size"),
        pytest.param(
            {"fp16": {"enabled": False, "los_scale": 1}},
            "fp16.los_scale: did you mean loss_scale",
            marks=pytest.mark.skipif(
                Version(version("deepspeed")) < Version("0.18"),
                reason="older DeepSpeed accepts unknown keys of fp16",
            ),
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"beta": [0.9, 0.99]}}},
            "optimizer.params.beta: did you mean betas",
        ),
    ],
)
def test_deepspeed_checks_keys_and_values(write, content, says):
    args = parse_arguments(["--ds_config", write(content)])
    with pytest.raises(UserError, match=f"ds.json: .*{says}"):
        check_with_deepspeed(args)


@pytest.mark.parametrize("stage", ["stage1", "stage2", "stage3", "offload", "infinity"])
def test_deepspeed_accepts_the_project_s_files(stage):
    check_with_deepspeed(parse_arguments(["--ds_config", f"{PROJECT}/ds_config_{stage}.json"]))


def test_deepspeed_knows_all_of_its_sections(write):
    sections = "aio flops_profiler activation_checkpointing comms_logger data_types tensorboard"
    content = {name: {} for name in sections.split()}
    content |= {"_comment": "mine", "steps_per_print": 10, "wall_clock_breakdown": False}
    check_with_deepspeed(parse_arguments(["--ds_config", write(content)]))


def test_the_timer_that_synchronizes_is_off(write):
    for content, enabled in (({}, False), ({"timers": {"throughput": {"enabled": True}}}, True)):
        config = parse_arguments(["--ds_config", write(content)]).ds_config_dict
        whole = complete_ds_config(config, "fp32", MODEL, 1, None)
        assert whole["timers"] == {"throughput": {"enabled": enabled}}


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "offload", "infinity"])
def test_the_written_file_means_the_same(tmp_path, strategy):
    """It has no "auto", and gives the same configuration without the other flags."""
    flags = ["--batch_size", "3", "--lr", "3e-4", "--adam_beta2", "0.95", "--precision", "bf16"]
    args = parse_arguments(["--strategy", strategy, *flags, "--nvme_path", str(tmp_path)])
    first = complete_ds_config(args.ds_config_dict, "bf16", MODEL, 1, str(tmp_path))
    write_ds_config(args.replace(ds_config_dict=first), tmp_path)
    again = parse_arguments(["--ds_config", str(tmp_path / "ds_config.json")])
    assert (again.strategy, again.lr, again.batch_size) == (strategy, 3e-4, 3)
    assert complete_ds_config(again.ds_config_dict, "bf16", MODEL, 1, str(tmp_path)) == first
