"""What a run writes: results, checkpoints, the exported model, logs."""

from dataclasses import dataclass
from typing import ClassVar

from distributed_training.settings import flag_types
from distributed_training.settings.fields import ROUNDING, flag, switch


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """The results, the checkpoints, the exported model and the logs."""

    title: ClassVar[str] = "Output"

    output_dir: str | None = flag(
        None, flag_types.place, "folder of the results (default: runs/<model>-<strategy>-<time>)"
    )
    overwrite: bool = switch(
        False,
        "replace another run's results in --output_dir, or what is in --export_hf",
        names="overwrite_output_dir",
    )
    save_every: int | None = flag(
        None,
        flag_types.steps,
        "save a checkpoint every N steps (default: never)",
        metavar="N",
        names="save_steps",
    )
    save_epochs: bool = switch(False, "write a checkpoint at the end of each epoch")
    keep_last: int | None = flag(
        None,
        flag_types.positive_int,
        "keep the newest K checkpoints only (default: all)",
        metavar="K",
        names="save_total_limit",
    )
    no_save: bool = switch(
        False,
        "write no checkpoint, not even when a signal stops the run",
        excludes="save_every save_epochs load_best_at_end",
    )
    resume: str | None = flag(
        None,
        flag_types.checkpoint,
        "continue from PATH, or from the newest whole checkpoint in --output_dir, if any",
        metavar="PATH",
        nargs="?",
        const="true",
        names="resume_from_checkpoint",
        effect=ROUNDING,
    )
    resume_force: bool = switch(
        False,
        "resume although the text, the batch or the seed has changed",
        needs="resume",
        effect=ROUNDING,
    )
    export_hf: str | None = flag(
        None,
        flag_types.place,
        "where the trained model goes, for from_pretrained (default: hf in --output_dir)",
        metavar="DIR",
    )
    no_export: bool = switch(
        False,
        "do not write the trained model",
        excludes="export_hf export_dtype merge_lora push_to_hub",
    )
    export_dtype: str = flag(
        "fp32",
        flag_types.choice,
        "type of the exported weights (default: fp32, as they are trained)",
        choices=("fp32", "bf16", "fp16"),
    )
    push_to_hub: bool = switch(False, "push the exported model to the Hugging Face hub at the end")
    hub_model_id: str | None = flag(
        None,
        flag_types.label,
        "repository to push to (default: the name of --output_dir)",
        metavar="NAME",
        names="push_to_hub_model_id",
        needs="push_to_hub",
    )
    hub_private_repo: bool = switch(
        False, "create that repository as a private one", needs="push_to_hub"
    )
    generate: tuple[str, ...] = flag(
        (),
        str,
        "print a continuation of this text, or the answer to it, at the end; may be repeated",
        action="append",
        metavar="PROMPT",
    )
    logging_steps: int = flag(10, flag_types.steps, "optimizer steps between two lines")
    report_to: tuple[str, ...] = flag(
        (),
        flag_types.reporters,
        "tensorboard, wandb, or both with a comma between (default: none)",
        metavar="LIST",
    )
    logging_dir: str | None = flag(
        None,
        flag_types.place,
        "files of --report_to tensorboard (default: tensorboard in --output_dir)",
        metavar="DIR",
        used_by="--report_to tensorboard",
    )
    run_name: str | None = flag(
        None, flag_types.label, "name of the run in the trackers", metavar="NAME"
    )
    project: str | None = flag(
        None,
        flag_types.label,
        "wandb's project (default: WANDB_PROJECT, else distributed-training)",
        metavar="NAME",
    )
    tags: tuple[str, ...] = flag(
        (),
        flag_types.tags,
        "words for the run in the trackers, with commas between",
        metavar="LIST",
    )
    quiet: bool = switch(False, "print warnings and errors only")
