"""Trained models: of a run, in a folder, or on the hub, for generation.

source  where the parts of the model are; imports nothing heavy
load    the model and its tokenizer in memory
"""
