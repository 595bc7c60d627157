"""Checkpoints: one format for all strategies and any number of ranks, made of data only.

Modules:
    manager    saves, finds, checks and loads the checkpoints of a run
    format     reads manifest.json and verifies the files that it lists
    convert    converts checkpoints from and to other formats
"""
