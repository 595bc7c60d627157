"""How the model is trained: batches, steps, optimizer, precision, evaluations."""

from dataclasses import dataclass
from typing import ClassVar

from distributed_training.optimizers import OPTIMIZERS
from distributed_training.settings import flag_types
from distributed_training.settings.fields import (
    COMPUTED,
    EVALUATIONS,
    MUST_MATCH,
    NEED_EVALUATIONS,
    ORDER,
    RATE,
    REPORTED,
    ROUNDING,
    UPDATES,
    flag,
    switch,
)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Batches, steps, learning rate, optimizer, precision and evaluations."""

    title: ClassVar[str] = "Training"

    batch_size: int = flag(
        4,
        flag_types.batch_or_auto,
        "sequences per GPU in a micro-batch; auto: as many as fit, see --global_batch_size",
        metavar="N",
        names="per_device_train_batch_size micro_batch_size",
        effect=ROUNDING,
        at_resume=REPORTED,
        planned=True,
    )
    global_batch_size: int | None = flag(
        None,
        flag_types.batch,
        "sequences of an optimizer step on all ranks; determines the accumulation",
        metavar="N",
    )
    eval_batch_size: int | None = flag(
        None,
        flag_types.batch,
        "sequences per GPU in a batch of an evaluation (default: --batch_size)",
        metavar="N",
        names="per_device_eval_batch_size",
        effect=EVALUATIONS,
    )
    rank_shares: tuple[float, ...] | str | None = flag(
        None,
        flag_types.shares,
        "unequal GPUs: the share of each rank (or of the ranks of each node) in a micro-batch of "
        "--batch_size × ranks, such as 3,2,1; auto: measure and choose (default: equal)",
        metavar="LIST",
        effect=ROUNDING,
    )
    gradient_accumulation_steps: int = flag(
        1,
        flag_types.batch,
        "micro-batches per optimizer step",
        effect=ROUNDING,
        at_resume=REPORTED,
        planned=True,
    )
    auto_micro_batch: bool = switch(
        False, "if memory runs out at the start, halve --batch_size, double accumulation"
    )
    epochs: int | None = flag(
        None,
        flag_types.epochs,
        "passes over the data (default: 1, or what --max_steps needs)",
        names="num_train_epochs num_epochs",
        effect=RATE,
        at_resume=REPORTED,
    )
    max_steps: int | None = flag(
        None,
        flag_types.max_steps,
        "stop after this many optimizer steps",
        effect=RATE,
        at_resume=REPORTED,
    )
    skip_steps: tuple[int, ...] = flag(
        (),
        flag_types.list_of_steps,
        "optimizer steps, such as 1234,1300, whose batches are not trained on",
        metavar="LIST",
        effect=UPDATES,
    )
    lr: float = flag(
        COMPUTED,
        flag_types.real(1000),
        "peak learning rate (default: 5e-5, adapters 2e-4, random weights 5e-4; sgd 0.1)",
        names="learning_rate",
        effect=RATE,
        at_resume=REPORTED,
    )
    lr_scheduler: str = flag(
        "linear",
        flag_types.choice,
        "decay after warm-up; wsd: stable until the last --decay_ratio of the steps",
        choices=("linear", "cosine", "constant", "wsd"),
        names="lr_scheduler_type",
        effect=RATE,
        at_resume=REPORTED,
    )
    decay_ratio: float = flag(
        0.1,
        flag_types.real(1),
        "wsd: the decay as a share of all steps, rounded up",
        effect=RATE,
        at_resume=REPORTED,
        used_by="--lr_scheduler wsd",
    )
    decay_type: str = flag(
        "linear",
        flag_types.choice,
        "wsd: the form of the decay",
        choices=("linear", "1-sqrt"),
        effect=RATE,
        at_resume=REPORTED,
        used_by="--lr_scheduler wsd",
    )
    min_lr_ratio: float = flag(
        0.0,
        flag_types.probability,
        "share of --lr at which the decay ends",
        effect=RATE,
        at_resume=REPORTED,
        used_by="schedules with a decay",
    )
    warmup_steps: int = flag(
        0,
        flag_types.whole(0, flag_types.MOST_STEPS),
        "steps of linear warm-up",
        names="num_warmup_steps",
        excludes="warmup_ratio",
        effect=RATE,
        at_resume=REPORTED,
    )
    warmup_ratio: float = flag(
        0.0,
        flag_types.real(1, zero=True),
        "warm-up as a share of all steps, rounded up",
        effect=RATE,
        at_resume=REPORTED,
    )
    optim: str = flag(
        "adamw",
        flag_types.choice,
        "adamw, adamw_8bit (bitsandbytes), adafactor, muon, sgd, or Trainer's name of one of them",
        metavar="NAME",
        choices=tuple(OPTIMIZERS),
        effect=UPDATES,
        at_resume=REPORTED,
        planned=True,
    )
    adam_beta1: float = flag(
        0.9,
        flag_types.probability,
        "AdamW's decay of the first moment",
        effect=UPDATES,
        at_resume=REPORTED,
    )
    adam_beta2: float = flag(
        0.999,
        flag_types.probability,
        "AdamW's decay of the second moment",
        effect=UPDATES,
        at_resume=REPORTED,
    )
    adam_epsilon: float = flag(
        1e-08, flag_types.positive_float, "AdamW's epsilon", effect=UPDATES, at_resume=REPORTED
    )
    weight_decay: float = flag(
        0.01,
        flag_types.natural_float,
        "none on biases and norms",
        effect=UPDATES,
        at_resume=REPORTED,
    )
    max_grad_norm: float = flag(
        1.0,
        flag_types.natural_float,
        "clip the gradient's norm; 0 = never",
        effect=UPDATES,
        at_resume=REPORTED,
    )
    device: str = flag(
        "auto",
        flag_types.choice,
        "auto: the GPUs if there are any. cpu: train on the CPU, also if there are GPUs",
        choices=("auto", "cpu"),
        effect=ROUNDING,
    )
    precision: str = flag(
        "auto",
        flag_types.precision,
        "auto: bf16 where the device does it well, fp16 on older GPUs, else fp32",
        choices=("auto", "fp32", "bf16", "fp16"),
        names="mixed_precision",
        effect=ROUNDING,
        planned=True,
    )
    seed: int = flag(
        42,
        flag_types.whole(0, 2**63 - 1),
        "weights, order of the data, dropout",
        effect=ORDER,
        at_resume=MUST_MATCH,
    )
    deterministic: bool = switch(
        False, "only deterministic kernels (slower)", names="full_determinism", effect=ROUNDING
    )
    cuda_graph: bool = switch(
        False,
        "dp on one GPU: record the kernels of a micro-batch and launch them together (speed not "
        "measured yet)",
        excludes="compile compile_loss gradient_checkpointing load_in_4bit simulate_gpus eval_only",
        effect=ROUNDING,
        planned=True,
    )
    bf16_blocks: bool = switch(
        False,
        "dp in bf16: transformer blocks compute entirely in bf16, as under the other strategies",
        excludes="gradient_checkpointing lora_r eval_only",
        effect=ROUNDING,
        used_by="dp",
        planned=True,
    )
    eval: bool = switch(
        True,
        "no evaluation (default: after each epoch)",
        excludes=NEED_EVALUATIONS,
        effect=EVALUATIONS,
    )
    eval_first: bool = switch(
        False, "also evaluate before training", names="eval_on_start", effect=EVALUATIONS
    )
    eval_only: bool = switch(
        False,
        "evaluate and do not train",
        excludes=(
            "no_eval save_every save_epochs resume auto_micro_batch lora_r "
            f"export_hf export_dtype push_to_hub {NEED_EVALUATIONS}"
        ),
        effect=EVALUATIONS,
    )
    eval_every: int | None = flag(
        None,
        flag_types.steps,
        "evaluate every N optimizer steps and at the end, instead of after each epoch",
        metavar="N",
        names="eval_steps",
        effect=EVALUATIONS,
    )
    generate_every_eval: bool = switch(
        False, "continue the texts of --generate after each evaluation as well", needs="generate"
    )
    early_stopping_patience: int | None = flag(
        None,
        flag_types.positive_int,
        "stop after K evaluations without improvement (default: never)",
        metavar="K",
        effect=EVALUATIONS,
    )
    load_best_at_end: bool = switch(
        False,
        "end with the weights of the best evaluation (default: the last)",
        names="load_best_model_at_end",
        effect=EVALUATIONS,
    )
    eval_samples: int | None = flag(
        None,
        flag_types.tokens,
        "sequences to evaluate (default: --num_samples, else all)",
        names="max_eval_samples",
        effect=EVALUATIONS,
    )

    def global_batch(self, world_size: int) -> int:
        """Return the sequences of an optimizer step, over all ranks."""
        return self.batch_size * self.gradient_accumulation_steps * world_size


def default_learning_rate(optim: str, random_weights: bool, adapters: bool) -> float:
    """Return --lr for a run without it.

    Args:
        random_weights: the model has random weights, or is the embedded one.
        adapters: only adapters are trained.
    """
    if rate := OPTIMIZERS[optim].lr:
        return rate
    # At 1e-3 the embedded model's loss sometimes jumps; at such a step rounding differences
    # between strategies become visible.
    return 5e-4 if random_weights else 2e-4 if adapters else 5e-5
