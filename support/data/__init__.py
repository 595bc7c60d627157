"""The training data: from --dataset to batches of token ids.

rows        the rows of a corpus and their formats: from files, from the hub, or Python's reference
chat        conversations and prompt-completion pairs as token ids
tokenize    a corpus tokenized once, in the cache of the node
sequences   which tokens a sequence has, packing, mixtures, and the tensors of a micro-batch
batches     the training and validation sequences, and micro-batches in one order
streaming   --streaming: sequences of a corpus that is read during training
"""
