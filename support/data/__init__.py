"""The training data: from --dataset to batches of token ids.

formats         the formats of a row, and the document or example that a row becomes
rows            the rows of a file, of each type of file, as documents and examples
sources         the documents and examples of a corpus, from files or from the hub
tokenize        a corpus tokenized once, in the cache of the node
long_documents  the token ids of a document of any length, computed in chunks
chat            conversations and prompt-completion pairs as token ids with a loss mask
templates       limits on the time and memory of a chat template
batches         sequences and micro-batches, in one order for any number of ranks
packing         --packing: which examples share a sequence
mixture         several datasets in one order, in the shares of their weights
streaming       --streaming: sequences of a corpus that is read during training
stream_reader   --streaming: the rows of a corpus, assigned to batch slots
"""
