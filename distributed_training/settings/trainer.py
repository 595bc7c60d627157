"""Flags of Hugging Face's Trainer and run_clm.py, which set others."""

from dataclasses import dataclass
from typing import ClassVar

from distributed_training.settings import flag_types
from distributed_training.settings.fields import ORDER, flag


@dataclass(frozen=True, kw_only=True)
class TrainerFlags:
    """Flags that set others (distributed_training/cli/trainer_flags.py), as they were given."""

    title: ClassVar[str] = "Flags of Hugging Face's Trainer and run_clm.py that set others"

    bf16: bool | None = flag(None, flag_types.boolean, "--precision bf16")
    fp16: bool | None = flag(None, flag_types.boolean, "--precision fp16")
    use_cpu: bool | None = flag(None, flag_types.boolean, "--device cpu", names="no_cuda")
    use_peft: bool | None = flag(
        None, flag_types.boolean, "train adapters, which needs --lora_r", needs="lora_r"
    )
    do_train: bool | None = flag(None, flag_types.boolean, "train, as without this flag")
    do_eval: bool | None = flag(
        None, flag_types.boolean, "evaluate; without --do_train, do not train (--eval_only)"
    )
    eval_strategy: str | None = flag(
        None,
        flag_types.choice,
        "steps: --eval_every 500. no: --no_eval, unless with --do_eval",
        choices=("no", "steps", "epoch"),
        names="evaluation_strategy",
    )
    save_strategy: str | None = flag(
        None,
        flag_types.choice,
        "epoch: --save_epochs. steps: --save_every 500. no: neither",
        choices=("no", "steps", "epoch"),
    )
    validation_split_percentage: int | None = flag(
        None,
        flag_types.whole(1, 99),
        "--validation_split N/100, without a validation split",
        metavar="N",
        effect=ORDER,
    )
    deepspeed: str | bool | None = flag(
        None,
        flag_types.file_or_switch,
        "--ds_config FILE; without FILE, the one of --ds_config or of the strategy",
        metavar="FILE",
        nargs="?",
        const="true",
        names="use_deepspeed",
    )
    fsdp: str | None = flag(
        None,
        flag_types.fsdp_options,
        "--strategy fsdp, with options such as 'full_shard auto_wrap offload'",
        metavar="OPTIONS",
        nargs="?",
        const="true",
        names="use_fsdp",
    )
