"""Flags of Hugging Face's Trainer and of accelerate that set others."""

from distributed_training.cli.parser import Options
from distributed_training.errors import UserError
from distributed_training.strategies.strategy import FlagValues

TRAINER_STEPS = 500  # Trainer's default of --save_steps and --eval_steps
# What --do_eval without --do_train sets flags of training to that --eval_only excludes.
OF_TRAINING = {"save_every": None, "save_epochs": False, "eval_every": None}
OF_TRAINING |= {"load_best_at_end": False, "auto_micro_batch": False}


def expand(values: dict[str, object], spelled: dict[str, str]) -> None:
    """Set what --bf16, --fp16, --use_cpu, --deepspeed and --fsdp set.

    Args:
        values: the flags of the command line or of the run file; changed in place.
        spelled: the option that set each flag; changed in place.
    """

    def put(flag: str, value: str, by: str) -> None:
        if values.setdefault(flag, value) != value:
            other = spelled[flag]
            raise UserError(f"{other} and {spelled[by]} both set --{flag}: leave one out.")
        spelled.setdefault(flag, spelled[by])

    halves = {half: values.pop(half) for half in ("bf16", "fp16") if half in values}
    for half in filter(halves.get, halves):
        put("precision", half, by=half)
    if halves and "precision" not in values:
        put("precision", "fp32", by=next(iter(halves)))
    if values.pop("use_cpu", False):
        put("device", "cpu", by="use_cpu")
    deepspeed = values.pop("deepspeed", None)
    if isinstance(deepspeed, str):
        put("ds_config", deepspeed, by="deepspeed")
    elif deepspeed is False:
        for flag in ("deepspeed", "ds_config"):  # a run file may configure the library that is off
            spelled.pop(flag, None)
            values.pop(flag, None)
    if values.get("fsdp"):
        put("strategy", "fsdp", by="fsdp")


def convert(flags: Options) -> FlagValues:
    """Return what --do_train, --do_eval, --eval_strategy and --save_strategy set."""
    if flags.do_eval and not flags.do_train:
        return {**OF_TRAINING, "eval_only": True}
    changes: dict[str, object] = {}
    if (saves := flags.save_strategy) is not None:  # as in Trainer, steps count for "steps" only
        changes["save_every"] = (flags.save_every or TRAINER_STEPS) if saves == "steps" else None
        changes["save_epochs"] = flags.save_epochs or saves == "epoch"
    if flags.eval_only:
        return changes
    if flags.eval_strategy is not None:
        in_steps = flags.eval_strategy == "steps"
        changes["eval_every"] = (flags.eval_every or TRAINER_STEPS) if in_steps else None
    if flags.do_eval is False or (flags.eval_strategy == "no" and not flags.do_eval):
        changes["eval"] = False
    return changes
