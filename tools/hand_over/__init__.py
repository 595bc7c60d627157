"""scripts/hand_over.py: hand a trained model over to llama.cpp, Ollama and other engines.

main         the command line
to_gguf      --to gguf: starts llama.cpp's converter, after merging adapters
rules        the name of a tokenizer's rule in llama.cpp
shim         a program: the converter, with what it cannot find in the folder
to_ollama    --to ollama: a Modelfile
prompts      the prompts of a comparison
prompt       one of them, and its limits
reference    what transformers answers
engines      what is asked of an engine
server       --verify URL
file_engine  --verify FILE.gguf; engine.mjs runs node-llama-cpp for it
compare      an answer, token by token
verdict      the verdict, with the most likely cause of a difference
"""
