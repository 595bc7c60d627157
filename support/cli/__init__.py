"""The command line: flags, the files that set them, and checks of what the flags name.

flags           the tables of all flags, and their parser
aliases         flag names of Hugging Face's Trainer and other trainers
argument_types  types of flags with their limits, and a parser whose errors are one line
parse           from the command line to the arguments: files, defaults
conflicts       flags that exclude each other, or need another one
arguments       the arguments, which cannot be changed after parsing
run_file        --config: flags in a YAML file
ds_config       --ds_config: DeepSpeed's configuration, and how it is reconciled with the flags
fsdp_config     --fsdp_config: FSDP's options
datasets        the datasets that --dataset names, with their weights
paths           checks of files and folders
hub             the probe of the Hugging Face hub
"""
