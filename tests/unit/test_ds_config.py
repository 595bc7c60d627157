"""DeepSpeed's file (--ds_config): merged with the flags, checked, and written as it runs."""

import json
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from conftest import PROJECT

from distributed_training.cli.parse import parse_arguments
from distributed_training.errors import UserError
from distributed_training.files.json_types import lookup
from distributed_training.strategies.deepspeed import preparation
from distributed_training.strategies.deepspeed.options import (
    ModelSizes,
    complete_ds_config,
    read_ds_config,
)
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
        (optimizer("Adam", adam_w_mode=True, bias_correction=True, amsgrad=False), True),
        (optimizer("AdamW", adam_w_mode=False, torch_adam=True), True),
        (optimizer("Adam") | zero(2, offload_optimizer={"device": "cpu"}), False),
    ],
)
def test_adam_of_a_file_is_pytorchs(read, content, needs_no_op):
    """DeepSpeed's own is compiled, on a GPU by an nvcc that fits torch."""
    params = read(content).strategy.config["optimizer"]["params"]
    assert params.get("torch_adam", False) is needs_no_op


@pytest.mark.parametrize(
    "content, says",
    [
        (optimizer("Adam", adam_w_mode=False), "adam_w_mode"),  # L2 instead of weight decay
        (optimizer("AdamW", amsgrad=True), "amsgrad"),
        (optimizer("AdamW", bias_correction=False), "bias_correction"),
        (optimizer("AdamW", weight_decy=0.1), "weight_decay"),
        (optimizer("AdamW", muon_lr=0.1), "muon_lr"),
    ],
)
def test_another_adam_is_refused_before_the_training(read, content, says):
    """Its states could not be saved, or the parameter would end in a TypeError of the optimizer."""
    with pytest.raises(UserError, match=says):
        read(content)


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


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    "content, ranks, overlaps",
    [
        (zero(2, overlap_comm="auto"), 1, False),
        (zero(2, overlap_comm="auto"), 2, True),
        (zero(3, overlap_comm="auto"), 1, True),
        (zero(2, overlap_comm="auto", **OFFLOAD), 1, True),
        (zero(3, overlap_comm=False), 1, False),
    ],
)
def test_reductions_overlap_where_there_is_something_to_overlap(read, content, ranks, overlaps):
    """On one rank stage 3 waits for the stream of its gathers; offload copies gradients."""
    whole = complete_ds_config(read(content).strategy.config, "bf16", MODEL, ranks, None)
    assert whole["zero_optimization"]["overlap_comm"] is overlaps


@pytest.mark.parametrize("strategy", ["zero3", "offload", "infinity"])
def test_own_files_overlap_on_one_rank(strategy):
    config = parse_arguments(["--strategy", strategy]).strategy.config
    whole = complete_ds_config(config, "bf16", MODEL, 1, "/tmp")
    assert whole["zero_optimization"]["overlap_comm"] is True


def test_stage_3_waits_for_the_stream_of_its_gathers(monkeypatch):
    """On one rank for each parameter: why it must not be the stream of the computation."""
    from deepspeed.runtime.zero import partition_parameters

    stream, parameter = MagicMock(), SimpleNamespace(ds_status=None)
    accelerator = SimpleNamespace(
        resolves_data_dependency=lambda: False, current_stream=lambda: stream
    )
    monkeypatch.setattr(partition_parameters, "get_accelerator", lambda: accelerator)
    handle = object.__new__(partition_parameters.NoGatherHandle)
    vars(handle).update(_NoGatherHandle__param=parameter, _NoGatherHandle__complete=False)
    handle.wait()
    stream.synchronize.assert_called_once()


@pytest.mark.parametrize(
    "content, flags, key, value",
    [
        # DeepSpeed's defaults have changed: 1.0 since PR 8068, true since PR 8035.
        ({}, ["--max_grad_norm", "0"], "gradient_clipping", 0),
        ({"gradient_clipping": "auto"}, ["--max_grad_norm", "0"], "gradient_clipping", 0),
        ({}, [], "gradient_clipping", 1),
        ({}, [], "bf16.check_grad_overflow", False),
        ({"bf16": {"enabled": "auto"}}, [], "bf16.check_grad_overflow", False),
        ({"bf16": {"check_grad_overflow": True}}, [], "bf16.check_grad_overflow", True),
    ],
)
def test_values_do_not_depend_on_the_defaults_of_deepspeed(read, content, flags, key, value):
    whole = complete_ds_config(read(content, *flags).strategy.config, "bf16", MODEL, 1, None)
    assert lookup(whole, key) == value


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "offload", "infinity"])
def test_own_files_have_the_values_whose_defaults_have_changed(strategy):
    content = read_ds_config(f"{PROJECT}/{STRATEGIES[strategy].config_file}")
    assert content["bf16"]["check_grad_overflow"] is False
    assert content["gradient_clipping"] == "auto"


SUMS_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}


def test_gradients_of_stage_1_in_bf16_are_not_added_in_fp32(read):
    config = read(zero(1) | SUMS_IN_FP32).strategy.config
    with pytest.raises(UserError, match=r"grad_accum_dtype .* use --strategy zero2"):
        complete_ds_config(config, "bf16", MODEL, 1, None)


@pytest.mark.parametrize("stage, precision", [(1, "fp32"), (2, "bf16"), (3, "bf16")])
def test_gradients_can_be_added_in_fp32(read, stage, precision):
    config = read(zero(stage) | SUMS_IN_FP32).strategy.config
    whole = complete_ds_config(config, precision, MODEL, 1, None)
    assert lookup(whole, "data_types.grad_accum_dtype") == "fp32"


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


@pytest.mark.parametrize(
    "content, precision, micro_batches, warns",
    [
        (zero(2), "bf16", 64, True),
        (zero(2), "bf16", 63, False),
        (zero(2), "fp32", 512, False),
        (zero(2) | SUMS_IN_FP32, "bf16", 512, False),
    ],
)
def test_sums_of_many_gradients_in_bf16_are_named(
    read, capsys, content, precision, micro_batches, warns
):
    strategy = read(content).strategy
    preparation.warn_of_sums_in_bf16(strategy, precision, micro_batches)
    assert ("micro-batches in bf16" in "".join(capsys.readouterr())) == warns
