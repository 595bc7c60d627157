"""Attacks on DeepSpeed's and FSDP's JSON."""

import json

import pytest
from attacks import Attack, table
from command_lines import DEEP, DIGITS, LONG, parsed, written
from conftest import PROJECT

from support.cli.parse import parse_arguments
from support.errors import UserError


def ds(name: str, content: str, says: str | None = None, **settled) -> Attack:
    return written(name, content, "--ds_config", "FILE", says=says, **settled)


def stage2(**change) -> str:
    config = json.loads((PROJECT / "ds_config_stage2.json").read_text())
    return json.dumps({**config, **change})


def on_nvme(path: str) -> str:
    return json.dumps(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": path},
            }
        }
    )


def zero(**change) -> str:
    return stage2(zero_optimization={"stage": 2, **change})


@table(
    ds(
        "a key given twice",
        '{"zero_optimization": {"stage": 2}, "gradient_clipping": 1, "gradient_clipping": 2}',
        "gradient_clipping twice",
    ),
    ds(
        "a key given twice inside", '{"zero_optimization": {"stage": 2, "stage": 3}}', "stage twice"
    ),
    ds(
        "many keys, the last one twice",
        "{" + "".join(f'"{key}": 1, ' for key in range(60_000)) + '"59999": 2}',
        "59999 twice",
    ),
    ds(
        "a key given twice, with a comment",
        '{// mine\n"zero_optimization": {"stage": 2, "stage": 3}}',
        "stage twice",
    ),
    ds("enabled: yes", stage2(bf16={"enabled": "yes"}), "bf16.enabled must be true or false"),
    ds("enabled: 1", stage2(bf16={"enabled": 1}), "bf16.enabled"),
    ds("enabled in quotes", stage2(fp16={"enabled": "true"}), "fp16.enabled"),
    ds("auto_cast: on", stage2(fp16={"auto_cast": "on"}), "fp16.auto_cast"),
    ds("overlap_comm: yes", zero(overlap_comm="yes"), "zero_optimization.overlap_comm"),
    ds("a bucket in quotes", zero(reduce_bucket_size="5e8"), "reduce_bucket_size must be a number"),
    ds(
        "a stage in quotes",
        stage2(zero_optimization={"stage": "2"}),
        "zero_optimization.stage must be a number",
    ),
    ds(
        "a stage that is no whole number",
        stage2(zero_optimization={"stage": 2.0}),
        "stage must be a whole number",
    ),
    ds("a stage that there is not", stage2(zero_optimization={"stage": 4}), "must be 1, 2 or 3"),
    ds(
        "a device that there is not",
        zero(offload_optimizer={"device": "gpu"}),
        "device must be one of",
    ),
    ds("a number as device", zero(offload_param={"device": 3}), "device must be one of"),
    ds("a list as device", zero(offload_param={"device": []}), "device must be one of"),
    ds("a total batch of 10^26", stage2(train_batch_size=10**26), "train_batch_size"),
    ds(
        "a micro-batch that is a list",
        stage2(train_micro_batch_size_per_gpu=[2]),
        "train_micro_batch_size_per_gpu",
    ),
    ds(
        "a clipping that is no number",
        '{"zero_optimization": {"stage": 2}, "gradient_clipping": NaN}',
        "gradient_clipping",
    ),
    ds(
        "a rate that is true",
        stage2(optimizer={"type": "AdamW", "params": {"lr": True}}),
        "optimizer.params.lr",
    ),
    ds(
        "a stage that is true",
        stage2(zero_optimization={"stage": True}),
        "zero_optimization.stage must be a number",
    ),
    ds(
        "a section that is true",
        stage2(zero_optimization=True),
        "zero_optimization must be an object",
    ),
    ds(
        "an offload that is true",
        zero(offload_optimizer=True),
        "offload_optimizer must be an object",
    ),
    ds("a section that is null", stage2(optimizer=None), "optimizer must be an object"),
    ds(
        "pin_memory: yes",
        zero(offload_optimizer={"device": "cpu", "pin_memory": "yes"}),
        "pin_memory",
    ),
    ds(
        "torch_adam: 1",
        stage2(optimizer={"type": "AdamW", "params": {"torch_adam": 1}}),
        "torch_adam",
    ),
    ds(
        "digits", f'{{"zero_optimization": {{"stage": 2}}, "train_batch_size": {DIGITS}}}', "digits"
    ),
    ds(
        "digits, with a comment",
        f'{{// x\n"train_batch_size": {DIGITS}, "zero_optimization": {{"stage": 2}}}}',
        "digits",
    ),
    ds("nested", '{"a":' * DEEP, "nested"),
    ds("nested lists", "[" * DEEP, "nested"),
    ds("nested, with a comment", "/* x */" + '{"a":' * DEEP, "nested"),
    ds("nested, but parsed", '{"a":' * 60 + "1" + "}" * 60, "nested"),
    ds("a list", "[1]", "object"),
    ds("empty", "", "stage"),
    ds(
        "a large micro-batch",
        stage2(train_micro_batch_size_per_gpu=10**12),
        "train_micro_batch_size_per_gpu",
    ),
    ds(
        "a micro-batch that is true",
        stage2(train_micro_batch_size_per_gpu=True),
        "train_micro_batch_size_per_gpu",
    ),
    ds("a NUL in nvme_path", on_nvme("a\0b"), "nvme_path.*control"),
    ds("a long nvme_path", on_nvme(LONG), "nvme_path"),
    ds("a rate in quotes", stage2(optimizer={"type": "AdamW", "params": {"lr": "7e-5"}}), lr=7e-5),
    ds("a mark of byte order", "\ufeff" + stage2(), strategy="zero2"),
    ds(
        "everything auto",
        stage2(train_batch_size="auto", zero_optimization={"stage": 2, "reduce_scatter": True}),
        strategy="zero2",
    ),
    ds(
        "betas and eps auto",
        stage2(
            optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}}
        ),
        strategy="zero2",
    ),
)
def test_deepspeed_file(attack, tmp_path):
    attack.check(tmp_path, parsed(attack.prepare(tmp_path)))


def test_auto_in_deepspeeds_file_leaves_the_run_file_to_decide(tmp_path):
    (tmp_path / "ds.json").write_text(stage2())
    (tmp_path / "run.yaml").write_text(
        f"batch_size: 2\ngradient_accumulation_steps: 3\ndeepspeed: {tmp_path}/ds.json\n"
    )
    args = parse_arguments(["--config", str(tmp_path / "run.yaml")])
    assert (
        args.ds_config_dict["train_micro_batch_size_per_gpu"] == 2
        and args.ds_config_dict["train_batch_size"] == 6
    )
    (tmp_path / "ds.json").write_text(stage2(train_micro_batch_size_per_gpu=4))
    with pytest.raises(
        UserError, match=r"--batch_size 2 contradicts train_micro_batch_size_per_gpu 4"
    ):
        parse_arguments(["--config", str(tmp_path / "run.yaml")])


@table(
    written(
        "a key given twice",
        '{"fsdp_offload_params": true, "fsdp_offload_params": false}',
        *(fsdp := ("--strategy", "fsdp", "--fsdp_config", "FILE")),
        says="twice",
    ),
    written("a text for a switch", '{"fsdp_offload_params": "yes"}', *fsdp, says="true or false"),
    written("nested", '{"a":' * DEEP, *fsdp, says="nested"),
    written("digits", f'{{"fsdp_version": {DIGITS}}}', *fsdp, says="digits"),
    written(
        "a list as a value",
        '{"fsdp_sharding_strategy": ["FULL_SHARD"]}',
        *fsdp,
        says="fsdp_sharding_strategy",
    ),
    written(
        "an object as a value", '{"fsdp_auto_wrap_policy": {}}', *fsdp, says="fsdp_auto_wrap_policy"
    ),
    written(
        "true as a number", '{"fsdp_sharding_strategy": true}', *fsdp, says="fsdp_sharding_strategy"
    ),
    written("not UTF-8", b'{"\xff": 1}', *fsdp, says="UTF-8"),
)
def test_fsdp_file(attack, tmp_path):
    attack.check(tmp_path, parsed(attack.prepare(tmp_path)))
