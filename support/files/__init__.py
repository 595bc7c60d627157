"""Files and folders: what users write is read, and what runs write is complete at any moment.

atomic              atomic writes, JSON files, locks, temporary folders
cache               folders of prepared files that runs share; the caches of Hugging Face
safetensors_writer  the weight files of a model, in shards of at most 1 GB
user_files          the YAML and JSON files that a user writes, and the files of a folder
"""
