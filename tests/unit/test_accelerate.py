"""The configuration of `accelerate launch`, which it passes on in environment variables."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROJECT

from distributed_training.cli.parse import parse_arguments
from distributed_training.errors import UserError
from distributed_training.strategies import accelerate

PLAIN = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
PLAIN |= {"ACCELERATE_DYNAMO_MODE": "default", "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False"}
BF16 = PLAIN | {"ACCELERATE_MIXED_PRECISION": "bf16"}
# As accelerate 1.15 sets them for --use_deepspeed and --use_fsdp.
DEEPSPEED = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_DEEPSPEED": "true"}
ZERO3 = DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
FSDP = {
    **PLAIN,
    **{"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"},
    **{"FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "true"},
    **{"FSDP_OFFLOAD_PARAMS": "false", "FSDP_MIN_NUM_PARAMS": "100000000"},
    **{"FSDP_FORWARD_PREFETCH": "false", "FSDP_USE_ORIG_PARAMS": "true"},
    **{"FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_SYNC_MODULE_STATES": "true"},
    **{"FSDP_ACTIVATION_CHECKPOINTING": "false", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false"},
}
FSDP2 = FSDP | {"FSDP_VERSION": "2"}


def zero(stage, optimizer="none", parameters="none", **more):
    names = (f"OFFLOAD_{part}_DEVICE" for part in ("OPTIMIZER", "PARAM"))
    values = dict(zip(("ZERO_STAGE", *names), (stage, optimizer, parameters), strict=True))
    return DEEPSPEED | {f"ACCELERATE_DEEPSPEED_{k}": str(v) for k, v in {**values, **more}.items()}


def check(env, *flags):
    settings = parse_arguments([*flags])
    return accelerate.check(settings.flags(), settings.strategy, env)


def file_in(message):
    return json.loads(re.search(r"\(with (\{.*\})\)", message)[1])


@pytest.mark.parametrize(
    "env, flags",
    [
        (BF16, "--precision bf16"),
        (ZERO3, "--strategy zero3"),
        (DEEPSPEED, "--strategy zero2"),  # accelerate's default
        (zero(0) | PLAIN, ""),
        (zero(2, "cpu"), "--strategy offload"),
        (
            zero(3, "nvme", "nvme", OFFLOAD_PARAM_NVME_PATH="/x"),
            "--strategy infinity --nvme_path /x",
        ),
        (ZERO3 | {"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, "--strategy zero3 --max_grad_norm 0.5"),
        (ZERO3 | {"ACCELERATE_GRADIENT_CLIPPING": "auto"}, "--strategy zero3"),
        (
            PLAIN | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
            "--gradient_accumulation_steps 4",
        ),
        (FSDP, "--strategy fsdp"),
        (FSDP2 | {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}, "--strategy fsdp"),
        (FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "--fsdp --gradient_checkpointing"),
        (PLAIN | {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "--compile"),
    ],
)
def test_the_missing_flags_are_named_and_accepted(env, flags):
    needed = flags.replace("--fsdp ", "--strategy fsdp ").split(" --")
    if flags:
        with pytest.raises(UserError) as error:
            check(env, *(["--strategy", "dp"] if "strategy" not in flags else []))
        assert all(part.removeprefix("--") in str(error.value) for part in needed)
    check(env, *flags.split())


@pytest.mark.parametrize(
    "env, content",
    [
        (
            FSDP | {"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"},
            {"fsdp_sharding_strategy": "SHARD_GRAD_OP"},
        ),
        (FSDP | {"FSDP_SHARDING_STRATEGY": "4"}, {"fsdp_sharding_strategy": "HYBRID_SHARD"}),
        (
            FSDP | {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD_ZERO2"},
            {"fsdp_reshard_after_forward": False},
        ),
        (FSDP2 | {"FSDP_RESHARD_AFTER_FORWARD": "false"}, {"fsdp_reshard_after_forward": False}),
        (FSDP2 | {"FSDP_OFFLOAD_PARAMS": "true"}, {"fsdp_offload_params": True}),
        (FSDP | {"FSDP_FORWARD_PREFETCH": "true"}, {"fsdp_forward_prefetch": True}),
        (FSDP | {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, {"fsdp_auto_wrap_policy": "NO_WRAP"}),
        (
            FSDP2
            | {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
            | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"},
            {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
        ),
    ],
)
def test_the_named_fsdp_file_is_accepted(env, content, tmp_path):
    for flags in ([], ["--strategy", "fsdp"]):
        with pytest.raises(UserError, match="--fsdp_config FILE") as error:
            check(env, *flags)
    found = file_in(str(error.value))
    assert content.items() <= found.items()
    (tmp_path / "fsdp.json").write_text(json.dumps(found))
    check(env, "--strategy", "fsdp", "--fsdp_config", str(tmp_path / "fsdp.json"))


@pytest.mark.parametrize("places", [(3, "cpu", "cpu"), (3, "cpu", "none"), (1, "cpu", "none")])
def test_the_named_deepspeed_file_is_accepted(places, tmp_path):
    env = zero(*places)
    with pytest.raises(UserError, match="--ds_config FILE") as error:
        check(env, "--strategy", f"zero{places[0]}")
    (tmp_path / "ds.json").write_text(json.dumps(file_in(str(error.value))))
    check(env, "--ds_config", str(tmp_path / "ds.json"))


def test_the_deepspeed_file_of_the_configuration():
    file = f"{PROJECT}/ds_config_stage3.json"
    env = DEEPSPEED | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": file}
    with pytest.raises(UserError, match=f"--ds_config {re.escape(file)}"):
        check(env, "--strategy", "zero3")
    check(env, "--ds_config", os.path.relpath(file))


@pytest.mark.parametrize(
    "more",
    [
        {"ACCELERATE_MIXED_PRECISION": "fp8"},
        {"ACCELERATE_USE_MEGATRON_LM": "true"},
        {"ACCELERATE_DYNAMO_BACKEND": "EAGER"},
        {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_MODE": "max-autotune"},
        {"PARALLELISM_CONFIG_TP_SIZE": "2"},
        {"FSDP_IGNORED_MODULES": "lm_head"},
        FSDP2 | {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"},
        {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "many"},
        zero("inf"),
    ],
)
def test_a_choice_without_a_flag_is_refused(more):
    with pytest.raises(UserError):
        check(PLAIN | more, "--compile", "--strategy", "zero2", "--precision", "fp32")


def test_choices_without_effect_are_named():
    assert check(PLAIN, "--precision", "fp32") == ()
    assert "--precision fp32 is full precision" in check(PLAIN)[0]
    env = FSDP | {
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_BACKWARD_PREFETCH": "NO_PREFETCH",
    }
    [line] = check(env, "--strategy", "fsdp", "--precision", "fp32")
    assert line.endswith("FSDP_BACKWARD_PREFETCH, FSDP_STATE_DICT_TYPE")


# Of the ranks, the devices and threads; and of what is refused, whatever its details are.
OTHERS = """
    MASTER_ADDR MASTER_PORT OMP_NUM_THREADS PYTHONPATH KMP_AFFINITY KMP_BLOCKTIME ACCELERATE_USE_CPU
    ZE_AFFINITY_MASK HABANA_VISIBLE_MODULES ACCELERATE_CONFIG_DS_FIELDS FSDP_MIN_NUM_PARAMS
    ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION ACCELERATE_USE_PARALLELISM_CONFIG
    ACCELERATE_USE_IPEX ACCELERATE_USE_XPU CCL_WORKER_COUNT
    """.split()


def test_no_variable_of_its_launcher_is_unknown():
    if not (spec := importlib.util.find_spec("accelerate")):
        pytest.skip("accelerate is not installed")
    launcher = Path(spec.origin).with_name("utils") / "launch.py"
    names = re.findall(r'env\["([A-Z0-9_]+)"\] =', launcher.read_text(encoding="utf-8"))
    names = [name for name in names if "_VISIBLE_" not in name and name[:4] != "XLA_"]
    source = Path(accelerate.__file__).read_text(encoding="utf-8")
    source = source.replace("{DEEPSPEED}", accelerate.DEEPSPEED)
    source += "".join(f"ACCELERATE_DYNAMO_{name}" for name in re.findall('"([A-Z_]+)":', source))
    source += "".join(zero(2))
    assert len(names) > 40
    assert not {name for name in names if name not in source and name not in OTHERS}


def test_a_run_is_refused_before_it_imports_torch(tmp_path):
    command = [sys.executable, PROJECT / "real_model_example.py", "--print_config"]
    env = os.environ | ZERO3 | {"ACCELERATE_MIXED_PRECISION": "bf16"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "asks for --strategy zero3 --precision bf16" in done.stderr
