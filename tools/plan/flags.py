"""The flags of scripts/plan_memory.py: its own, and those of a run that the estimate depends on."""

from distributed_training.cli.checks import check_needs
from distributed_training.cli.flags import add_flag
from distributed_training.cli.parse import read_command_line
from distributed_training.cli.parser import Options, Parser
from distributed_training.cli.resolve import resolve_settings
from distributed_training.errors import UserError
from distributed_training.files.user_files import shown
from distributed_training.memory.fit import check_is_planned
from distributed_training.rank_shares import AUTO, shown_shares
from distributed_training.settings import flag_types
from distributed_training.settings.settings import FACTS, Settings
from distributed_training.strategies.strategy import FlagValues
from tools.plan import cost
from tools.plan.workload import number_of_gpus

SIZE, SIZES = flag_types.positive_float, flag_types.positive_floats
MODELS = """gpt2, gpt2-medium, gpt2-large, gpt2-xl, tiny-gpt2, Llama-2-7B, Llama-2-13B, Llama-3-8B,
    Qwen2.5-7B, Qwen2.5-0.5B, Mistral-7B, another name on the hub, a model folder or a config.json
    (GPT-2, Llama, Mistral, Qwen, GPT-NeoX) (default: gpt2)"""
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
)
SWITCHES = {
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
# The flags of a run that it has.
PLANNED = [name for name, facts in FACTS.items() if facts.planned]


def build_parser(doc: str) -> Parser:
    """Build the parser; `doc` is the docstring of the script."""
    parser = Parser.of_script(doc)
    parser.add_argument("--model", type=flag_types.place, help=MODELS)
    text = "YAML with flags of a run, whose model and workload are planned; the others override it"
    parser.add_argument("--config", type=flag_types.place, metavar="FILE", help=text)
    costs = parser.add_argument_group("cost (needs an amount of work and a rate)")
    for group, flags in ((parser, PLANNER_FLAGS), (costs, COST_FLAGS)):
        for name, kind, placeholder, text in flags:
            group.add_argument(f"--{name}", type=kind, metavar=placeholder, help=text)
    for flag, text in SWITCHES.items():
        parser.add_argument(flag, action="store_true", help=text)
    text = "find the largest batch or the fewest GPUs for each strategy"
    parser.add_argument("--solve", choices=("batch", "gpus"), help=text)
    run = parser.add_argument_group("the run, as in real_model_example.py (auto: bf16)")
    for name in PLANNED:
        add_flag(run, name)
    return parser


def read_flags(parser: Parser) -> Options:
    """Return the flags.

    Those of a run have their values also if they come from --config or are defaults. `settings` are
    the settings of the run, `in_file` the values of --config, and `strategy` its strategy.

    Raises:
        UserError: the file cannot be planned, or a flag needs another one.
    """
    args = parser.parse_args()
    in_file: FlagValues = {}
    strategy = None
    if args.config is None:
        settings = resolve_settings({"model": args.model or "gpt2"})
    else:
        settings, in_file = read_run_file(args)
        strategy = in_file["strategy"]
        if args.tokens:
            args.epochs = args.epochs or settings.training.epochs
        elif any(getattr(args, flag) for flag in cost.RATE):
            args.max_steps = args.max_steps or settings.training.max_steps
    named = ("model", *PLANNED)
    given = {name: value for name in named if (value := getattr(args, name)) is not None}
    if given.get("batch_size") == AUTO:
        raise UserError(
            "--batch_size auto: a run chooses it on its GPUs. --solve batch finds the largest one."
        )
    settings = settings.replace(**given)
    values = values_of(settings)
    args = args.replace(**values, settings=settings, in_file=in_file, strategy=strategy)
    check_needs(args, PLANNED)
    return args


def values_of(settings: Settings) -> FlagValues:
    """Return the values of the flags of a run that a plan has."""
    flags = settings.flags()
    values = {name: flags[name] for name in ("model", *PLANNED)}
    values["precision"] = "bf16" if flags["precision"] == "auto" else flags["precision"]
    values["isolate_documents"] = settings.data.isolates_documents  # also with --packing
    return values


def read_run_file(args: Options) -> tuple[Settings, FlagValues]:
    """Return the settings of --config for the planned GPUs, and its values.

    Raises:
        UserError: the estimate does not support the run, or it has choices of a run on its GPUs.
    """
    gpus, _ = number_of_gpus(args)
    run = read_command_line(["--config", args.config], gpus).settings
    if "batch_size" in run.parallelism.to_choose:
        raise UserError(
            f"{shown(args.config)} has batch_size: auto, which a run chooses on its GPUs: plan it "
            "without --config, with --solve batch."
        )
    check_is_planned(run.strategy, run.training.eval_only)
    values: dict[str, object] = {**values_of(run), "strategy": run.parallelism.strategy}
    if "strategy" in run.parallelism.to_choose:  # the plan chooses as the run does
        values["strategy"] = None
    if isinstance(run.training.rank_shares, tuple):
        values["rank_shares"] = shown_shares(run.training.rank_shares)
        if not args.gpu_speeds and len(args.gpu_memory or ()) < 2:
            raise UserError(
                f"{shown(args.config)} has rank_shares: give --gpu_speeds, or --gpu_memory of each "
                "GPU, from which the shares are planned."
            )
    # The planned GPUs decide on the shares, and the plan on the strategy.
    return run.replace(rank_shares=None, to_choose=()), values
