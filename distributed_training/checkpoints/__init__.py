"""Checkpoints: one format for all strategies and any number of ranks, made of data only.

manager    when to save, how to resume, which checkpoints to keep
signature  what identifies a run, in each checkpoint
other_runs whether a checkpoint belongs to the run that resumes it; best: its best evaluation
find       the checkpoint that --resume selects
folder     the folder of a run's checkpoints: its marks, and which ones are removed
contents   what is saved in a checkpoint, and loaded from it
format     names on disk, and manifest.json
manifest   checks the content of manifest.json
verify     opens a checkpoint and verifies its files
saver      saves while training continues; save_thread: the thread that writes
host_copy  the copy of the states that it writes
writing    completes a checkpoint's folder, so that it is complete or missing
saving     saves weights and moments, piece by piece
loading    loads them
convert    converts checkpoints from and to other formats
recognize  finds the newest checkpoint of Hugging Face's Trainer
foreign    opens checkpoints of Trainer, DeepSpeed and FSDP, for convert
"""
