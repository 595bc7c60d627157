"""The command line: flags, the files that set them, and checks of what the flags name.

arguments       all flags in one frozen dataclass, with their types, defaults and help
argument_types  types of flags with their limits, and a parser whose errors are one line
flags           the parser of all flags, with their names in other trainers
parse           from the command line to the arguments: defaults, run file, flags
trainer_flags   flags of other trainers that set ours
run_file        --config and --print_config: flags in a YAML file
checks          flags that exclude each other, or need another one; files and folders
hub             the probe of the Hugging Face hub, and what its caches have
"""
