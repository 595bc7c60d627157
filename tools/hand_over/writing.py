"""Writes the files that --to names."""

from __future__ import annotations

import os
from pathlib import Path

from distributed_training import console
from distributed_training.about import command_of
from distributed_training.files.atomic import write_text
from distributed_training.model.config import read_config, read_generation_config
from distributed_training.model.stopping import end_ids
from distributed_training.model.tokenizer import read_tokenizer
from distributed_training.trained.load import is_chat
from distributed_training.trained.source import Source
from tools.hand_over.to_gguf import VARIABLE, Converter, facts_of, whole_model
from tools.hand_over.to_ollama import Untranslatable, around_messages, modelfile


def write_gguf(source: Source, llama_cpp: Path | None, out: Path) -> None:
    """Write a GGUF file with llama.cpp's converter.

    Raises:
        UserError: there is no converter.
        TrainingError: the converter failed.
    """
    converter = Converter.find(llama_cpp)
    with whole_model(source) as folder:
        converter.write(folder, facts_of(source, folder), out)
    console.print0(f"📁 {out}")
    program = command_of("scripts/hand_over.py")
    console.print0(f"🔎 Compare it with transformers: {program} {source.name} --verify {out}")


def write_modelfile(source: Source, llama_cpp: Path | None, out: Path) -> None:
    """Write a Modelfile, and with a converter the GGUF file that it names.

    Without a converter it names the folder of the model, which Ollama imports itself.

    Raises:
        UserError: a file or folder exists that would be written.
        TrainingError: the converter failed.
    """
    merged = out.with_name(f"{out.name}-merged")
    if llama_cpp or os.environ.get(VARIABLE):
        weights = out.with_name("model.gguf")
        if not weights.exists():
            write_gguf(source, llama_cpp, weights)
        text = _modelfile(source, source.adapters or source.folder, f"./{weights.name}")
    else:
        console.warn(
            "Without --llama_cpp Ollama imports the folder, which it does for few architectures."
        )
        with whole_model(source, merged) as folder:
            text = _modelfile(source, folder, str(folder.resolve()))
    write_text(out, text)
    console.print0(f"📁 {out}: `ollama create NAME -f {out}`")


def _modelfile(source: Source, folder: Path, weights: str) -> str:
    """Return the text of a Modelfile; a template that has no equivalent is left out."""
    tokenizer = read_tokenizer(str(folder), source.name)
    generation = read_generation_config(
        str(source.folder), read_config(str(source.folder), source.name)
    )
    chats = is_chat(source, tokenizer)
    ends = end_ids(tokenizer, generation, chats)
    template = "{{ .Prompt }}"
    if chats:
        try:
            template = around_messages(tokenizer).as_go()
        except Untranslatable as error:
            console.warn(
                f"The chat template cannot be written as one of Ollama's ({error}): write TEMPLATE "
                "by hand, and compare with --verify."
            )
            return modelfile(weights, None, tokenizer.convert_ids_to_tokens(sorted(ends)))
    return modelfile(weights, template, tokenizer.convert_ids_to_tokens(sorted(ends)))
