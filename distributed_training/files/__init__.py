"""Files and folders: what users write is read, and what runs write is complete at any moment.

atomic              atomic writes, JSON files, locks, temporary folders
cache               folders of prepared files that runs share; hub_cache: that of the hub
safetensors_writer  the weight files of a model, in shards of limited size
weight_files        the weight files in a folder
json_types          values of JSON files; checked_types: the types of whole files, and their check
user_files          JSON and text files that a user writes
folders             the files of a folder of data
encodings           files that are not UTF-8, and the commands that convert them
"""
