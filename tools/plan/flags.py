"""The flags of scripts/plan_memory.py; those of a run are named as in real_model_example.py."""

from distributed_training.cli.parse import read_command_line
from distributed_training.cli.parser import Options, Parser
from distributed_training.errors import UserError
from distributed_training.files.user_files import shown
from distributed_training.memory.fit import check_is_planned
from distributed_training.optimizers import OPTIMIZERS
from distributed_training.rank_shares import shown_shares
from distributed_training.settings import flag_types
from tools.plan import cost
from tools.plan.workload import number_of_gpus

SIZE, SIZES = flag_types.positive_float, flag_types.positive_floats
MODELS = """gpt2, gpt2-medium, gpt2-large, gpt2-xl, tiny-gpt2, Llama-2-7B, Llama-3-8B, Qwen2.5-7B,
    Qwen2.5-0.5B, Mistral-7B, another name on the hub, a model folder or a config.json (GPT-2,
    Llama, Mistral, Qwen, GPT-NeoX) (default: gpt2)"""
# Name, type, placeholder and help of flags.
PLANNER_FLAGS = (
    ("gpus", flag_types.ranks, "N", "number of ranks, one per GPU (default: 1)"),
    ("gpus_per_node", flag_types.ranks, "N", "of one node (default: --gpus, at most 8)"),
    ("nodes", flag_types.ranks, "N", "nodes of --gpus_per_node GPUs, instead of --gpus"),
    (
        "gpu_memory",
        SIZES,
        "GB[,GB...]",
        "of each GPU, as in nvidia-smi (2^30 bytes); several values: of unequal GPUs, one for each "
        "(default: plan CPUs)",
    ),
    ("gpu_speeds", SIZES, "X[,X...]", "relative speeds, one for each GPU (default: equal)"),
    ("host_memory", SIZE, "GB", "of a node, for offload, infinity and CPU processes"),
    ("nvme_free", SIZE, "GB", "of a node's disk, for infinity"),
    ("batch_size", flag_types.batch, "N", "sequences per GPU in a micro-batch (default: 4)"),
    ("seq_length", flag_types.block_length, "N", "tokens in a sequence (default: as for a run)"),
    ("gradient_accumulation_steps", flag_types.batch, "N", "micro-batches per step (default: 1)"),
    ("lora_r", flag_types.rank_of_adapters, "R", "train adapters of this rank, freeze the rest"),
    ("lora_targets", flag_types.label, "LIST", "the layers that get an adapter"),
)
SWITCHES = {
    "--no_fused_gelu": "compute GPT-2's activation as transformers does",
    "--lora_dora": "also train magnitudes; needs --lora_r",
    "--load_in_4bit": "frozen weights in 4 bits; needs --lora_r",
    "--compile": "compile blocks and loss: all logits are computed at once, on a GPU up to 2^31",
    "--gradient_checkpointing": "recompute activations in backward",
    "--isolate_documents": "as for --isolate_documents or --packing",
    "--explain": "print each term of the estimate, by phase of a step",
    "--json": "print JSON instead (bytes)",
    "--measure": "cost: measure the rate here, in 10 steps",
}
COST_FLAGS = (
    ("tokens", flag_types.tokens, "N", "tokens of the training data"),
    ("epochs", flag_types.epochs, "N", "passes over --tokens (default: 1)"),
    ("max_steps", flag_types.max_steps, "N", "optimizer steps, instead of --tokens"),
    (
        "results",
        flag_types.place,
        "RUN",
        "take the rate of this completed run (folder or results.json)",
    ),
    ("device", flag_types.label, "GPU", "assume the rate of this GPU, A100 for example"),
    ("mfu", flag_types.real(1), "SHARE", "assumed share of its peak FLOP/s (default: 0.4)"),
    ("bandwidth", SIZE, "GB/S", "add the time of sending, at the all-reduce rate of --check"),
    ("price", SIZE, "DOLLARS", "of a GPU-hour"),
    ("watts", SIZE, "W", "electric power of a GPU"),
    ("time_limit", flag_types.label, "HH:MM:SS", "of a Slurm job: plan the jobs"),
    ("save_seconds", SIZE, "S", "time of a save, for --time_limit (default: that of --results)"),
    ("mtbf", SIZE, "H", "hours between failures of a GPU, for --time_limit (default: 50000)"),
)
# Flags of a run that a run file sets here, too; --no_fused_gelu and others have another name there.
SAME_FLAGS = """
    model batch_size seq_length gradient_accumulation_steps gradient_checkpointing lora_r
    lora_targets lora_dora load_in_4bit compile optim reduce_dtype strategy
    """.split()


def build_parser(doc: str) -> Parser:
    """Build the parser; `doc` is the docstring of the script."""
    parser = Parser.of_script(doc)
    parser.add_argument("--model", type=flag_types.place, default="gpt2", help=MODELS)
    text = "YAML with flags of a run, whose model and workload are planned; the others override it"
    parser.add_argument("--config", type=flag_types.place, metavar="FILE", help=text)
    costs = parser.add_argument_group("cost (needs an amount of work and a rate)")
    for group, flags in ((parser, PLANNER_FLAGS), (costs, COST_FLAGS)):
        for name, kind, placeholder, text in flags:
            group.add_argument(f"--{name}", type=kind, metavar=placeholder, help=text)
    for flag, text in SWITCHES.items():
        parser.add_argument(flag, action="store_true", help=text)
    add = parser.add_argument
    add("--precision", choices=("fp32", "bf16", "fp16"), default="bf16", help="(default: bf16)")
    add("--optim", choices=tuple(OPTIMIZERS), default="adamw", help="(default: adamw)")
    text = "of the gradients that the ranks reduce (default: as a run's)"
    add("--reduce_dtype", choices=flag_types.REDUCE_DTYPES, help=text)
    text = "find the largest batch or the fewest GPUs for each strategy"
    add("--solve", choices=("batch", "gpus"), help=text)
    parser.set_defaults(batch_size=4, gradient_accumulation_steps=1, strategy=None, in_file={})
    return parser


def read_flags(parser: Parser) -> Options:
    """Return the flags, with the values of --config as defaults and as `in_file`."""
    args = parser.parse_args()
    if args.config is None:
        return args
    gpus, _ = number_of_gpus(args)
    run = read_command_line(["--config", args.config], gpus).settings
    if "batch_size" in run.parallelism.to_choose:
        raise UserError(
            f"{shown(args.config)} has batch_size: auto, which a run chooses on its GPUs: plan it "
            "without --config, with --solve batch."
        )
    check_is_planned(run.strategy, run.training.eval_only)
    flags, isolates = run.flags(), run.data.isolates_documents
    values = {name: flags[name] for name in SAME_FLAGS} | {
        "precision": parser.get_default("precision")
        if flags["precision"] == "auto"
        else flags["precision"],
        "no_fused_gelu": not flags["fused_gelu"],
        "isolate_documents": isolates,
    }
    if "strategy" in run.parallelism.to_choose:  # the plan chooses as the run does
        values["strategy"] = None
    parser.set_defaults(in_file=values, **values)
    if isinstance(run.training.rank_shares, tuple):
        values["rank_shares"] = shown_shares(run.training.rank_shares)
        if not args.gpu_speeds and len(args.gpu_memory or ()) < 2:
            raise UserError(
                f"{shown(args.config)} has rank_shares: give --gpu_speeds, or --gpu_memory of each "
                "GPU, from which the shares are planned."
            )
    if args.tokens:
        parser.set_defaults(epochs=run.training.epochs)
    elif any(getattr(args, flag) for flag in cost.RATE):
        parser.set_defaults(max_steps=run.training.max_steps)
    return parser.parse_args()
