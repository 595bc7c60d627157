"""The command line: flags, the files that set them, and checks before the model is loaded.

flags           all flags, and how they are reconciled with a DeepSpeed file
argument_types  types of flags with their limits, and a parser whose errors are one line
run_file        --config: flags in a YAML file
fsdp_config     --fsdp_config: FSDP's options
validate        checks of paths, the hub, packages, compilers and disks
"""
