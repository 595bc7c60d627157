"""What is given: the flags on the command line and in its run file, and where each one is from."""

from distributed_training.cli.flags import build_parser
from distributed_training.errors import UserError
from distributed_training.files.user_files import shown
from distributed_training.strategies.strategy import FlagValues

# Flags of Trainer and accelerate that `trainer_flags.expand` replaces by ours, before the flags of
# the run file and of the command line are merged.
EXPANDED = {"bf16", "fp16", "use_cpu", "deepspeed", "fsdp"}


def read_flags(argv: list[str]) -> tuple[FlagValues, dict[str, str]]:
    """Return the values on the command line and in its run file, and where each is from."""
    parser = build_parser()

    def read(arguments: list[str]) -> tuple[FlagValues, dict[str, str]]:
        values = vars(parser.parse_args(arguments))
        options = values.pop("spelled", {})
        if values.keys() & EXPANDED:
            from distributed_training.cli.trainer_flags import expand

            expand(values, options)
        return values, options

    flags, options = read(argv)
    if not (file := flags.get("config")):
        return flags, options
    from distributed_training.cli.run_file import read_run_file

    arguments = read_run_file(file, parser)
    try:
        of_file, keys = read(arguments)
    except UserError as error:
        raise UserError(f"{shown(file)}: {error}") from error
    sources = {n: file if k == f"--{n}" else f"{file}: {k[2:]}" for n, k in keys.items()}
    return {**of_file, **flags}, {**sources, **options}
