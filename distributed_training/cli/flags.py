"""The parser of all flags, which is built from the fields of the sections.

Nothing heavy is imported here, so that --help and argument errors appear at once.
"""

import argparse

from distributed_training.about import VERSION, name_of
from distributed_training.cli.parser import Parser
from distributed_training.settings import flag_types
from distributed_training.settings.command import CommandSettings
from distributed_training.settings.fields import flags_of
from distributed_training.settings.settings import DEFAULTS, FACTS, FLAGS, SECTIONS
from distributed_training.strategies.strategy import FlagValues

# Other names of flags, with the same values; --help lists them next to ours.
RENAMED = {name: facts.names for name, facts in FACTS.items() if facts.names}
# Flags that have nothing to change here; one line names those that were given.
IGNORED = """
    bf16_full_eval dataloader_num_workers dataloader_persistent_workers
    dataloader_pin_memory dataloader_prefetch_factor dataset_num_proc ddp_backend
    ddp_bucket_cap_mb ddp_find_unused_parameters disable_tqdm eval_accumulation_steps
    fp16_full_eval fp16_opt_level half_precision_backend include_num_input_tokens_seen
    include_tokens_per_second label_names log_level log_level_replica log_on_each_node
    logging_first_step logging_nan_inf_filter low_cpu_mem_usage overwrite_cache
    preprocessing_num_workers remove_unused_columns save_on_each_node save_safetensors
    skip_memory_metrics torch_empty_cache_steps trust_remote_code use_cache use_fast_tokenizer
    use_liger_kernel
    """.split()

EXIT_CODES = """\
exit codes: 0 completed, 1 failed, 2 wrong usage or bad input, 3 out of memory,
75 stopped by a signal and saved. Launchers may turn any but 0 into their own:
programs read "status" in results.json."""


# The flags of each group of --help, by title.
GROUPS = {
    section.title: [field.name for field in flags_of(section)] for section in SECTIONS.values()
}

# Flags that --print_config and results.json leave out: no settings, or they have set another flag.
NOT_SHOWN = """
    config print_config check prefetch show_sample prove replay local_rank fsdp bf16 fp16 use_cpu
    use_peft do_train do_eval eval_strategy save_strategy deepspeed
    """.split()


class SetFlag(argparse.Action):
    """Set a flag, and record the option that set it."""

    def __call__(self, parser, namespace, values, option_string=None):
        vars(namespace).setdefault("spelled", {})[self.dest] = option_string
        is_off = option_string == f"--no_{self.dest}"
        setattr(namespace, self.dest, not values if is_off else values)


class AddToFlag(SetFlag):
    """Add a value to a flag that may be repeated; an empty text is no value."""

    def __call__(self, parser, namespace, values, option_string=None):
        before = getattr(namespace, self.dest, ())
        super().__call__(parser, namespace, (*before, *filter(None, [values])), option_string)


def names_in_help(action: argparse.Action) -> list[str]:
    """Return the names of a flag; those of a switch that change its default."""
    names = [*action.option_strings]
    if action.type is not flag_types.boolean:
        return names
    return names[:1] if names[0] == f"--no_{action.dest}" else names[:-1]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help in which all names of a flag come before its value: --lr, --learning_rate LR."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=80)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(names_in_help(action))
        if action.nargs == 0 or action.type is flag_types.boolean:
            return names
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{names} {value}"


def add_flag(group: argparse._ActionsContainer, name: str) -> None:
    """Add a flag with all of its names; the default is appended to a help that names none."""
    details, default = FLAGS[name].metadata, DEFAULTS[name]
    names, kind, text = [name, *RENAMED.get(name, ())], details["type"], details["help"]
    options = dict(details["options"])
    if kind is flag_types.boolean:
        names.append(f"no_{name}")
        names = names[::-1] if default else names  # first the one that changes something
        options |= {"nargs": "?", "const": True}
    elif isinstance(default, str | int | float) and "(default:" not in text:
        text += f" (default: {default})"
    action = AddToFlag if options.pop("action", None) == "append" else SetFlag
    options |= {"type": kind, "help": text.replace("%", "%%")}
    group.add_argument(*(f"--{name}" for name in names), action=action, dest=name, **options)


def build_parser() -> Parser:
    """Build the parser of all flags. The parsed options are those that were given."""
    others = "docs/COMING_FROM.md has other trainers'"
    parser = Parser(
        f": flags of a launcher go before the script's name; {others}",
        prog=name_of("real_model_example.py"),
        usage="%(prog)s [flags]",
        description="Fine-tune a causal language model under one of seven strategies.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"distributed-training {VERSION}")
    for title, names in GROUPS.items():
        heading = title[0].lower() + title[1:]
        is_first = title == CommandSettings.title  # its flags follow those of argparse
        group = parser if is_first else parser.add_argument_group(heading)
        for name in names:
            add_flag(group, name)
    for name in IGNORED:
        parser.add_argument(
            f"--{name}", f"--no_{name}", action=SetFlag, nargs="*", help=argparse.SUPPRESS
        )
    return parser


def shown_flags(values: FlagValues) -> FlagValues:
    """Return the flags that --print_config and results.json show: those that are on or set.

    Args:
        values: of all flags, by name.
    """
    shown = {}
    for name in (name for name in DEFAULTS if name not in NOT_SHOWN):
        value = values[name]
        is_off = value is None or value is False or value == ()
        if not is_off or DEFAULTS[name] is True:
            shown[name] = value
    if values["fsdp"]:
        shown["fsdp"] = values["fsdp"]
    # One value is not in a list.
    for name in ("dataset", "generate"):
        texts = list(map(str, values[name] or ()))
        if texts:
            shown[name] = texts if len(texts) > 1 else texts[0]
    return shown
