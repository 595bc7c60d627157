"""The command line: a parser of the flags, the files that set them, and checks of what they name.

parser         a parser whose errors are one line, for the run and for all scripts
flags          the parser of all flags, with their names in other trainers
given          the flags on the command line and in its run file
parse          from these flags to the settings: defaults, the strategy's file, checks
resolve        the settings for a program: from a list of arguments, or values by name
defaults       values of flags that other flags determine
choice         --strategy auto, --batch_size auto, --global_batch_size
trainer_flags  flags of other trainers that set ours
run_file       --config: flags in a YAML file
print_flags    --print_config: the flags of a run, as a run file
check_run      the first checks of a run
checks         flags that exclude each other, or need another one; files and folders
model_folders  advice about a folder that is no model
hub            the probe of the Hugging Face hub, and what its caches have
"""
