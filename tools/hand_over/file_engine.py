"""A GGUF file through an installed engine: node-llama-cpp, or llama-cpp-python.

The prompts become tokens as in llama-server: the file's chat template writes conversations, and the
BOS token precedes a prompt if the file says so, but not one that begins with it.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from distributed_training.data.chat_template import Chat, ChatTemplate
from distributed_training.data.conversations import Message
from distributed_training.errors import MissingRequirement, TrainingError, UserError
from distributed_training.files.json_types import JsonObject, lookup
from tools.hand_over.engines import NEAR_TIES, Answer
from tools.hand_over.prompt import CONTEXT, NEW_TOKENS, Prompt
from tools.hand_over.reference import Reference

PROGRAM = Path(__file__).with_name("engine.mjs")
TRIED = "node-llama-cpp 3.22.1"
TYPES = {0: "f32", 1: "f16", 32: "bf16"}  # general.file_type of files that are not quantized


class Backend(Protocol):
    """A library that runs a GGUF file."""

    file_type: int | None
    chat_template: str | None
    adds_bos: bool
    bos: int | None

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without tokens at its ends."""

    def complete(self, ids: list[int]) -> Answer:
        """Return the likeliest NEW_TOKENS tokens after `ids`."""

    def close(self) -> None:
        """End what was started."""


class NodeLlamaCpp:
    """node-llama-cpp in a folder, in its own process."""

    def __init__(self, folder: Path, file: Path, context: int) -> None:
        """Load the file.

        Raises:
            UserError: Node or the library is missing, or the file cannot be loaded.
        """
        library = folder / "node_modules" / "node-llama-cpp"
        if not library.is_dir():
            raise UserError(
                f"--engine {folder}: there is no node_modules/node-llama-cpp: run `npm install "
                f"node-llama-cpp@{TRIED.rpartition(' ')[2]}` there."
            )
        if shutil.which("node") is None:
            raise MissingRequirement("--engine needs Node.js, and `node` is not in PATH.")
        command = ["node", str(PROGRAM), str(folder), str(file), str(context)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        found = self._ask("describe")
        self.file_type = lookup(found, "metadata.general.file_type")
        self.chat_template = lookup(found, "metadata.tokenizer.chat_template")
        self.adds_bos, self.bos = bool(found["adds_bos"]), found.get("bos")

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without tokens at its ends."""
        return self._ask("tokenize", text=text)["ids"]

    def complete(self, ids: list[int]) -> Answer:
        """Return the likeliest NEW_TOKENS tokens after `ids`."""
        found = self._ask("complete", ids=ids, count=NEW_TOKENS)
        return Answer(found["text"], found["stopped"], found["tokens"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, operation: str, **values) -> JsonObject:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"operation": operation, **values}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            process.wait()
            raise TrainingError("node-llama-cpp has ended: its message is above.")
        return json.loads(line)


class LlamaCppPython:
    """llama-cpp-python, in this process."""

    def __init__(self, file: Path, context: int) -> None:
        import llama_cpp

        f32 = {"type_k": 0, "type_v": 0}  # of the cache, see engine.mjs
        self._model = llama_cpp.Llama(str(file), n_ctx=context, verbose=False, **f32)
        metadata = self._model.metadata
        kind = metadata.get("general.file_type")
        self.file_type = None if kind is None else int(kind)
        self.chat_template = metadata.get("tokenizer.chat_template")
        self.bos = self._model.token_bos()
        # Its flag add_bos asks the library to do what the file says.
        self.adds_bos = self._model.tokenize(b"a", add_bos=True)[:1] == [self.bos]

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without tokens at its ends."""
        return self._model.tokenize(text.encode(), add_bos=False, special=True)

    def complete(self, ids: list[int]) -> Answer:
        """Return the likeliest NEW_TOKENS tokens after `ids`."""
        found = self._model.create_completion(ids, max_tokens=NEW_TOKENS, temperature=0)
        choice = found["choices"][0]
        return Answer(choice["text"], choice["finish_reason"] == "stop")

    def close(self) -> None:
        """Release the model."""
        self._model.close()


class FileEngine:
    """A GGUF file with the model that was handed over."""

    cache_in_16_bits, continues_texts = False, True

    def __init__(self, file: Path, backend: Backend, reference: Reference) -> None:
        self.name, self.backend, self._tokenizer = str(file), backend, reference.tokenizer
        kind = TYPES.get(backend.file_type) if backend.file_type is not None else "f32"
        self.quantization = None if kind else f"file type {backend.file_type}"
        self.near_tie = NEAR_TIES[kind or "f32"]
        if "gelu" in str(reference.model.config.to_dict()):  # ggml has a table of it, in fp16
            self.near_tie = max(self.near_tie, NEAR_TIES["f16"])

    @classmethod
    def open(cls, file: Path, folder: Path | None, reference: Reference) -> FileEngine:
        """Load a GGUF file.

        Args:
            folder: of node-llama-cpp; None: llama-cpp-python is used.
        Raises:
            UserError: there is no engine, or the file cannot be loaded.
        """
        context = min(CONTEXT, reference.positions or CONTEXT)
        if folder:
            return cls(file, NodeLlamaCpp(folder, file, context), reference)
        if importlib.util.find_spec("llama_cpp") is None:
            raise MissingRequirement(
                "An engine is needed to read the file: name a folder with node-llama-cpp by "
                "--engine DIR (npm install node-llama-cpp), or pip install llama-cpp-python."
            )
        return cls(file, LlamaCppPython(file, context), reference)

    def complete(self, prompt: Prompt) -> Answer:
        """Continue a text, or a conversation that is written in the chat template already."""
        return self._complete(self._with_bos(self.backend.tokenize(prompt.text)))

    def chat(self, prompt: Prompt) -> Answer:
        """Answer a conversation, which the file's chat template writes."""
        ids = self.backend.tokenize(self.rendered(prompt.messages) or "")
        if self.backend.adds_bos and ids[:1] == [self.backend.bos]:
            ids = ids[1:]
        return self._complete(self._with_bos(ids))

    def rendered(self, messages: Sequence[Message]) -> str | None:
        """Return a conversation in the file's chat template; "" without one, or if it refuses."""
        if not self.backend.chat_template:
            return ""
        tokenizer, bos = copy.copy(self._tokenizer), self.backend.bos
        # The file's BOS token, which may be another one than the tokenizer's.
        text = "" if bos is None else tokenizer.decode([bos])
        assignment = f"{{% set bos_token = {json.dumps(text)} %}}"
        tokenizer.chat_template = assignment + self.backend.chat_template
        try:
            return ChatTemplate(tokenizer).render(Chat(messages), add_generation_prompt=True)
        except (ValueError, UserError):
            return ""

    def close(self) -> None:
        """End the engine."""
        self.backend.close()

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self.backend.bos
        return [bos, *ids] if self.backend.adds_bos and bos is not None else ids

    def _complete(self, ids: list[int]) -> Answer:
        found = self.backend.complete(ids) if ids else Answer("", False, [])
        return found._replace(prompt_tokens=ids, prompt_count=len(ids))
