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

TEXTS = [
    *("--dataset_config", "--dataset_revision", "--train_split", "--eval_split"),
    *("--text_column", "--prompt_column", "--completion_column", "--model_revision"),
    *("--lora_targets", "--generate"),
]


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
    flag(LONG, says="the value of no flag"),
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
    flag("--dataset_name", "x", "--dataset_config_name", "y", dataset="x", dataset_config="y"),
    flag("--train_file", "README.md", dataset="README.md"),
    flag("--block_size", "64", seq_length=64),
    flag("--max_seq_length", "64", seq_length=64),
    flag("--per_device_eval_batch_size", "3", eval_batch_size=3),
    flag("--num_train_epochs", "3.0", epochs=3),
    flag("--num_train_epochs", "1.5", says="--num_train_epochs: 1.5.*--max_steps"),
    flag("--bf16", precision="bf16"),
    flag("--bf16", "True", "--fp16", "False", precision="bf16"),
    flag("--bf16", "False", "--fp16", "True", precision="fp16"),
    flag("--fp16", "false", precision="fp32"),
    flag("--bf16", "--fp16", says="--bf16 and --fp16 both set --precision"),
    flag("--precision", "fp32", "--bf16", says="--precision and --bf16 both set"),
    flag("--bf16", "perhaps", says="--bf16: perhaps"),
    flag("--torch_compile", "True", compile=True),
    flag("--torch_compile", "False", compile=False),
    flag("--gradient_checkpointing", "1", gradient_checkpointing=True),
    flag("--lr_scheduler_type", "cosine", lr_scheduler="cosine"),
    flag("--lr_scheduler_type", "constant_with_warmup", lr_scheduler="constant"),
    flag("--lr_scheduler_type", "polynomial", says="--lr_scheduler_type.*polynomial"),
    flag("--warmup_ratio", "0.1", warmup_ratio=0.1),
    flag("--warmup_ratio", "1.1", says="--warmup_ratio"),
    flag("--warmup_steps", "0.1", says="--warmup_ratio"),
    flag("--save_steps", "7", "--save_total_limit", "2", save_every=7, keep_last=2),
    flag("--save_strategy", "epoch", save_epochs=True),
    flag("--save_strategy", "steps", save_every=500),
    flag(
        "--save_strategy", "no", "--save_steps", "7", says="--save_strategy no and --save_steps 7"
    ),
    flag("--eval_strategy", "steps", "--eval_steps", "7", eval_every=7),
    flag("--evaluation_strategy", "steps", "--logging_steps", "9", eval_every=9),
    flag("--eval_strategy", "epoch", eval=True, eval_every=None),
    flag("--eval_strategy", "no", eval=False),
    flag("--eval_strategy", "epoch", "--eval_steps", "7", says="--eval_steps 7"),
    flag("--do_train", "--do_eval", eval=True, eval_only=False),
    flag("--do_train", "--do_eval", "False", eval=False, eval_only=False),
    flag("--do_eval", eval_only=True),
    flag("--do_train", "False", says="leaves nothing to do"),
    flag(
        "--do_eval",
        "--num_train_epochs",
        "3",
        says="--num_train_epochs needs training: add --do_train",
    ),
    flag("--label_names", "labels", "start_positions", "--lr", "1e-3", lr=1e-3),
    flag("--model", "A b", "--config_name", "A b", model="A b"),
    flag("--model", "A b", "--config_name", "a b", says="the value of --model"),
    flag("--do_eval", "--eval_strategy", "steps", says="add --do_train"),
    flag("--do_eval", "--do_train", "false", "--lr", "1e-3", eval_only=True),
    flag("--overwrite_output_dir", "--load_best_model_at_end", overwrite=True),
    flag("--resume_from_checkpoint", "a/b", resume="a/b"),
    flag("--resume_from_checkpoint", "True", "--output_dir", "x", resume=""),
    flag("--validation_split_percentage", "5", validation_split=None),
    flag("--optim", "adamw_torch_fused", optim="adamw"),
    flag("--optim", "lion_32bit", says="--optim.*lion_32bit"),
    flag("--fsdp", strategy="fsdp"),
    flag("--fsdp", "full_shard auto_wrap", strategy="fsdp"),
    flag("--fsdp", "no_shard", strategy="dp"),
    flag("--fsdp", "", strategy="dp"),
    flag("--fsdp", "full-shard", says="full-shard is none of"),
    flag("--use_peft", "--lora_target_modules", "q_proj", "--lora_r", "4", lora_targets="q_proj"),
    flag("--use_peft", says="add --lora_r 16"),
    flag("--use_peft", "false", "--lora_r", "4", says="cannot both hold"),
    flag("--use_peft", "false", lora_r=None),
    flag("--load_in_8bit", "True", says="--load_in_4bit"),
    flag("--dataloader_num_workers", "4", "--disable_tqdm", "True", batch_size=4),
    flag("--label_smoothing_factor", "0.1", says="--label_smoothing_factor.*mean"),
    flag("--label_smoothing_factor", "0.0", batch_size=4),
    flag("--torch_dtype", "bfloat16", says="--torch_dtype.*fp32"),
    flag("--model_type", "gpt2", says="--from_scratch"),
    flag("--group_by_length", says="--group_by_length.*order"),
    flag("--gradient_checkpointing_kwargs", '{"use_reentrant": false}', batch_size=4),
    flag("--hub_token", "hf_" + 30 * "x", says="^((?!xxx).)*HF_TOKEN((?!xxx).)*$"),
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
        says="both set",
    ),
    flag("--use_fsdp", "--strategy", "zero2", says="use_fsdp.* contradicts"),
    flag("--fsdp", "--strategy", "zero2", says="--fsdp .*contradicts"),
    flag("--use_fsdp", "--deepspeed", says="cannot both"),
    flag("--fsdp", "full_shard", "--deepspeed", "ds_config_stage2.json", says="cannot both"),
    flag("--hostfile", "x", says="flag of the launcher"),
    flag("--nproc_per_node=2", says="flag of the launcher"),
    flag("--nproc-per-node=2", says="flag of the launcher"),
    flag("--num_gpus", "2", says="flag of the launcher"),
    flag("--num_processes", "2", says="flag of the launcher"),
    flag("--master_port", "29501", says="flag of the launcher"),
    flag("--batch-size", "2", says="did you mean --batch_size"),
    flag("--learning_rat", "2", says="did you mean --learning_rate"),
    flag("--per_device_train_batchsize", "2", says="mean --per_device_train_batch_size"),
    flag("--wramup_ratio", "2", says="did you mean --warmup_ratio"),
    flag("--evaluation_stategy", "no", says="did you mean --evaluation_strategy"),
    flag("--zzz", says=r"unknown argument --zzz \("),  # no guess
)
def test_spelling(attack, tmp_path, monkeypatch):
    monkeypatch.chdir(PROJECT)
    attack.check(tmp_path, parsed(attack.args))
