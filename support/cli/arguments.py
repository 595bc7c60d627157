"""All flags, in one frozen dataclass; the parser of flags.py is built from it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from support.cli import argument_types as kinds
from support.errors import UserError
from support.optimizers import OPTIMIZERS
from support.strategies.strategy import Strategy
from support.strategies.table import STRATEGIES
from support.tables import EMBEDDED_MODEL


class Dataset(NamedTuple):
    """A dataset among those of --dataset."""

    name: str  # as for a single one
    weight: str | None = None  # a decimal number, as text; None if no dataset has one

    def __str__(self) -> str:
        return self.name if self.weight is None else f"{self.name}:{self.weight}"


def flag(default: Any, kind: Any, metavar: str | None = None, **options) -> Any:
    """Return the field of a flag with a value; its help is in the docstring of `Arguments`.

    Args:
        kind: its type, usually of argument_types.
        metavar, options: see argparse's `add_argument`.
    """
    details = {"kind": kind, "metavar": metavar, **options}
    if default == []:
        return field(default_factory=list, metadata=details)
    return field(default=default, metadata=details)


@dataclass(frozen=True, eq=False)
class Arguments:
    """The values of the flags by name, and what was resolved from them.

    A value that is known only later goes into a copy: `args = args.replace(seq_length=512)`. The
    groups and texts below are those of --help. Each switch also has --no_NAME; of one that is on by
    default, the text describes that.

    Instead of a run:
        check: try everything that the run needs of this machine and its network, and train nothing
        prefetch: download and tokenize what the run needs, and train nothing
        show_sample: print the first training sequence, and which of its tokens are trained
        prove: make one step in several ways, also on N ranks and with Trainer, and compare it

    Run file:
        config: YAML with these flags; the command line overrides it
        print_config: print every setting with its source, as such a file, and exit

    Model:
        model: tiny-gpt2 (embedded, needs no network), gpt2, gpt2-medium, gpt2-large, gpt2-xl,
            another causal language model on the Hugging Face hub, or a local folder
        model_revision: branch, tag or commit of a model on the hub (default: main)
        from_scratch: take the architecture only; random weights drawn from --seed
        dropout: dropout probability (default: the model's own)
        fused_gelu: compute GPT-2's activation as gelu_new, not as the same function in one kernel
        gradient_checkpointing: recompute activations in the backward pass to save memory
        lora_r: train adapters of this rank (LoRA) only (default: train the whole model)
        lora_alpha: scale adapters by A / R (default: 2 R)
        lora_dropout: dropout before the adapters
        lora_targets: ends of the names of layers, or all-linear (default: the architecture's usual)
        merge_lora: export the whole model with the adapters added, instead of the adapters
        load_in_4bit: keep frozen weights in 4 bits (QLoRA); needs --lora_r and bitsandbytes
        compile: compile the transformer blocks and the loss with torch.compile

    Data:
        dataset: pydocs (embedded), wikitext, a file or folder (.txt .jsonl .json .csv .tsv
            .parquet; each but .parquet also as .gz), or a hub dataset; or several, also with
            weights: A:0.7 B:0.3 (default: pydocs for tiny-gpt2, else wikitext)
        include: files of a folder to read, such as 'books/*.md,*.txt' (default: all)
        dataset_config: configuration name of a hub dataset
        dataset_revision: branch, tag or commit of a hub dataset (default: main)
        train_split: split of a hub dataset to train on, also as 'train[:10%]' (default: train)
        eval_split: split of a hub dataset to evaluate on (default: validation, if there is one)
        text_column: column or key of the text (default: recognized by the row's keys, else text)
        prompt_column: column or key of the prompt
        completion_column: column or key of the completion, which is trained on
        validation_file: file or folder to evaluate on (default: the corpus's own validation split)
        validation_split: share to hold out, 0: none (default: 0.1 without a validation split)
        max_bad_rows: skip up to N rows that cannot be used, and name them
        chat_template: Jinja template of conversations (default: the tokenizer's, else a plain one)
        streaming: read and tokenize while training; needs --max_steps
        shuffle_buffer: sequences among which --streaming shuffles, over all ranks
        seq_length: tokens in a sequence (default: 512, tiny-gpt2 256, or the model's most)
        isolate_documents: tokens attend to their own document only (default: to all earlier ones)
        packing: put several conversations or pairs into a sequence; each attends to itself only
        num_samples: sequences to train on, over all ranks (default: all)
        cache_dir: where tokenized data is kept (default: distributed_training under HF_HOME)

    Training:
        batch_size: sequences per GPU in a micro-batch
        eval_batch_size: sequences per GPU in a batch of an evaluation (default: --batch_size)
        gradient_accumulation_steps: micro-batches per optimizer step
        auto_micro_batch: if memory runs out at the start, halve --batch_size, double accumulation
        epochs: passes over the data (default: 1, or what --max_steps needs)
        max_steps: stop after this many optimizer steps
        lr: peak learning rate (default: 5e-5, adapters 2e-4, random weights 5e-4; sgd 0.1)
        lr_scheduler: decay after warm-up
        warmup_steps: steps of linear warm-up
        warmup_ratio: warm-up as a share of all steps, rounded up
        optim: adamw, adamw_8bit (bitsandbytes), adafactor, sgd, or Trainer's name of one of them
        adam_beta1: AdamW's decay of the first moment
        adam_beta2: AdamW's decay of the second moment
        adam_epsilon: AdamW's epsilon
        weight_decay: none on biases and norms
        max_grad_norm: clip the gradient's norm; 0 = never
        device: auto: the GPUs if there are any. cpu: train on the CPU, also if there are GPUs
        precision: auto: bf16 where the device does it well, fp16 on older GPUs, else fp32
        seed: weights, order of the data, dropout
        deterministic: only deterministic kernels (slower)
        eval: no evaluation (default: after each epoch)
        eval_first: also evaluate before training
        eval_only: evaluate and do not train
        eval_every: evaluate every N optimizer steps and at the end, instead of after each epoch
        early_stopping_patience: stop after K evaluations without improvement (default: never)
        load_best_at_end: end with the weights of the best evaluation (default: the last)
        eval_samples: sequences to evaluate (default: --num_samples, else all)

    Strategy:
        strategy: offload: optimizer on the CPU. infinity: optimizer and parameters on NVMe
        ds_config: DeepSpeed JSON instead of ds_config_*.json
        fsdp_config: FSDP's options in JSON, as accelerate writes them
        nvme_path: where infinity keeps its files (default: the temporary folder)

    Cluster:
        local_rank: accepted and ignored: some launchers append it
        ddp_timeout: seconds until a collective times out
        hang_seconds: write all stacks if a step takes longer (default: a tenth of --ddp_timeout)

    Output:
        output_dir: folder of the results (default: runs/<model>-<strategy>-<time>)
        overwrite: replace another run's results in --output_dir, or what is in --export_hf
        save_every: save a checkpoint every N steps (default: never)
        save_epochs: write a checkpoint at the end of each epoch
        keep_last: keep the newest K checkpoints only (default: all)
        no_save: write no checkpoint, not even when a signal stops the run
        resume: continue from PATH, or from the newest whole checkpoint in --output_dir, if any
        resume_force: resume although the text, the batch or the seed has changed
        export_hf: where the trained model goes, for from_pretrained (default: hf in --output_dir)
        no_export: do not write the trained model
        export_dtype: type of the exported weights (default: fp32, as they are trained)
        push_to_hub: push the exported model to the Hugging Face hub at the end
        hub_model_id: repository to push to (default: the name of --output_dir)
        hub_private_repo: create that repository as a private one
        generate: print a continuation of this text, or the answer to it, at the end
        logging_steps: optimizer steps between two lines
        report_to: tensorboard, wandb, or both with a comma between (default: none)
        logging_dir: files of --report_to tensorboard (default: tensorboard in --output_dir)
        run_name: name of the run in the trackers
        project: wandb's project (default: WANDB_PROJECT, else distributed-training)
        tags: words for the run in the trackers, with commas between
        quiet: print warnings and errors only

    Debugging:
        profile_memory: show memory after each phase and by kind of state
        simulate_gpus: measure the memory of rank 0 of N in one process, in 3 steps without losses
        memory_snapshot: write PyTorch's snapshot of the GPU's memory, for pytorch.org/memory_viz
        profile: write a trace of 3 steps, for ui.perfetto.dev
        verbose: show third-party messages and tracebacks

    Flags of Hugging Face's Trainer and run_clm.py that set others:
        bf16: --precision bf16
        fp16: --precision fp16
        use_cpu: --device cpu
        use_peft: train adapters, which needs --lora_r
        do_train: train, as without this flag
        do_eval: evaluate; without --do_train, do not train (--eval_only)
        eval_strategy: steps: --eval_every 500. no: --no_eval, unless with --do_eval
        save_strategy: epoch: --save_epochs. steps: --save_every 500. no: neither
        validation_split_percentage: --validation_split N/100, without a validation split
        deepspeed: --ds_config FILE; without FILE, the one of --ds_config or of the strategy
        fsdp: --strategy fsdp, with options such as 'full_shard auto_wrap offload'
    """

    # instead of a run
    check: bool = False
    prefetch: bool = False
    show_sample: bool = False
    prove: int | bool | None = flag(None, kinds.ranks, "N", nargs="?", const=True)
    # run file
    config: str | None = flag(None, kinds.name, "FILE")
    print_config: bool = False
    # model
    model: str = flag(EMBEDDED_MODEL, kinds.name)
    model_revision: str | None = flag(None, kinds.word, "REV")
    from_scratch: bool = False
    dropout: float | None = flag(None, kinds.probability)
    fused_gelu: bool = True
    gradient_checkpointing: bool = False
    lora_r: int | None = flag(None, kinds.rank_of_adapters, "R")
    lora_alpha: float | None = flag(None, kinds.positive_float, "A")
    lora_dropout: float = flag(0.0, kinds.probability)
    lora_targets: str | None = flag(None, kinds.word, "LIST")
    merge_lora: bool = False
    load_in_4bit: bool = False
    compile: bool = False
    # data
    dataset: str = flag(None, kinds.name, "NAME", nargs="+")
    include: str | None = flag(None, kinds.word, "PATTERNS")
    dataset_config: str | None = flag(None, kinds.word)
    dataset_revision: str | None = flag(None, kinds.word, "REV")
    train_split: str | None = flag(None, kinds.word, "SPLIT")
    eval_split: str | None = flag(None, kinds.word, "SPLIT")
    text_column: str | None = flag(None, kinds.word)
    prompt_column: str | None = flag(None, kinds.word)
    completion_column: str | None = flag(None, kinds.word)
    validation_file: str | None = flag(None, kinds.name, "FILE")
    validation_split: float | None = flag(None, kinds.probability, "SHARE")
    max_bad_rows: int = flag(0, kinds.natural_int, "N")
    chat_template: str | None = flag(None, kinds.name, "FILE")
    streaming: bool = False
    shuffle_buffer: int = flag(1000, kinds.positive_int, "N")
    seq_length: int = flag(None, kinds.block_length)
    isolate_documents: bool = False
    packing: bool = False
    num_samples: int | None = flag(None, kinds.tokens)
    cache_dir: str | None = flag(None, kinds.name)
    # training
    batch_size: int = flag(4, kinds.batch, "N")
    eval_batch_size: int | None = flag(None, kinds.batch, "N")
    gradient_accumulation_steps: int = flag(1, kinds.batch)
    auto_micro_batch: bool = False
    epochs: int | None = flag(None, kinds.epochs)
    max_steps: int | None = flag(None, kinds.max_steps)
    lr: float = flag(None, kinds.real(1000))
    lr_scheduler: str = flag("linear", kinds.choice, choices=("linear", "cosine", "constant"))
    warmup_steps: int = flag(0, kinds.whole(0, kinds.MOST_STEPS))
    warmup_ratio: float = flag(0.0, kinds.real(1, zero=True))
    optim: str = flag("adamw", kinds.choice, "NAME", choices=tuple(OPTIMIZERS))
    adam_beta1: float = flag(0.9, kinds.probability)
    adam_beta2: float = flag(0.999, kinds.probability)
    adam_epsilon: float = flag(1e-08, kinds.positive_float)
    weight_decay: float = flag(0.01, kinds.natural_float)
    max_grad_norm: float = flag(1.0, kinds.natural_float)
    device: str = flag("auto", kinds.choice, choices=("auto", "cpu"))
    precision: str = flag("auto", kinds.precision, choices=("auto", "fp32", "bf16", "fp16"))
    seed: int = flag(42, kinds.whole(0, 2**63 - 1))
    deterministic: bool = False
    eval: bool = True
    eval_first: bool = False
    eval_only: bool = False
    eval_every: int | None = flag(None, kinds.steps, "N")
    early_stopping_patience: int | None = flag(None, kinds.positive_int, "K")
    load_best_at_end: bool = False
    eval_samples: int | None = flag(None, kinds.tokens)
    # strategy
    strategy: str = flag("dp", kinds.choice, choices=tuple(STRATEGIES))
    ds_config: str | None = flag(None, kinds.name, "FILE")
    fsdp_config: str | None = flag(None, kinds.name, "FILE")
    nvme_path: str | None = flag(None, kinds.name, "DIR")
    # cluster
    local_rank: int | None = flag(None, int, "N")
    ddp_timeout: int = flag(1800, kinds.seconds)
    hang_seconds: int = flag(None, kinds.seconds, "N")
    # output
    output_dir: str | None = flag(None, kinds.name)
    overwrite: bool = False
    save_every: int | None = flag(None, kinds.steps, "N")
    save_epochs: bool = False
    keep_last: int | None = flag(None, kinds.positive_int, "K")
    no_save: bool = False
    resume: str | None = flag(None, kinds.checkpoint, "PATH", nargs="?", const="true")
    resume_force: bool = False
    export_hf: str | None = flag(None, kinds.name, "DIR")
    no_export: bool = False
    export_dtype: str = flag("fp32", kinds.choice, choices=("fp32", "bf16", "fp16"))
    push_to_hub: bool = False
    hub_model_id: str | None = flag(None, kinds.word, "NAME")
    hub_private_repo: bool = False
    generate: str | None = flag(None, str, "PROMPT")
    logging_steps: int = flag(10, kinds.steps)
    report_to: list[str] = flag([], kinds.reporters, "LIST")
    logging_dir: str | None = flag(None, kinds.name, "DIR")
    run_name: str | None = flag(None, kinds.word, "NAME")
    project: str | None = flag(None, kinds.word, "NAME")
    tags: list[str] = flag([], kinds.tags, "LIST")
    quiet: bool = False
    # debugging
    profile_memory: bool = False
    simulate_gpus: int | None = flag(None, kinds.ranks, "N")
    memory_snapshot: str | None = flag(None, kinds.name, "FILE")
    profile: str | None = flag(None, kinds.name, "DIR")
    verbose: bool = False
    # flags of Trainer that set others
    bf16: bool | None = None
    fp16: bool | None = None
    use_cpu: bool | None = None
    use_peft: bool | None = None
    do_train: bool | None = None
    do_eval: bool | None = None
    eval_strategy: str | None = flag(None, kinds.choice, choices=("no", "steps", "epoch"))
    save_strategy: str | None = flag(None, kinds.choice, choices=("no", "steps", "epoch"))
    validation_split_percentage: int | None = flag(None, kinds.whole(1, 99), "N")
    deepspeed: str | bool | None = flag(None, kinds.file_or_switch, "FILE", nargs="?", const="true")
    fsdp: str | None = flag(None, kinds.fsdp_options, "OPTIONS", nargs="?", const="true")

    # Not flags: what was resolved from them.
    given: frozenset[str] = frozenset()  # names on the command line or in the run file
    sources: dict[str, str] = field(default_factory=dict)  # of the values that are not defaults
    mixture: tuple[Dataset, ...] = ()  # several datasets of --dataset, with their weights
    configured_strategy: Strategy = STRATEGIES["dp"]  # that of --strategy, with its options
    notices: tuple[str, ...] = ()  # lines about what was given and has no effect
    hub_offline: bool = False  # the hub was probed and must not be used
    hub_problem: str | None = None  # with --check: what is missing without the hub

    def replace(self, **values) -> Arguments:
        """Return a copy with other values; a new name is a TypeError."""
        return replace(self, **values)

    def set(self, source: str, **values) -> Arguments:
        """Return a copy with other values, and their source."""
        return replace(self, **values, sources={**self.sources, **dict.fromkeys(values, source)})


def choose_seq_length(args: Arguments | argparse.Namespace, positions: int | None) -> int:
    """Return --seq_length, or its default for a model with so many positions (None: no limit)."""
    if args.seq_length is None:
        default = 256 if args.model == EMBEDDED_MODEL else 512
        return min(default, positions or default)
    if positions and args.seq_length > positions:
        problem = f"is more than the {positions} positions of {args.model}"
        raise UserError(f"--seq_length {args.seq_length} {problem}.")
    return args.seq_length


def global_batch(args: Arguments, world_size: int) -> int:
    """Return the sequences in one optimizer step, over all ranks."""
    return args.batch_size * args.gradient_accumulation_steps * world_size


def held_out_share(args: Arguments) -> float | None:
    """Return the share of the training sequences to hold out; None for the default."""
    if args.validation_split_percentage:
        return args.validation_split_percentage / 100
    return args.validation_split


def isolates_documents(args: Arguments) -> bool:
    """Return whether tokens attend to their own document only."""
    return args.isolate_documents or args.packing


def datasets_of(args: Arguments) -> tuple[Dataset, ...]:
    """Return the datasets of the run: several, or the only one without a weight."""
    return args.mixture or (Dataset(args.dataset),)
