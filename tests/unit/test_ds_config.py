"""DeepSpeed's file (--ds_config): merged with the flags, checked, and written as it runs."""

import json
from dataclasses import replace
from operator import attrgetter

import pytest
from conftest import PROJECT

from distributed_training.cli.parse import parse_arguments
from distributed_training.errors import UserError
from distributed_training.strategies.deepspeed import preparation
from distributed_training.strategies.deepspeed.options import ModelSizes, complete_ds_config
from distributed_training.strategies.table import STRATEGIES

STAGE2 = {"zero_optimization": {"stage": 2}}
MODEL = ModelSizes(64, 10**6, 10**5, tied=True)


@pytest.fixture
def read(tmp_path):
    """read(content, *flags) -> settings with a DeepSpeed file; a dict is added to stage 2."""

    def parse(content, *flags):
        path = tmp_path / "ds.json"
        path.write_text(content if isinstance(content, str) else json.dumps({**STAGE2, **content}))
        return parse_arguments(["--ds_config", str(path), *flags])

    return parse


def zero(stage: int, **sections) -> dict:
    return {"zero_optimization": {"stage": stage, **sections}}


def optimizer(kind: str, **params) -> dict:
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind: str, **params) -> dict:
    return {"scheduler": {"type": kind, "params": params}}


@pytest.mark.parametrize(
    "content, flags, values",
    [
        ({}, [], {"strategy": "zero2"}),
        ('{// mine\n"zero_optimization": {"stage": 3,}, # yours\n}', [], {"strategy": "zero3"}),
        (optimizer("AdamW", lr="7e-5"), [], {"lr": 7e-5}),
        (optimizer("Adam", betas=[0.7, 0.9]), [], {"adam_beta1": 0.7, "adam_beta2": 0.9}),
        ({"bf16": {"enabled": True}}, [], {"precision": "bf16"}),
        ({"bf16": {"enabled": False}}, [], {"precision": "fp32"}),
        (scheduler("WarmupLR", warmup_max_lr="auto"), [], {"lr_scheduler": "constant"}),
        (
            scheduler("WarmupDecayLR", warmup_min_lr="auto", warmup_num_steps="auto"),
            ["--warmup_steps", "9"],
            {"lr_scheduler": "linear"},
        ),
        (zero(1), ["--strategy", "dp"], {"strategy": "dp"}),
    ],
)
def test_values_of_the_file_are_used(read, content, flags, values):
    settings = read(content, *flags)
    assert {name: settings.flags()[name] for name in values} == values
    strategy = settings.strategy
    assert "scheduler" not in (getattr(strategy, "config", None) or {})
    assert (strategy == STRATEGIES["dp"]) == ("dp" in flags)


@pytest.mark.parametrize(
    "content, flags, says",
    [
        ('{"zero_optimization" {"stage": 2}}', [], "ds.json: .*line 1 column 22"),
        ('{"steps_per_print": 1, "steps_per_print": 1}', [], "steps_per_print"),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", [], "ds.json: it is nested"),
        ('{"a": ' + "[" * 99999 + "]" * 99999 + "}", [], "ds.json: it is nested"),
        (zero(4), [], "stage 4 is not 1, 2 or 3"),
        (zero(True), [], "stage True is not 1, 2 or 3"),
        ({"scheduler": {"type": ["WarmupLR"]}}, [], "leave the scheduler"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, [], "contradicts bf16.enabled"),
        ({"train_micro_batch_size_per_gpu": -1}, [], "train_micro_batch_size_per_gpu"),
        ({"train_batch_size": 13}, [], "train_batch_size 13, but --batch_size 4"),
        ({}, ["--strategy", "zero3"], "describes zero2 .*--strategy is zero3"),
        (zero(3, offload_param={"device": "nvme"}), [], "--strategy infinity"),
        ({"gradient_clipping": 1.0}, ["--max_grad_norm", "2"], "--max_grad_norm 2.0 contradicts"),
        (optimizer("AdamW", betas=[0.7, 0.9]), ["--adam_beta2", "0.95"], "beta2 0.95 contradicts"),
        ({"bf16": {"enabled": False}}, ["--bf16"], "precision bf16 contradicts bf16.enabled"),
        (scheduler("OneCycle"), [], "scheduler OneCycle out, and use --lr_scheduler"),
        (scheduler("WarmupLR"), ["--lr_scheduler", "cosine"], "--lr_scheduler cosine contradicts"),
        (optimizer("Lion"), [], "optimizer Lion out, and use --optim"),
        (optimizer("AdamW"), ["--optim", "sgd"], "--optim sgd contradicts the optimizer AdamW"),
    ],
)
def test_a_deepspeed_file_that_contradicts_the_flags_is_refused(read, content, flags, says):
    with pytest.raises(UserError, match=says):
        read(content, *flags)


@pytest.mark.parametrize(
    "content, says",
    [
        ({"gradient_acumulation_steps": 2}, "did you mean gradient_accumulation_steps"),
        (zero(2, reduce_bucket_size="big"), "reduce_bucket_size big"),
    ],
)
def test_deepspeed_checks_keys_and_values(read, content, says):
    with pytest.raises(UserError, match=f"ds.json: .*{says}"):
        read(content).strategy.check_options(verbose=False)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "offload", "infinity"])
def test_the_project_s_files(strategy):
    """DeepSpeed accepts them, and they keep the states where the table says."""
    file = f"{PROJECT}/{STRATEGIES[strategy].config_file}"
    settings = parse_arguments(["--ds_config", file])
    found, expected = settings.strategy, STRATEGIES[strategy]
    found.check_options(verbose=False)
    assert settings.parallelism.strategy == strategy
    places = attrgetter("optimizer_on", "parameters_on", "stage", "sharded")
    assert places(found) == places(expected)


def test_deepspeed_knows_all_of_its_sections(read):
    sections = "aio flops_profiler activation_checkpointing comms_logger data_types tensorboard"
    content = {name: {} for name in sections.split()}
    content |= {"_comment": "mine", "steps_per_print": 10, "wall_clock_breakdown": False}
    read(content).strategy.check_options(verbose=False)


def test_an_optimizer_in_host_memory_needs_cpu_adam(read):
    settings = read(zero(3, offload_optimizer={"device": "cpu"}))
    strategy = settings.strategy
    assert settings.parallelism.strategy == "zero3" and strategy.offloads
    assert "cpu_adam" in strategy.needed_ops()
    assert "cpu_adam" not in STRATEGIES[settings.parallelism.strategy].needed_ops()


@pytest.mark.parametrize(
    "content, needs_no_op",
    [
        (optimizer("Adam", lr="auto", betas="auto", eps="auto", weight_decay="auto"), True),
        (optimizer("Adam", adam_w_mode=False), False),
        (optimizer("Adam") | zero(2, offload_optimizer={"device": "cpu"}), False),
    ],
)
def test_adam_of_a_file_is_pytorchs(read, content, needs_no_op):
    """DeepSpeed's own is compiled, on a GPU by an nvcc that fits torch."""
    params = read(content).strategy.config["optimizer"]["params"]
    assert params.get("torch_adam", False) is needs_no_op


def test_the_timer_that_synchronizes_is_off(read):
    for content, enabled in (({}, False), ({"timers": {"throughput": {"enabled": True}}}, True)):
        config = read(content).strategy.config
        whole = complete_ds_config(config, "fp32", MODEL, 1, None)
        assert whole["timers"] == {"throughput": {"enabled": enabled}}


def test_loss_scaling_of_a_file_is_kept(read):
    own = {"hysteresis": 4, "loss_scale_window": 100, "initial_scale_power": 8}
    config = read({"fp16": own}).strategy.config
    whole = complete_ds_config(config, "fp16", MODEL, 2, None)
    assert whole["fp16"] == {"enabled": True, **own}


@pytest.mark.parametrize(
    "strategy, ranks, overlaps", [("zero2", 1, False), ("zero2", 2, True), ("zero3", 1, True)]
)
def test_reductions_overlap_where_there_is_something_to_overlap(strategy, ranks, overlaps):
    """Stage 3 also overlaps copies, on one rank too."""
    config = parse_arguments(["--strategy", strategy]).strategy.config
    whole = complete_ds_config(config, "bf16", MODEL, ranks, None)
    assert whole["zero_optimization"]["overlap_comm"] is overlaps


def test_an_auto_value_without_a_rule_is_refused(read):
    content = zero(2, round_robin_gradients="auto")
    with pytest.raises(UserError, match='round_robin_gradients cannot be "auto"'):
        complete_ds_config(read(content).strategy.config, "fp32", MODEL, 1, None)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "offload", "infinity"])
def test_the_written_file_means_the_same(tmp_path, strategy):
    """It has no "auto", and gives the same configuration without the other flags."""
    flags = ["--batch_size", "3", "--lr", "3e-4", "--adam_beta2", "0.95", "--precision", "bf16"]
    settings = parse_arguments(["--strategy", strategy, *flags, "--nvme_path", str(tmp_path)])
    configured = settings.strategy
    assert configured.config["optimizer"]["params"]["betas"] == [0.9, 0.95]
    first = complete_ds_config(configured.config, "bf16", MODEL, 1, str(tmp_path))
    preparation.write_config(replace(configured, config=first), tmp_path)
    again = parse_arguments(["--ds_config", str(tmp_path / "ds_config.json")])
    assert (again.parallelism.strategy, again.training.lr) == (strategy, 3e-4)
    assert again.training.batch_size == 3
    config = again.strategy.config
    assert complete_ds_config(config, "bf16", MODEL, 1, str(tmp_path)) == first
