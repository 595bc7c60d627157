"""Files and folders: checks for what is read, atomic writes for what is written.

atomic              atomic writes, JSON files, locks, temporary folders
cache               folders of prepared files that several runs share, verified at every use
hub_cache           the caches of the Hugging Face libraries
folders             the files of a folder that are read (--include)
safetensors_writer  the weight files of a model, in shards of at most 1 GB
user_files          the small YAML and JSON files that a user writes
"""
