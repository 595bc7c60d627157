"""Commands of the training script that do not train.

check     --check: tests what a run needs of this machine and its network
prefetch  --prefetch: downloads the model and the dataset and tokenizes the dataset
"""
