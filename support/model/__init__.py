"""The model: from --model to weights in memory, and from trained weights to an exported folder.

resolve   finds, downloads or initializes a model: from --model to a ModelSpec (spec)
locate    finds its parts on this machine; download: a model of the hub
tokenizer read from its folder, or the embedded one
weights   read from a folder, drawn from the seed, saved for the other ranks
loss      the next-token loss, computed in chunks of the logits by the output layer
isolation attention within a document, where a sequence has several
lora      LoRA adapters, attached by peft; merging: added to the weights for an export
generate  a sample of text at the end of a run
export    the trained model as a folder for `from_pretrained`; card: its model card
push      the upload of that folder to the Hugging Face hub
"""
