"""--to gguf: the file that llama.cpp's own converter writes of a trained model."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from distributed_training import console
from distributed_training.data.special_tokens import start_of
from distributed_training.errors import TrainingError, UserError
from distributed_training.files.atomic import read_json, write_atomically
from distributed_training.files.json_types import JsonObject
from distributed_training.model.config import read_generation_config
from distributed_training.model.stopping import end_ids
from distributed_training.programs import run_program
from distributed_training.trained.load import is_chat, load
from distributed_training.trained.source import Source
from tools.hand_over.rules import rule_of

CONVERTER, VARIABLE = "convert_hf_to_gguf.py", "LLAMA_CPP"
TRIED = "llama-cpp-python 0.3.36 (its vendor/llama.cpp)"  # whose converter the tests run
SHIM = Path(__file__).with_name("shim.py")
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # of config.json: --outtype


class Converter(NamedTuple):
    """llama.cpp's converter."""

    script: Path

    @classmethod
    def find(cls, folder: Path | None) -> Converter:
        """Return the converter in a folder, or without one in that of the variable LLAMA_CPP.

        Raises:
            UserError: there is none.
        """
        named = folder or Path(os.environ.get(VARIABLE) or ".")
        if not folder and not os.environ.get(VARIABLE):
            raise UserError(
                f"llama.cpp's converter is needed: name the folder with {CONVERTER} by --llama_cpp "
                f"DIR, or by the variable {VARIABLE} "
                "(git clone https://github.com/ggml-org/llama.cpp)."
            )
        if not (named / CONVERTER).is_file():
            raise UserError(f"{named} has no {CONVERTER}: name the folder of llama.cpp's source.")
        return cls((named / CONVERTER).resolve())

    def write(self, model: Path, facts: JsonObject, target: Path) -> None:
        """Convert a model's folder into the file `target`.

        Args:
            facts: see shim.py.
        Raises:
            TrainingError: the converter failed; the message has its last line.
        """
        config = read_json(model / "config.json")
        dtype = TYPES.get(str(config.get("dtype") or config.get("torch_dtype")), "auto")

        def convert(temporary: Path) -> None:
            flags = [str(model), "--outfile", str(temporary), "--outtype", dtype]
            command = [sys.executable, str(SHIM), json.dumps(facts), str(self.script), *flags]
            console.print0(f"⚙️  {shlex.join(command)}")
            code, output = run_program(command)
            if code:
                lines = [line.strip() for line in output.splitlines() if line.strip()]
                raise TrainingError(
                    f"{self.script} failed: {(lines or ['without a message'])[-1]} (tried with "
                    f"{TRIED})."
                )

        write_atomically(target, convert)


def facts_of(source: Source, folder: Path) -> JsonObject:
    """Return what the converter cannot find in the folder of a model, see shim.py."""
    from distributed_training.model.config import read_config
    from distributed_training.model.tokenizer import read_tokenizer

    tokenizer = read_tokenizer(str(folder), source.name)
    generation = read_generation_config(str(folder), read_config(str(folder), source.name))
    start, first = start_of(tokenizer), tokenizer.bos_token_id
    ends = end_ids(tokenizer, generation, is_chat(source, tokenizer)) - {tokenizer.eos_token_id}
    if len(ends) > 2:
        console.warn(f"The file names two of the {len(ends)} tokens that end an answer.")
    file, rule = folder / "tokenizer.json", None
    if file.is_file():
        rule = rule_of(read_json(file))
    adds_bos = bool(start) if start in ([], [first]) else None
    return {"rule": rule, "adds_bos": adds_bos, "has_bos": first is not None, "ends": sorted(ends)}


@contextlib.contextmanager
def whole_model(source: Source, kept: Path | None = None) -> Iterator[Path]:
    """Yield a folder with the model; adapters are added to the weights of their base model first.

    Args:
        kept: the new folder of a merged model; None: a temporary one.
    """
    if source.adapters is None:
        yield source.folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = kept or Path(temporary, source.adapters.resolve().name)
        if kept and kept.exists():
            raise UserError(f"{kept} exists: remove it, or name another --out.")
        write_merged_model(source, folder)
        yield folder


def write_merged_model(source: Source, folder: Path) -> None:
    """Write the model with its adapters added to the weights, in fp32."""
    import torch

    from distributed_training.model.older_keys import write_tokenizer

    model, tokenizer = load(source, torch.device("cpu"), "fp32")
    merged = model.merge_and_unload()
    merged.save_pretrained(folder)
    write_tokenizer(tokenizer, folder)
    # Keys that transformers leaves out, and converters read.
    config = {**read_json(source.folder / "config.json"), **read_json(folder / "config.json")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    console.print0(f"➕ Adapters of {source.name} added to the weights of {source.folder}")
