"""Checkpoints: one format for all strategies and any number of ranks, made of data only.

manager    when to save, how to resume, which checkpoints to keep
signature  what identifies a run, in each checkpoint
find       the checkpoint that --resume selects; whether it belongs to the run
format     names on disk, and manifest.json
manifest   checks the content of manifest.json
verify     opens a checkpoint and verifies its files
saving     saves weights and moments, piece by piece
loading    loads them
convert    converts checkpoints from and to other formats
recognize  finds the newest checkpoint of Hugging Face's Trainer
foreign    opens checkpoints of Trainer, DeepSpeed and FSDP, for convert
"""
