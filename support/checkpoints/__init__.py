"""Checkpoints: one format for all strategies and any number of ranks, made of data only.

manager    when to save, how to resume, which checkpoints to keep
find       the checkpoint that --resume selects; whether it belongs to the run
tensors    saves and loads weights and moments, piece by piece
format     names on disk, manifest.json, verification of the files
convert    converts checkpoints from and to other formats
recognize  finds the newest checkpoint of Hugging Face's Trainer
foreign    opens checkpoints of Trainer, DeepSpeed and FSDP, for convert
"""
