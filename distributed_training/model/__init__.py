"""The model: from --model to weights in memory, and from trained weights to an exported folder.

spec      ModelSpec, a model without its weights in memory; it finds and loads a model
resolve   from --model to folders with weights and tokenizer that every rank can load
locate    the parts of --model on this machine; download: a model of the hub
config    config.json, generation_config.json, and what the flags change of them
tokenizer read from its folder, or the embedded one; unreadable: why transformers cannot read it
tokenizer_file  whether it tokenizes as its tokenizer.json says
library_warnings  warnings of transformers and peft that a quiet run prints as well
weights   read from a folder, drawn from the seed, saved for the other ranks; quantized: refused
prepare   a loaded model for training: its forward pass, its device
loss      the next-token loss, in chunks of the logits; compiled_loss: by compiled kernels
unused    weights that text does not use, such as those of a vision part
isolation attention within a document, where a sequence has several
attention --attn_implementation: the attention function of transformers
long_rope the rotary factors of LongRoPE, the same in every batch
lora      LoRA adapters, attached by peft; merging: added to the weights for an export
four_bit  linear layers in 4 bits, whose weights rank 0 quantizes for FSDP
frozen    what identifies the frozen weights under adapters
experts   mixtures of experts: a loss that is left out, fused weights without adapters
generate  text from a model that may be sharded over the ranks
description  the folder of a trained model except its weights
older_keys  the exported configuration and tokenizer as transformers 4 reads them
stopping  the tokens at which a trained model stops
export    the trained model as a folder for `from_pretrained`; card: its model card
trained_model  what an export needs of a run
push      the upload of that folder to the Hugging Face hub
"""
