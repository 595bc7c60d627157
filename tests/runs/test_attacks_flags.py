"""Attacks on the script's flags, and their other names."""

import re

from attacks import table
from command_lines import DIGITS, LONG, flag, parsed
from conftest import PROJECT

PATHS = [
    "--model",
    "--dataset",
    "--validation_file",
    "--chat_template",
    "--cache_dir",
    "--ds_config",
    "--fsdp_config",
    "--nvme_path",
    "--output_dir",
    "--resume",
    "--export_hf",
    "--memory_snapshot",
    "--profile",
    "--config",
    "--deepspeed",
]

TEXTS = ["--dataset_config", "--text_column", "--lora_targets", "--generate"]


@table(
    *[
        flag(path, "", says=f"{path}.*empty")
        for path in PATHS + TEXTS
        if path not in ("--lora_targets", "--generate")
    ],
    flag("--lora_targets", " ", says="--lora_targets"),
    flag("--generate", "", says="--generate"),
    *[flag(path, LONG, says=f"{path}.*longer than a file name") for path in PATHS],
    *[flag(path, "/" + 1100 * "abcd/", says=f"{path}.*longer than a file name") for path in PATHS],
    *[flag(path, "a\nb", says=f"{path}.*control characters") for path in PATHS],
    *[
        flag(path, "~nobody-at-all/x", says=f"{path}.*home folder of an unknown user")
        for path in PATHS
    ],
    flag("--output_dir", "a\udcffb", says="not UTF-8"),
    flag("--generate", "a\udcffb", says="not UTF-8"),
    flag("--output_dir", "läufe/ä b\u00a0c", output_dir="läufe/ä b\u00a0c"),
    *[
        flag(f"--{name}", value, says=f"--{name}.*{re.escape(value[:20])}")
        for name in (
            "seed",
            "batch_size",
            "seq_length",
            "gradient_accumulation_steps",
            "epochs",
            "max_steps",
            "warmup_steps",
            "num_samples",
            "eval_samples",
            "eval_every",
            "save_every",
            "keep_last",
            "logging_steps",
            "early_stopping_patience",
            "ddp_timeout",
            "simulate_gpus",
            "lora_r",
            "shuffle_buffer",
            "max_bad_rows",
            "lora_alpha",
            "lr",
            "weight_decay",
            "max_grad_norm",
        )
        for value in ("100000000000000000000000", DIGITS, "-1", "1e400")
    ],
    flag("--local_rank", DIGITS, says="--local_rank"),
    flag("--lr", "1e308", says="--lr"),
    flag("--dropout", DIGITS, says="--dropout"),
    flag("--seed", str(2**63 - 1), seed=2**63 - 1),
    flag("--batch_size", "٤", batch_size=4),  # digits of another script are digits
    flag(LONG, says="unknown argument"),
    flag("--strategy", LONG, says="--strategy"),
    flag("--report_to", LONG, says="no tracker"),
    flag("--unknown\nflag", says=r"unknown argument --unknown\\nflag"),
)
def test_flag(attack, tmp_path):
    attack.check(tmp_path, parsed(attack.args))


@table(
    flag("--learning_rate", "1e-3", lr=1e-3),
    flag("--num_epochs", "3", epochs=3),
    flag("--num_train_epochs", "3", epochs=3),
    flag("--data_size", "20", num_samples=20),
    flag("--mixed_precision", "no", precision="fp32"),
    flag("--mixed_precision", "bf16", precision="bf16"),
    flag("--max_length", "64", seq_length=64),
    flag("--model_name_or_path", "gpt2", model="gpt2"),
    flag("--per_device_train_batch_size", "2", batch_size=2),
    flag("--learning_rate", "x", says="--learning_rate"),
    flag("--learning_rate", "1e-3", "--lr", "1e-4", says="--learning_rate and --lr are two names"),
    flag("--num_epochs=2", "--num_train_epochs=3", says="two names"),
    flag("--lr", "1e-3", "--lr", "1e-4", lr=1e-4),  # one spelling: the last wins, as always
    flag(
        "--deepspeed", "ds_config_stage2.json", strategy="zero2", ds_config="ds_config_stage2.json"
    ),
    flag("--deepspeed=ds_config_stage3.json", strategy="zero3"),
    flag("--deepspeed", "--deepspeed_config", "ds_config_stage1.json", strategy="zero1"),
    flag("--deepspeed_config", "ds_config_offload.json", "--deepspeed", strategy="offload"),
    flag(
        "--deepspeed",
        "ds_config_infinity.json",
        "--batch_size",
        "2",
        strategy="infinity",
        batch_size=2,
    ),
    flag("--deepspeed", "--strategy", "zero3", strategy="zero3"),
    flag("--use_deepspeed", "--strategy", "zero1", strategy="zero1"),
    flag("--use_fsdp", strategy="fsdp"),
    flag("--deepspeed", says="--deepspeed needs"),
    flag("--deepspeed", "--strategy", "dp", says="--strategy dp"),
    flag("--deepspeed", "ds_config_stage2.json", "--strategy", "fsdp", says="--strategy fsdp"),
    flag("--deepspeed", "ds_config_stage2.json", "--strategy", "zero3", says="stage 2"),
    flag(
        "--deepspeed",
        "ds_config_stage2.json",
        "--ds_config",
        "ds_config_stage3.json",
        says="two names",
    ),
    flag("--use_fsdp", "--strategy", "zero2", says="--use_fsdp contradicts"),
    flag("--use_fsdp", "--deepspeed", says="cannot both"),
    flag("--hostfile", "x", says="flag of the launcher"),
    flag("--nproc_per_node=2", says="flag of the launcher"),
    flag("--nproc-per-node=2", says="flag of the launcher"),
    flag("--num_gpus", "2", says="flag of the launcher"),
    flag("--num_processes", "2", says="flag of the launcher"),
    flag("--master_port", "29501", says="flag of the launcher"),
    flag("--batch-size", "2", says="did you mean --batch_size"),
    flag("--learning_rat", "2", says="did you mean --learning_rate"),
    flag("--zzz", says=r"unknown argument --zzz \("),  # no guess
)
def test_spelling(attack, tmp_path, monkeypatch):
    monkeypatch.chdir(PROJECT)
    attack.check(tmp_path, parsed(attack.args))
