"""The training data: from --dataset to batches of token ids.

opening         from --dataset to the training and validation sequences of a run
sources         where rows come from: Python's reference, files (row_files), or the hub (row_hub,
                hub_json for its JSON files)
file_types      the types of files, one module each; file_type: what each answers; text_files
folder_splits   which files of a folder are trained on, and which are evaluated on
rows            from the keys of a row to an example; row_formats: one class for each format
refused_rows    answers that are not to be imitated, tools under another key, tables of pandas
special_tokens  tokens that begin a text, and those that end an answer
conversations   conversations and pairs of prompt and completion, from the keys of a row
tools           the tools of a conversation, and the assistant's calls of them
chat_template   conversations as text, and the position of the assistant's messages in it
turn_ends       the tokens that end an assistant's turn in a chat template
chat            both as token ids, and the prompt of --generate; examples: those of a corpus
chat_notices    notices about a chat template, and about answers that do not end
token_cache     a corpus tokenized once, in the cache of the node; tokenize: how
document_tokenizer  texts of any length as token ids
corpus          the sequences of one tokenized corpus; mixture: of several in one epoch
sequences       which tokens a sequence has, and the tensors of a micro-batch; packing: --packing
token_file      arrays in files of the cache, compared with what was verified when they are read
token_bytes     the bytes of the text that tokens stand for
batches         micro-batches in one order, and the counters of a run
streaming       --streaming: sequences of a corpus that is read during training
stream_source   the corpus of a stream; stream_units: its rows, assigned to batch slots
stream_slots    the sequences of these slots; stream_encoder: from rows to token ids
stream_state    the position of a stream, in checkpoints
facts           what results.json says of the data; printing: what the console says
"""
