"""--reduce_dtype: merged with the engines' files, refused where it cannot hold, and estimated."""

import json

import pytest

from distributed_training.checkpoints.other_runs import WHERE, differences
from distributed_training.cli.parse import read_command_line
from distributed_training.errors import UserError
from distributed_training.memory.estimate import predict
from distributed_training.records.causes import facts_of
from distributed_training.strategies.table import STRATEGIES
from distributed_training.workload.architectures import read_architecture
from distributed_training.workload.workload import OwnRank, Workload

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 1000}
MODEL = read_architecture(GPT2 | {"n_positions": 128}, "tiny")


@pytest.fixture
def read(tmp_path):
    """read(strategy, content, *flags) -> the command line with a file of the strategy."""

    def parse(strategy, content, *flags):
        path = tmp_path / "file.json"
        path.write_text(json.dumps(content))
        kind = "fsdp_config" if strategy == "fsdp" else "ds_config"
        return read_command_line([f"--strategy={strategy}", f"--{kind}={path}", *flags])

    return parse


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_the_flags_value(strategy):
    def of(*flags):
        return read_command_line([f"--strategy={strategy}", *flags]).settings.parallelism

    assert of().strategy_with_options.reduce_dtype is None
    config = getattr(of().strategy_with_options, "config", {})
    assert "communication_data_type" not in config
    parallelism = of("--reduce_dtype=bf16")
    assert parallelism.reduce_dtype == parallelism.strategy_with_options.reduce_dtype == "bf16"
    if config:
        assert parallelism.strategy_with_options.config["communication_data_type"] == "bf16"


STAGE2 = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    "strategy, content, key",
    [
        ("zero2", {**STAGE2, "communication_data_type": "FP16"}, "communication_data_type"),
        ("fsdp", {"fsdp_reduce_dtype": "FLOAT16"}, "fsdp_reduce_dtype"),
        (
            "fsdp",
            {"fsdp_sharding_strategy": "NO_SHARD", "fsdp_reduce_dtype": "FP16"},
            "fsdp_reduce_dtype",
        ),
    ],
)
def test_a_file_sets_the_flag(read, strategy, content, key):
    line = read(strategy, content)
    parallelism = line.settings.parallelism
    assert parallelism.reduce_dtype == parallelism.strategy_with_options.reduce_dtype == "fp16"
    assert line.sources["reduce_dtype"].endswith(f"file.json: {key}")
    assert read(strategy, content, "--reduce_dtype=fp16").settings.parallelism == parallelism
    with pytest.raises(UserError, match=rf"reduce_dtype bf16 contradicts {key}.*change one"):
        read(strategy, content, "--reduce_dtype=bf16")
    with pytest.raises(UserError, match=rf"--prove.*fp32: remove {key} from .*file.json"):
        read(strategy, content, "--prove")


def test_auto_in_a_file_of_deepspeed_is_the_flag(read):
    content = {**STAGE2, "communication_data_type": "auto"}
    flag = read("zero2", content, "--reduce_dtype=bf16").settings.strategy
    assert flag.config["communication_data_type"] == "bf16"
    without = read("zero2", content).settings.strategy
    assert "communication_data_type" not in without.config


def test_wrong_values_are_refused(read):
    with pytest.raises(UserError, match="communication_data_type: int8 is not in bf16, fp16"):
        read("zero2", {**STAGE2, "communication_data_type": "int8"})
    with pytest.raises(UserError, match="leave --reduce_dtype out"):
        read_command_line(["--prove", "--reduce_dtype=fp16"])
    assert read_command_line(["--prove", "--reduce_dtype=fp32"])


def test_fsdp_stays_standard_for_the_estimate(read):
    assert read("fsdp", {"fsdp_reduce_dtype": "BF16"}).settings.strategy.is_standard


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_estimate_sends_half_of_the_gradients(strategy, accumulation):
    def sent(dtype):
        work = Workload(
            MODEL, 2, 1, 64, "fp32", accumulation=accumulation, reduce_dtype=dtype, rank=OwnRank(0)
        )
        return predict(work, strategy).sent

    assert sent("fp32") == sent(None)
    volume = 1 if STRATEGIES[strategy].sharded and not STRATEGIES[strategy].whole_parameters else 2
    reductions = 1 if strategy in ("dp", "zero1", "fsdp") else accumulation
    saved = 2 * volume * reductions * MODEL.total // 2  # a rank of two sends half of the volume
    assert sent(None) - sent("bf16") == sent(None) - sent("fp16") == saved


def test_runs_of_earlier_versions_are_understood():
    """They had an entry of fsdp only."""
    old, new = {"fsdp_reduce_dtype": "bf16"}, {"reduce_dtype": None}
    assert differences(old, new, *WHERE) == [
        "reduce_dtype bf16 in the checkpoint, None in this run"
    ]
    assert differences({"lr": 1}, new, *WHERE) == []
    assert facts_of({"run_signature": {"told": old}})["reduce_dtype"] == "bf16"
