"""The command-line flags, and how they are reconciled with a DeepSpeed JSON file.

Nothing heavy is imported here, so that --help and argument errors appear at once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from pathlib import Path

from support.cli import argument_types as kinds
from support.cli.argument_types import Parser, positive_int
from support.cli.arguments import Arguments
from support.cli.fsdp_config import FsdpOptions, read_fsdp_config
from support.cli.run_file import OTHER_NAMES, SWITCHES, read_run_file
from support.errors import UserError
from support.files.user_files import parse_json, read_text, shown
from support.known_models import EMBEDDED_MODEL
from support.strategy import STRATEGIES

VERSION = "0.8"
PROJECT = Path(__file__).resolve().parent.parent.parent
# Elements of the logits in one chunk of the loss. Each chunk reads and writes the whole gradient of
# the output layer. A GPU gets larger chunks, because its kernels are fast only on large matrices.
LOGITS_CHUNK = {"cpu": 2**24, "cuda": 2**26}
NORM_CHUNK = 2**24  # elements of a gradient in one chunk of the norm, which is computed in fp64
CHECK_SECONDS = 60  # --check: the longest wait for another rank
SIMULATED_STEPS = 3  # the first creates Adam's states; the last is measured
# Flags that need evaluations.
NEED_EVALUATIONS = ("eval_only", "eval_every", "early_stopping_patience", "load_best_at_end")
# --resume without a path. Not a string, so that `--resume "$UNSET"`, an empty path, is an error.
NEWEST = True
# Hugging Face's convention for "as on the command line"; DeepSpeed itself does not know it.
AUTO = "auto"

# Loss scaling in fp16, the same for torch's GradScaler and DeepSpeed: an overflow skips the update
# and halves the scale; GROWTH_INTERVAL steps without an overflow double it.
INITIAL_SCALE_POWER, GROWTH_INTERVAL = 16, 2000
DEEPSPEED_LOSS_SCALING = {
    "initial_scale_power": INITIAL_SCALE_POWER,
    # DeepSpeed does not count the first step after an overflow. (From the second doubling without
    # an overflow in between, it doubles one step earlier than torch.)
    "loss_scale_window": GROWTH_INTERVAL - 1,
    "hysteresis": 1,  # DeepSpeed's default of 2 does not reduce the scale at the first overflow
}

# Keys of DeepSpeed's files by the type of their values. A key has the same type in all sections.
OBJECTS_OF_DEEPSPEED = frozenset(
    (
        "optimizer",
        "scheduler",
        "params",
        "bf16",
        "fp16",
        "zero_optimization",
        "offload_optimizer",
        "offload_param",
        "aio",
        "data_types",
        "activation_checkpointing",
        "flops_profiler",
        "comms_logger",
    )
)
DEVICES_OF_DEEPSPEED = ("none", "cpu", "nvme")  # values of offload_….device
NEVER_NULL = frozenset(("optimizer", "scheduler", "params", "bf16", "fp16", "zero_optimization"))
SWITCHES_OF_DEEPSPEED = frozenset(
    (
        "enabled",
        "torch_adam",
        "fused",
        "adam_w_mode",
        "amsgrad",
        "overlap_comm",
        "contiguous_gradients",
        "reduce_scatter",
        "allgather_partitions",
        "round_robin_gradients",
        "pin_memory",
        "pipeline_read",
        "pipeline_write",
        "fast_init",
        "single_submit",
        "overlap_events",
        "use_gds",
        "auto_cast",
        "check_grad_overflow",
        "consecutive_hysteresis",
        "stage3_gather_16bit_weights_on_model_save",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "prescale_gradients",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "load_from_fp32_weights",
        "elastic_checkpoint",
        "ignore_unused_parameters",
        "save_muon_momentum_buffer_in_memory",
    )
)
NUMBERS_OF_DEEPSPEED = frozenset(
    (
        "stage",
        "train_batch_size",
        "steps_per_print",
        "gradient_predivide_factor",
        "reduce_bucket_size",
        "allgather_bucket_size",
        "sub_group_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "buffer_count",
        "buffer_size",
        "max_in_cpu",
        "block_size",
        "queue_depth",
        "intra_op_parallelism",
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "min_loss_scale",
        "eps",
        "ratio",
    )
)

# Flags of torchrun, deepspeed and accelerate launch, which belong before the script's name.
LAUNCHER_FLAGS = frozenset(
    (
        "nnodes",
        "nproc_per_node",
        "node_rank",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_id",
        "rdzv_conf",
        "standalone",
        "max_restarts",
        "monitor_interval",
        "start_method",
        "role",
        "master_addr",
        "master_port",
        "local_addr",
        "log_dir",
        "redirects",
        "tee",
        "hostfile",
        "exclude",
        "num_nodes",
        "num_gpus",
        "launcher",
        "launcher_args",
        "ssh_port",
        "no_ssh",
        "force_multi",
        "enable_each_rank_log",
        "bind_cores_to_rank",
        "multi_gpu",
        "cpu",
        "num_processes",
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "config_file",
        "gpu_ids",
    )
)

# Key of a DeepSpeed file -> the flag with the same meaning.
FLAG_OF_KEY = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "lr",
    "optimizer.params.weight_decay": "weight_decay",
    "zero_optimization.offload_optimizer.nvme_path": "nvme_path",
    "zero_optimization.offload_param.nvme_path": "nvme_path",
}


# ------------------------------------------------------------------------------------- command line


EXIT_CODES = """\
exit codes: 0 completed, 1 failed, 2 wrong usage or bad input, 3 out of memory,
75 stopped by a signal and saved. Launchers may turn any but 0 into their own:
programs read "status" in results.json."""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all flags, with defaults, limits and help."""
    parser = Parser(
        prog="real_model_example.py",
        usage="%(prog)s [flags]",
        description="Fine-tune a causal language model under one of seven data-parallel "
        "strategies.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=30, width=80
        ),
    )
    parser.add_argument("--version", action="version", version=f"distributed-training {VERSION}")
    parser.add_argument(
        "--check",
        action="store_true",
        help="try everything that the run needs of this machine and its network, and train nothing",
    )
    parser.add_argument(
        "--prefetch",
        action="store_true",
        help="download and tokenise what the run needs, for machines without a network, "
        "and train nothing",
    )
    add = parser.add_argument_group("run file").add_argument
    add(
        "--config",
        type=kinds.name,
        metavar="FILE",
        help="YAML with any of these flags by name; the command line wins",
    )
    add(
        "--print_config", action="store_true", help="print the resolved run as such a file, and end"
    )

    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        type=kinds.name,
        default=EMBEDDED_MODEL,
        help="tiny-gpt2 (embedded, needs no network), gpt2, gpt2-medium, gpt2-large, gpt2-xl, any "
        "causal language model on the Hugging Face hub, or a local folder (default: %(default)s)",
    )
    add(
        "--from_scratch",
        action="store_true",
        help="take the architecture only; random weights drawn from --seed",
    )
    add(
        "--dropout",
        type=kinds.probability,
        help="dropout probability everywhere in the model (default: the model's own)",
    )
    add("--fused_gelu", action=argparse.BooleanOptionalAction, default=True, help=argparse.SUPPRESS)
    add(
        "--no_fused_gelu",
        action="store_false",
        dest="fused_gelu",
        default=argparse.SUPPRESS,
        help="compute GPT-2's activation as transformers writes it (gelu_new), "
        "and not as the same function in one kernel",
    )
    add(
        "--gradient_checkpointing",
        action="store_true",
        help="recompute activations in the backward pass to save memory",
    )
    add(
        "--lora_r",
        type=kinds.rank_of_adapters,
        metavar="R",
        help="train low-rank adapters of this rank (LoRA) and leave the model as it is "
        "(default: train all of it)",
    )
    add(
        "--lora_alpha",
        type=kinds.positive_float,
        metavar="A",
        help="scale the adapters by A / R (default: 2 R)",
    )
    add(
        "--lora_dropout",
        type=kinds.probability,
        default=0.0,
        help="dropout before the adapters (default: %(default)s)",
    )
    add(
        "--lora_targets",
        type=kinds.layer_names,
        metavar="LIST",
        help="layers that get one, by the end of their names with commas between, or all-linear "
        "(default: those that are usual for the architecture)",
    )
    add(
        "--merge_lora",
        action="store_true",
        help="export the whole model with the adapters added, instead of the adapters",
    )
    add("--compile", action="store_true", help="compile the model with torch.compile")

    add = parser.add_argument_group("data").add_argument
    add(
        "--dataset",
        type=kinds.name,
        help="pydocs (embedded), wikitext, a file or folder (.txt .jsonl .json .csv .parquet), or "
        "a hub dataset (default: pydocs for tiny-gpt2, else wikitext)",
    )
    add(
        "--include",
        type=kinds.name_patterns,
        metavar="PATTERNS",
        help="files of a folder to read, such as '*.txt' or 'books/*.md,*.txt' "
        "(default: all that are not hidden or empty)",
    )
    add("--dataset_config", type=kinds.name, help="configuration name of a hub dataset")
    add(
        "--text_column",
        type=kinds.name,
        help="column or key that holds the text (default: messages, or prompt and completion, "
        "where a row has them, else text)",
    )
    add(
        "--validation_file",
        type=kinds.name,
        metavar="FILE",
        help="file or folder to evaluate on (default: the corpus's own validation split)",
    )
    add(
        "--validation_split",
        type=kinds.share,
        metavar="SHARE",
        help="share of the corpus to hold out for evaluation "
        "(default: 0.1 where there is no validation split)",
    )
    add(
        "--max_bad_rows",
        type=kinds.natural_int,
        default=0,
        metavar="N",
        help="leave out up to so many rows that cannot be used, and name them "
        "(default: %(default)s)",
    )
    add(
        "--chat_template",
        type=kinds.name,
        metavar="FILE",
        help="Jinja template for conversations (default: the tokenizer's own, else a plain one)",
    )
    add(
        "--streaming",
        action="store_true",
        help="read and tokenise while training, without a cache, "
        "for a corpus larger than the disk; needs --max_steps",
    )
    add(
        "--shuffle_buffer",
        type=positive_int,
        default=1000,
        metavar="N",
        help="blocks among which --streaming shuffles, over all ranks (default: %(default)s)",
    )
    add(
        "--seq_length",
        type=kinds.block_length,
        help="tokens in a block (default: 256 for tiny-gpt2, else 512, or as many "
        "as the model has positions)",
    )
    add(
        "--num_samples",
        type=kinds.sequences,
        help="train on this many blocks in total, over all ranks (default: all)",
    )
    add(
        "--cache_dir",
        type=kinds.name,
        help="where tokenised data is kept (default: distributed_training under HF_HOME, else "
        "~/.cache/huggingface)",
    )

    add = parser.add_argument_group("training").add_argument
    add(
        "--batch_size",
        type=kinds.batch,
        default=4,
        help="blocks per GPU in a micro-batch (default: %(default)s)",
    )
    add(
        "--gradient_accumulation_steps",
        type=kinds.batch,
        default=1,
        help="micro-batches per optimizer step (default: %(default)s)",
    )
    add(
        "--epochs",
        type=kinds.steps,
        help="passes over the data (default: 1, or as many as --max_steps needs)",
    )
    add("--max_steps", type=kinds.steps, help="stop after this many optimizer steps")
    add(
        "--lr",
        type=kinds.rate,
        help="peak learning rate (default: 5e-5, for adapters 2e-4, for random weights 5e-4)",
    )
    add(
        "--lr_scheduler",
        choices=("linear", "cosine", "constant"),
        default="linear",
        help="how the rate falls after warm-up (default: %(default)s)",
    )
    add(
        "--warmup_steps",
        type=kinds.natural_steps,
        default=0,
        help="steps of linear warm-up (default: %(default)s)",
    )
    add(
        "--weight_decay",
        type=kinds.natural_float,
        default=0.01,
        help="AdamW's; none on biases and norms (default: %(default)s)",
    )
    add(
        "--max_grad_norm",
        type=kinds.natural_float,
        default=1.0,
        help="clip the gradient's norm; 0 = never (default: %(default)s)",
    )
    add(
        "--precision",
        type=kinds.precision,
        choices=("auto", "fp32", "bf16", "fp16"),
        default="auto",
        help="auto: bf16 where the device does it well, fp16 on older GPUs, else fp32 "
        "(default: %(default)s)",
    )
    add(
        "--seed",
        type=kinds.seed,
        default=42,
        help="weights, order of the data, dropout (default: %(default)s)",
    )
    add(
        "--deterministic",
        action="store_true",
        help="only deterministic kernels (slower); a model that needs another one is an error",
    )
    add("--eval", action=argparse.BooleanOptionalAction, default=True, help=argparse.SUPPRESS)
    add(
        "--no_eval",
        action="store_false",
        dest="eval",
        default=argparse.SUPPRESS,
        help="no evaluation (default: after each epoch)",
    )
    add("--eval_first", action="store_true", help="evaluate before training, too")
    add("--eval_only", action="store_true", help="evaluate and do not train")
    add(
        "--eval_every",
        type=kinds.steps,
        metavar="N",
        help="evaluate every N optimizer steps and at the end, instead of after each epoch",
    )
    add(
        "--early_stopping_patience",
        type=kinds.steps,
        metavar="K",
        help="stop after K evaluations in a row that were no better than the best (default: never)",
    )
    add(
        "--load_best_at_end",
        action="store_true",
        help="keep a checkpoint of the best evaluation, and end with its weights "
        "(default: with the last ones)",
    )
    add(
        "--eval_samples",
        type=kinds.sequences,
        help="evaluate on this many blocks (default: --num_samples, else all)",
    )

    add = parser.add_argument_group("strategy").add_argument
    add(
        "--strategy",
        choices=tuple(STRATEGIES),
        default="dp",
        help="dp, zero1, zero2, zero3, offload (optimizer on the CPU), infinity (optimizer and "
        "parameters on NVMe), fsdp (default: %(default)s)",
    )
    add(
        "--ds_config",
        type=kinds.name,
        metavar="FILE",
        help="your own DeepSpeed JSON instead of ds_config_*.json",
    )
    add(
        "--fsdp_config",
        type=kinds.name,
        metavar="FILE",
        help="JSON with FSDP's options, as accelerate and transformers write it",
    )
    add(
        "--nvme_path",
        type=kinds.name,
        metavar="DIR",
        help="where infinity keeps its files (default: the temporary folder, TMPDIR)",
    )
    add = parser.add_argument_group("cluster").add_argument
    add(
        "--ddp_timeout",
        type=kinds.seconds,
        default=1800,
        help="seconds until a collective gives up (default: %(default)s)",
    )
    # The deepspeed launcher passes it; it is ignored, and RANK is used.
    add("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    add(
        "--local-rank",
        type=int,
        dest="local_rank",
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )

    add = parser.add_argument_group("output").add_argument
    add(
        "--output_dir",
        type=kinds.name,
        help="folder for results.json and metrics.jsonl (default: runs/<model>-<strategy>-<time>)",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace another run's results in --output_dir, or what is in --export_hf",
    )
    add(
        "--save_every",
        type=kinds.steps,
        metavar="N",
        help="write a checkpoint every N optimizer steps (default: none)",
    )
    add("--save_epochs", action="store_true", help="write a checkpoint at the end of each epoch")
    add(
        "--keep_last",
        type=kinds.steps,
        metavar="K",
        help="keep the newest K checkpoints only (default: all)",
    )
    add(
        "--no_save",
        action="store_true",
        help="write no checkpoint, not even when a signal stops the run",
    )
    add(
        "--resume",
        nargs="?",
        const=NEWEST,
        type=kinds.name,
        metavar="PATH",
        help="go on from the newest whole checkpoint in --output_dir (from the start if there is "
        "none), or from PATH",
    )
    add(
        "--resume_force",
        action="store_true",
        help="resume although the text, the batch or the seed is another",
    )
    add(
        "--export_hf",
        type=kinds.name,
        metavar="DIR",
        help="where the trained model goes, for from_pretrained (default: hf in --output_dir)",
    )
    add("--no_export", action="store_true", help="do not write the trained model")
    add(
        "--export_dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="type of the exported weights (default: %(default)s, as they are trained)",
    )
    add(
        "--generate",
        type=kinds.prompt,
        metavar="PROMPT",
        help="print a continuation of this text at the end",
    )
    add(
        "--logging_steps",
        type=kinds.steps,
        default=10,
        help="optimizer steps between two lines (default: %(default)s)",
    )
    add(
        "--report_to",
        type=kinds.reporters,
        default=[],
        metavar="LIST",
        help="tensorboard, wandb, or both with a comma between (default: none; "
        "metrics.jsonl is always written)",
    )
    add(
        "--logging_dir",
        type=kinds.name,
        metavar="DIR",
        help="where the files of --report_to tensorboard go (default: tensorboard in --output_dir)",
    )
    add("--quiet", action="store_true", help="print warnings and errors only")

    add = parser.add_argument_group("debugging").add_argument
    add(
        "--profile_memory",
        action="store_true",
        help="show memory after each phase and by kind of state (slows the last step on a CPU)",
    )
    add(
        "--simulate_gpus",
        type=kinds.ranks,
        metavar="N",
        help="measure the memory of rank 0 of N in this one process: real allocations, nothing "
        "communicated, no losses (3 steps)",
    )
    add(
        "--memory_snapshot",
        type=kinds.name,
        metavar="FILE",
        help="write PyTorch's snapshot of the GPU's memory, for pytorch.org/memory_viz",
    )
    add(
        "--profile",
        type=kinds.name,
        metavar="DIR",
        help="write a trace of 3 steps, for ui.perfetto.dev",
    )
    add("--verbose", action="store_true", help="show third-party messages and tracebacks")
    _add_other_names(parser)
    return parser


class _Deepspeed(argparse.Action):
    """--deepspeed [FILE], as in transformers' Trainer and DeepSpeed's own argument parser."""

    def __call__(self, parser, namespace, values, option_string=None):
        namespace.use_deepspeed = True
        if values is not None:
            namespace.ds_config = values


def _add_other_names(parser: argparse.ArgumentParser) -> None:
    """Add the names that other trainers use for our flags; --help does not list them."""
    flags = {action.dest: action for action in reversed(parser._actions)}
    hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for alias, dest in OTHER_NAMES.items():
        parser.add_argument(
            f"--{alias}", dest=dest, type=flags[dest].type, choices=flags[dest].choices, **hidden
        )
    parser.add_argument("--deepspeed", nargs="?", type=kinds.name, action=_Deepspeed, **hidden)
    for switch in SWITCHES:
        parser.add_argument(f"--{switch}", action="store_true", help=argparse.SUPPRESS)


def _refuse_two_spellings(argv: list[str]) -> None:
    """Refuse a flag that is given under two of its names.

    Raises:
        UserError: names both.
    """
    spelled: dict[str, str] = {}
    for argument, following in itertools.pairwise([*argv, "--"]):
        option = argument.partition("=")[0]
        flag = OTHER_NAMES.get(option[2:], option[2:])
        if flag == "deepspeed" and ("=" in argument or not following.startswith("-")):
            flag = "ds_config"
        if option.startswith("--") and spelled.setdefault(flag, option) != option:
            raise UserError(
                f"{spelled[flag]} and {option} are two names of one flag: leave one out."
            )


def parse_arguments(argv: list[str]) -> Arguments:
    """Parse the command line and its files, and resolve all values that they determine.

    Args:
        argv: the arguments, without the program's name.
    Returns:
        The flags by name, frozen, and more attributes: `given` (names of the flags on the command
        line or in the run file), `ds_config_dict` (DeepSpeed's configuration, in which some values
        may still be "auto", or None), `fsdp` (FsdpOptions), and `hub_offline` and `hub_problem`
        (False and None, until the hub was probed).
    Raises:
        UserError: unknown or contradicting flags, or an invalid run file, DeepSpeed file or FSDP
            file.
    """
    parser = build_parser()
    _refuse_two_spellings(argv)
    if file := parser.parse_known_args(argv)[0].config:
        argv = [*read_run_file(file, parser), *argv]
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse_launcher_flag(unknown[0])
        parser.refuse_unknown(unknown[0])
    args.given = _given_flags(parser, argv)
    args.resume = "" if args.resume is NEWEST else args.resume
    _refuse_contradictions(args)
    if args.check:
        args.ddp_timeout = min(args.ddp_timeout, CHECK_SECONDS)
    if args.simulate_gpus:
        _only_measure(args)
    if args.dataset is None:
        args.dataset = "pydocs" if args.model == EMBEDDED_MODEL else "wikitext"
    if args.lr is None:
        random = args.from_scratch or args.model == EMBEDDED_MODEL
        # At 1e-3 the embedded model's loss sometimes jumps; at such a step rounding differences
        # between strategies become visible.
        args.lr = 5e-4 if random else 2e-4 if args.lora_r else 5e-5
    _settle_strategy(args)
    args.hub_offline, args.hub_problem = False, None
    return args.freeze()


def _refuse_launcher_flag(argument: str) -> None:
    flag = argument.split("=")[0]
    if flag.startswith("--") and flag[2:].replace("-", "_") in LAUNCHER_FLAGS:
        raise UserError(
            f"{shown(flag)} is a flag of the launcher: write it before real_model_example.py "
            "(torchrun, deepspeed or accelerate launch … real_model_example.py …)."
        )


def _settle_strategy(args) -> None:
    """Resolve the strategy and its settings from the flags, a DeepSpeed file and an FSDP file."""
    _follow_switches(args)
    config, args.ds_config_dict = None, None
    if args.ds_config is not None:
        config = read_ds_config(args.ds_config)
        _adopt_strategy(args, config)
    args.fsdp = FsdpOptions()
    if args.fsdp_config is not None and args.strategy == "fsdp":
        args.fsdp = read_fsdp_config(args.fsdp_config)
        _follow_fsdp_config(args)
    if STRATEGIES[args.strategy].uses_deepspeed:
        file = args.ds_config or str(PROJECT / STRATEGIES[args.strategy].config_file)
        args.ds_config_dict = reconcile(args, config or read_ds_config(file), file)


def _follow_switches(args) -> None:
    """Apply --deepspeed, --use_deepspeed and --use_fsdp, which choose the library that shards."""
    given = args.strategy if "strategy" in args.given else None
    deepspeed, fsdp = args.use_deepspeed, args.use_fsdp
    del args.use_deepspeed, args.use_fsdp
    if deepspeed and fsdp:
        raise UserError("--deepspeed and --use_fsdp cannot both hold: leave one out.")
    if deepspeed and given and not STRATEGIES[given].uses_deepspeed:
        raise UserError(
            f"--deepspeed contradicts --strategy {given}, which runs without DeepSpeed: "
            "leave one out."
        )
    if deepspeed and not given and args.ds_config is None:
        raise UserError(
            "--deepspeed needs a configuration (--deepspeed FILE), or --strategy zero1, zero2, "
            "zero3, offload or infinity."
        )
    if fsdp and given not in (None, "fsdp"):
        raise UserError(f"--use_fsdp contradicts --strategy {given}: leave one out.")
    if fsdp:
        args.strategy = "fsdp"
        args.given.add("strategy")


def _refuse_contradictions(args) -> None:
    """Refuse flags that exclude each other, or a flag without another one that it needs.

    Raises:
        UserError: names the flags.
    """
    if args.eval_only and not args.eval:
        raise UserError("--eval_only and --no_eval cannot both hold: leave one out.")
    if args.resume == "" and args.output_dir is None:
        raise UserError(
            "--resume needs --output_dir, the run to go on with; or name a checkpoint: "
            "--resume PATH."
        )
    if args.no_save and (args.save_every or args.save_epochs):
        raise UserError("--no_save contradicts --save_every and --save_epochs: leave one out.")
    if args.eval_only and (args.save_every or args.save_epochs or args.resume is not None):
        raise UserError(
            "--eval_only neither saves nor resumes: leave out --save_every, "
            "--save_epochs and --resume."
        )
    _check_evaluation(args)
    _check_lora(args)
    if args.streaming:
        _check_streaming(args)
    if args.export_hf and (args.no_export or args.eval_only):
        raise UserError(
            f"--export_hf contradicts {'--no_export' if args.no_export else '--eval_only'}: "
            "leave one out."
        )
    if args.export_dtype != "fp32" and (args.no_export or args.eval_only):
        other = "--no_export" if args.no_export else "--eval_only"
        raise UserError(f"--export_dtype {args.export_dtype} contradicts {other}: leave one out.")
    if args.resume_force and args.resume is None:
        raise UserError("--resume_force needs --resume.")
    if args.profile and (args.profile_memory or args.simulate_gpus):
        other = "--profile_memory" if args.profile_memory else "--simulate_gpus"
        raise UserError(f"--profile and {other} both need torch's profiler: leave one out.")
    if args.prefetch and (args.check or args.simulate_gpus):
        raise UserError(
            f"--prefetch and --{'check' if args.check else 'simulate_gpus'} cannot both hold: "
            "leave one out."
        )
    if args.logging_dir and "tensorboard" not in args.report_to:
        raise UserError("--logging_dir is TensorBoard's: add --report_to tensorboard.")
    if args.check and args.simulate_gpus:
        raise UserError(
            "--check looks at what there is, and --simulate_gpus at what there is not: "
            "leave one out."
        )


def _check_evaluation(args) -> None:
    if args.validation_file and args.validation_split:
        raise UserError("--validation_file and --validation_split cannot both hold: leave one out.")
    for flag in NEED_EVALUATIONS[1:]:
        other = "--no_eval" if not args.eval else "--eval_only" if args.eval_only else None
        if other and getattr(args, flag):
            raise UserError(
                f"--{flag} needs evaluations during training, which {other} leaves out: "
                "drop one of them."
            )
    if args.load_best_at_end and args.no_save:
        raise UserError(
            "--load_best_at_end goes back to a checkpoint, which --no_save forbids: leave one out."
        )


def _check_lora(args) -> None:
    for flag in ("lora_alpha", "lora_dropout", "lora_targets", "merge_lora"):
        if flag in args.given and getattr(args, flag) and args.lora_r is None:
            raise UserError(f"--{flag} needs --lora_r.")
    if args.lora_r and args.eval_only:
        raise UserError(
            "--eval_only evaluates --model as it is, and new adapters change nothing: "
            "leave out --lora_r."
        )
    if args.merge_lora and args.no_export:
        raise UserError(
            "--merge_lora is for the export, which --no_export leaves out: drop one of them."
        )
    if args.lora_r and args.lora_alpha is None:
        args.lora_alpha = 2.0 * args.lora_r


def _check_streaming(args) -> None:
    if args.max_steps is None or args.epochs:
        raise UserError(
            "--streaming has no end that is known before: give --max_steps, and no --epochs."
        )
    if args.early_stopping_patience and not args.eval_every:
        raise UserError(
            "--streaming has no epochs after which to evaluate: "
            "--early_stopping_patience needs --eval_every."
        )
    for flag in ("num_samples", "validation_split"):
        if getattr(args, flag):
            raise UserError(
                f"--{flag} needs to know how long the corpus is, which --streaming does not: "
                "leave one out" + (" (--validation_file)." if flag == "validation_split" else ".")
            )
    if args.dataset == "pydocs" or (args.dataset is None and args.model == EMBEDDED_MODEL):
        raise UserError(
            "--streaming is for files and for the hub, and pydocs is in Python itself: "
            "leave it out."
        )


def _only_measure(args) -> None:
    """Refuse flags that a memory simulation cannot use, and switch off evaluation and saving."""
    for flag in (
        "resume",
        "save_every",
        "save_epochs",
        "eval_only",
        "eval_first",
        "generate",
        "export_hf",
        "eval_every",
        "early_stopping_patience",
        "load_best_at_end",
        "merge_lora",
    ):
        if getattr(args, flag) not in (None, False):
            raise UserError(
                f"--simulate_gpus trains no model, so --{flag} has nothing to work on: "
                "leave one out."
            )
    if args.max_steps == 1:
        raise UserError(
            "--simulate_gpus needs --max_steps 2 or more: Adam's states are there after the first."
        )
    args.eval, args.no_save, args.no_export = False, True, True
    args.max_steps, args.epochs = args.max_steps or SIMULATED_STEPS, None


def _given_flags(parser: argparse.ArgumentParser, argv: list[str]) -> set[str]:
    """Return the names of the flags in `argv`, and remove all defaults from `parser`.

    Parsed without defaults, the result has only the flags that were given.
    """
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_known_args(argv)[0]))


def _follow_fsdp_config(args) -> None:
    """Apply the FSDP file's precision and NO_SHARD; a contradicting --precision is an error."""
    fsdp_precision = args.fsdp.precision
    if fsdp_precision and "precision" in args.given and args.precision != fsdp_precision:
        raise UserError(
            f"--precision {args.precision} contradicts fsdp_mixed_precision in {args.fsdp_config} "
            f"({fsdp_precision}): change one of them."
        )
    args.precision = fsdp_precision or args.precision
    if args.fsdp.no_shard:
        args.fsdp.notes.append(
            "NO_SHARD: a whole model on each rank is --strategy dp, which this run takes"
        )
        args.strategy = "dp"


def ignored_flags(args: argparse.Namespace) -> list[str]:
    """Return one line for each given flag that the chosen strategy ignores, and FSDP's notes."""
    lines = []
    if "ds_config" in args.given and args.ds_config_dict is None:
        lines.append(
            f"--ds_config is used by the DeepSpeed strategies only: ignored under {args.strategy}"
        )
    if "nvme_path" in args.given and not STRATEGIES[args.strategy].uses_nvme:
        lines.append(f"--nvme_path is used by infinity only: ignored under {args.strategy}")
    if "fsdp_config" in args.given and args.strategy != "fsdp" and not args.fsdp.no_shard:
        lines.append(f"--fsdp_config is used by fsdp only: ignored under {args.strategy}")
    return lines + [f"{args.fsdp_config}: {note}" for note in args.fsdp.notes]


# --------------------------------------------------------------------------------- DeepSpeed's JSON


def read_ds_config(path: str) -> dict:
    """Read a DeepSpeed configuration.

    As in DeepSpeed, the file is JSON, or JSON with comments and trailing commas (hjson).

    Raises:
        UserError: the file cannot be read, is not valid JSON (with line and column) or no object,
            or a value has the wrong type.
    """
    text = read_text("--ds_config", path)
    try:
        config = parse_json(text, path)
    except json.JSONDecodeError as strict:
        import hjson  # not needed for plain JSON

        try:
            config = json.loads(json.dumps(parse_json(text, path, hjson.loads)))
        except hjson.HjsonDecodeError as error:
            raise UserError(
                f"{path}, line {error.lineno}, column {error.colno}: {error.msg}."
            ) from error
        # hjson reads an unquoted value to the end of its line. A missing comma thus gives a string
        # such as `4 "fp16": {`.
        if _swallowed_a_line(config):
            raise UserError(
                f"{path}, line {strict.lineno}, column {strict.colno}: {strict.msg}."
            ) from strict
    if not isinstance(config, dict):
        raise UserError(f"{path}: a DeepSpeed configuration is a JSON object, {{ … }}.")
    _check_types(config, path)
    return config


def _check_types(section: dict, file: str, prefix: str = "") -> None:
    """Refuse values that DeepSpeed would convert silently or ignore: pydantic reads "yes" as true.

    Args:
        section: the configuration, or an object in it.
        file: name of the file, for messages.
        prefix: keys of the enclosing objects, each with a dot.
    Raises:
        UserError: names the first key whose value has the wrong type.
    """
    for key, value in section.items():
        location = f"{file}: {prefix}{key}"
        optional = value is None and key not in NEVER_NULL
        if key in OBJECTS_OF_DEEPSPEED and not isinstance(value, dict) and not optional:
            raise UserError(
                f"{location} must be an object, {{ … }}, and is {shown(json.dumps(value))}."
            )
        if value is None or value == AUTO:
            continue
        if key in SWITCHES_OF_DEEPSPEED and not isinstance(value, bool):
            raise UserError(
                f"{location} must be true or false, without quotes, "
                f"and is {shown(json.dumps(value))}."
            )
        if key in NUMBERS_OF_DEEPSPEED and (
            isinstance(value, bool) or not isinstance(value, int | float)
        ):
            raise UserError(
                f"{location} must be a number, without quotes, and is {shown(json.dumps(value))}."
            )
        if (key == "stage" and isinstance(value, float)) or (
            key == "device" and value not in DEVICES_OF_DEEPSPEED
        ):
            expected = (
                "a whole number" if key == "stage" else f"one of {', '.join(DEVICES_OF_DEEPSPEED)}"
            )
            raise UserError(f"{location} must be {expected}, and is {shown(json.dumps(value))}.")
        if isinstance(value, dict):
            _check_types(value, file, f"{prefix}{key}.")


def _swallowed_a_line(value) -> bool:
    if isinstance(value, dict):
        return any(_swallowed_a_line(item) for item in value.values())
    if isinstance(value, list):
        return any(_swallowed_a_line(item) for item in value)
    return isinstance(value, str) and any(mark in value for mark in '"{}[]\n')


def lookup(config: dict, key: str):
    """Return the value at a dotted key ("optimizer.params.lr"), or None."""
    for name in key.split("."):
        if not isinstance(config, dict) or name not in config:
            return None
        config = config[name]
    return config


def uses_nvme(config: dict) -> bool:
    """Return whether a DeepSpeed configuration offloads optimizer states or parameters to NVMe."""
    zero = config["zero_optimization"]
    return "nvme" in (
        lookup(zero, "offload_optimizer.device"),
        lookup(zero, "offload_param.device"),
    )


def nvme_folder(config: dict | None) -> str | None:
    """Return the folder of a complete configuration's NVMe files; None without such files."""
    zero = (config or {}).get("zero_optimization", {})
    for part in ("offload_optimizer", "offload_param"):
        if lookup(zero, f"{part}.device") == "nvme":
            return zero[part]["nvme_path"]
    return None


def _put(config: dict, key: str, value) -> None:
    *parents, last = key.split(".")
    for name in parents:
        config = config.setdefault(name, {})
    config[last] = value


def _adopt_strategy(args, config: dict) -> None:
    """Without --strategy, derive the strategy from the DeepSpeed file."""
    if "strategy" in args.given:
        return
    stage = lookup(config, "zero_optimization.stage")
    optimizer_on = lookup(config, "zero_optimization.offload_optimizer.device")
    if stage == 3:
        args.strategy = "infinity" if optimizer_on == "nvme" else "zero3"
    elif stage in (1, 2):
        args.strategy = "offload" if stage == 2 and optimizer_on == "cpu" else f"zero{stage}"
    else:
        raise UserError(
            f"{args.ds_config} has zero_optimization.stage {stage}: it must be 1, "
            "2 or 3 (0 is --strategy dp)."
        )


def reconcile(args, config: dict, file: str) -> dict:
    """Reconcile a DeepSpeed file with the flags, before torch or a model is loaded.

    A value in the file that contradicts a given flag is an error. If the flag was not given, the
    file's value is used and copied to `args`. Values that are "auto" or missing come from the
    flags. Values that depend on the model or the device (precision, bucket sizes) stay "auto" until
    `complete_ds_config`.

    Args:
        args: the parsed flags; changed in place.
        config: the file's content; changed in place.
        file: its name, for messages.
    Returns:
        `config`.
    Raises:
        UserError: the file contradicts --strategy or another given flag, or has a value that is not
            supported.
    """
    stage = lookup(config, "zero_optimization.stage")
    if stage != STRATEGIES[args.strategy].stage:
        raise UserError(
            f"{file} has zero_optimization.stage {stage}, but --strategy {args.strategy} is stage "
            f"{STRATEGIES[args.strategy].stage}: change one of them."
        )
    if stage == 1 and lookup(config, "data_types.grad_accum_dtype") not in (None, AUTO):
        raise UserError(
            f"{file}: with data_types.grad_accum_dtype stage 1 has another optimizer, which "
            "checkpoints and the export do not know: leave it out, or take stage 2."
        )
    optimizer_on = lookup(config, "zero_optimization.offload_optimizer.device")
    required = {"offload": "cpu", "infinity": "nvme"}.get(args.strategy)
    if required and optimizer_on != required:
        raise UserError(
            f"{file} has zero_optimization.offload_optimizer.device {optimizer_on}, but --strategy "
            f"{args.strategy} keeps the optimizer on {required}: change one of them."
        )
    if not required and optimizer_on == "nvme":
        raise UserError(
            f"{file} keeps the optimizer on nvme, but --strategy is {args.strategy}: "
            "write --strategy infinity."
        )

    if "optimizer" not in config:
        params = {"lr": AUTO, "weight_decay": AUTO, "betas": [0.9, 0.999], "eps": 1e-8}
        config["optimizer"] = {"type": "AdamW", "params": params}
        if not optimizer_on or optimizer_on == "none":
            params.update(torch_adam=True, fused=True)
    for name, default in (("betas", [0.9, 0.999]), ("eps", 1e-8)):  # have no flags
        if lookup(config, f"optimizer.params.{name}") == AUTO:
            _put(config, f"optimizer.params.{name}", default)
    accumulation_is_open = "gradient_accumulation_steps" not in args.given and config.get(
        "gradient_accumulation_steps"
    ) in (None, AUTO)
    for key, flag in FLAG_OF_KEY.items():
        value, given = lookup(config, key), flag in args.given
        if flag == "nvme_path" and (
            value is None or lookup(config, key.rsplit(".", 1)[0] + ".device") != "nvme"
        ):
            continue
        if value in (None, AUTO):
            _put(config, key, getattr(args, flag))
        elif (required := _as_flag(flag, key, value, file)) == getattr(args, flag) or not given:
            setattr(args, flag, required)
            _put(config, key, required)  # converted: the file may have a number in quotes
        else:
            raise UserError(
                f"--{flag} {getattr(args, flag)} contradicts {key} {value} in {file}: "
                "change one of them."
            )
    _reconcile_total_batch(args, config, accumulation_is_open, file)
    _reconcile_precision(args, config, file)
    _reconcile_scheduler(args, config, file)
    return config


def _as_flag(flag: str, key: str, value, file: str):
    """Convert and check a value of the file as the flag's value would be on the command line."""
    action = next(action for action in build_parser()._actions if action.dest == flag)
    try:
        return action.type(str(value)) if action.type else str(value)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{file}: {key}: {error}.") from error


def global_batch(args, world_size: int) -> int:
    """Return the sequences in one optimizer step, over all ranks."""
    return args.batch_size * args.gradient_accumulation_steps * world_size


def _reconcile_total_batch(args, config: dict, accumulation_is_open: bool, file: str) -> None:
    world_size = args.simulate_gpus or int(os.environ.get("WORLD_SIZE", 1))
    file_total, micro_batch_total = config.get("train_batch_size"), args.batch_size * world_size
    if (
        accumulation_is_open
        and isinstance(file_total, int)
        and file_total >= micro_batch_total
        and file_total % micro_batch_total == 0
    ):
        steps = _as_flag(
            "gradient_accumulation_steps",
            f"train_batch_size / {micro_batch_total}",
            file_total // micro_batch_total,
            file,
        )
        args.gradient_accumulation_steps = config["gradient_accumulation_steps"] = steps
    product = global_batch(args, world_size)
    total = config.get("train_batch_size", AUTO)
    if total not in (AUTO, product):
        raise UserError(
            f"{file} has train_batch_size {total}, but --batch_size {args.batch_size} × "
            f"--gradient_accumulation_steps {args.gradient_accumulation_steps} × {world_size} "
            f"ranks = {product}: change one."
        )
    config["train_batch_size"] = product


def _reconcile_precision(args, config: dict, file: str) -> None:
    enabled = {name: lookup(config, f"{name}.enabled") for name in ("bf16", "fp16")}
    if enabled["bf16"] is True and enabled["fp16"] is True:
        raise UserError(f"{file} enables both bf16 and fp16: keep one.")
    requested = args.precision if "precision" in args.given else AUTO
    enabled_name = next((name for name, value in enabled.items() if value is True), None)
    if enabled_name and requested not in (AUTO, enabled_name):
        raise UserError(
            f"--precision {requested} contradicts {enabled_name}.enabled true in {file}: "
            "change one of them."
        )
    if requested != AUTO and enabled.get(requested) is False:
        raise UserError(
            f"--precision {requested} contradicts {requested}.enabled false in {file}: "
            "change one of them."
        )
    if enabled_name:
        args.precision = enabled_name
    elif requested == AUTO and enabled["bf16"] is False:
        args.precision = "fp32"


def _reconcile_scheduler(args, config: dict, file: str) -> None:
    scheduler = config.get("scheduler")
    if scheduler is None:
        return
    flag = next(
        (name for name in ("lr_scheduler", "warmup_steps", "lr") if name in args.given), None
    )
    if flag:
        raise UserError(
            f"--{flag} contradicts the scheduler {lookup(scheduler, 'type')} in {file}: "
            "leave one out."
        )
    if AUTO in (lookup(scheduler, "params") or {}).values():
        raise UserError(
            f'{file}: give the scheduler its numbers instead of "auto", '
            "or leave it out and use --lr_scheduler."
        )


def bucket_sizes(hidden_size: int, parameters: int, tied_on_nvme: bool) -> dict[str, int]:
    """Choose the sizes of DeepSpeed's buckets for a model.

    DeepSpeed's default buckets hold 5e8 elements, more than the whole of GPT-2 medium. Ours hold
    one transformer block, about 12 · hidden² parameters (4 · hidden² in attention, 8 · hidden² in
    the MLP), so that communication overlaps with the computation of the next transformer block and
    a bucket is small compared with the model.

    Args:
        hidden_size: hidden size of the model.
        parameters: number of parameters of the model.
        tied_on_nvme: parameters are offloaded to NVMe, and two layers share one.
    Returns:
        Numbers of elements, by their keys under zero_optimization.
    """
    block = min(max(12 * hidden_size**2, 1_000_000), max(parameters, 1))
    return {
        "reduce_bucket_size": block,
        "allgather_bucket_size": block,
        # DeepSpeed 0.19 prefetches a tied weight from NVMe a second time while it is being read,
        # and stops with "already assigned swap buffer"; without prefetching it does not.
        "stage3_prefetch_bucket_size": 0 if tied_on_nvme else block,
        # Norms and biases are not sharded: they are small, and an all-gather of each costs time.
        "stage3_param_persistence_threshold": 10 * hidden_size,
        # An all-gathered parameter is freed at once if the next transformer block does not need it.
        "stage3_max_live_parameters": 2 * block,
        "stage3_max_reuse_distance": block,
        "sub_group_size": max(4 * block, 10_000_000),
    }


def complete_ds_config(
    config: dict,
    *,
    precision: str,
    hidden_size: int,
    parameters: int,
    largest_parameter: int,
    tied: bool,
    world_size: int,
    nvme_folder: str | None,
) -> dict:
    """Fill in the values that depend on the device and the model.

    Args:
        config: the reconciled configuration; changed in place.
        precision: "fp32", "bf16" or "fp16".
        hidden_size: hidden size of the model.
        parameters: number of parameters of the model.
        largest_parameter: number of elements of the largest one (usually the embedding).
        tied: the output layer shares the input embedding's weights.
        world_size: number of ranks; each keeps 1 / world_size of a parameter.
        nvme_folder: this job's own folder, for infinity.
    Returns:
        `config`, without any "auto".
    Raises:
        UserError: a value is "auto", and there is no rule for it.
    """
    for name in ("bf16", "fp16"):
        if precision == name or name in config:
            config.setdefault(name, {})["enabled"] = precision == name
    for key, value in DEEPSPEED_LOSS_SCALING.items() if "fp16" in config else ():
        if config["fp16"].get(key) in (None, AUTO):
            config["fp16"][key] = value
    zero = config["zero_optimization"]
    for key, value in bucket_sizes(
        hidden_size, parameters, tied and lookup(zero, "offload_param.device") == "nvme"
    ).items():
        if zero.get(key) == AUTO:
            zero[key] = value
    if zero.get("overlap_comm") == AUTO:
        # A single rank has no communication to overlap. Stages 1 and 2 would still synchronise the
        # device after each backward, and allocate a second bucket.
        zero["overlap_comm"] = world_size > 1
    for part in ("offload_optimizer", "offload_param"):
        if lookup(zero, f"{part}.device") == "nvme":
            zero[part]["nvme_path"] = nvme_folder
    if lookup(zero, "offload_param.buffer_size") == AUTO:
        # A buffer must hold a rank's shard of any parameter, with its padding.
        zero["offload_param"]["buffer_size"] = -(-largest_parameter // world_size) + 4096
    if lookup(config, "aio.block_size") == AUTO:
        # Reading or writing a rank's part of the largest parameter (2 bytes an element) fills the
        # queue once. A block has at least 128 KiB and at most 1 MiB.
        part, depth = 2 * largest_parameter // world_size, lookup(config, "aio.queue_depth") or 8
        config["aio"]["block_size"] = min(
            2**20, max(2**17, 2 ** ((part // depth).bit_length() - 1))
        )
    auto_key = _find_auto(config)
    if auto_key:
        raise UserError(
            f'DeepSpeed configuration: "auto" cannot be filled in for {auto_key}: give a value.'
        )
    return config


def _find_auto(config: dict, prefix: str = "") -> str | None:
    for key, value in config.items():
        if value == AUTO:
            return prefix + key
        if isinstance(value, dict) and (nested_key := _find_auto(value, f"{prefix}{key}.")):
            return nested_key
    return None
