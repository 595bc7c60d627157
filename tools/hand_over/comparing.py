"""Runs a comparison, and prints its verdict."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from distributed_training import console
from distributed_training.console import visible
from distributed_training.errors import UserError, first_line
from distributed_training.files.json_types import JsonObject
from distributed_training.records.recorded_run import read_folder
from distributed_training.trained.source import Source
from tools.hand_over.engines import Engine
from tools.hand_over.file_engine import FileEngine
from tools.hand_over.prompt import NEW_TOKENS, Prompt
from tools.hand_over.prompts import prompts_of, rows_of_run
from tools.hand_over.reference import Reference, base_of
from tools.hand_over.server import Server
from tools.hand_over.verdict import DIFFERENT, EQUAL, Verdict, verify

if TYPE_CHECKING:
    from distributed_training.data.rows import Row

TYPES = {"torch.float16": "f16", "torch.bfloat16": "bf16"}  # of the exported weights


def compare_with(model: str, source: Source, target: str, engine_folder: Path | None) -> int:
    """Compare an engine with transformers, and print the verdict; return the exit code.

    Args:
        model: what the user has named.
        target: the URL of a server, or a GGUF file.
        engine_folder: of node-llama-cpp, for a file.
    Raises:
        UserError: the server does not answer, or not what the model was trained on, or there is
            no engine for the file.
    """
    results = results_of(Path(model))
    reference = Reference.load(source)
    engine: Engine
    if target.startswith("http"):
        config = reference.model.config
        # transformers 4.56 renamed it.
        dtype = config.dtype if hasattr(config, "dtype") else config.torch_dtype
        kind = TYPES.get(str(dtype), "f32")
        engine = Server(target, kind)
    else:
        engine = FileEngine.open(Path(target), engine_folder, reference)

    def load_base() -> Reference | None:
        base = base_of(source, results)
        return Reference.load(base) if base else None

    try:
        with console.timer(f"Comparing {engine.name}"):
            prompts = _usable(prompts_of(reference, _rows(results, reference)), engine)
            verdict = verify(engine, reference, prompts, load_base)
    finally:
        engine.close()
    print(visible(text_of(verdict, engine)))
    return int(verdict.status == DIFFERENT)


def results_of(path: Path) -> JsonObject:
    """Return results.json of a run that is named by its folder, or by its exported model."""
    for folder in (path, path.absolute().parent):
        if (folder / "results.json").is_file():
            return read_folder(folder).results
    return {}


def _rows(results: JsonObject, reference: Reference) -> Iterable[Row]:
    """Yield rows of the run's data; none, with a notice, if they are not there."""
    try:
        if results:
            yield from rows_of_run(results, reference.tokenizer)
    except (UserError, OSError) as error:
        console.warn(f"Without prompts of the run's data: {first_line(error, 200)}")


def _usable(prompts: list[Prompt], engine: Engine) -> list[Prompt]:
    """Return the prompts that an engine can answer.

    Raises:
        UserError: there is none.
    """
    usable = [prompt for prompt in prompts if prompt.is_chat or engine.continues_texts]
    if not usable:
        raise UserError(
            f"{engine.name} has no /v1/completions, and the model continues texts: start a server "
            "that has it (llama-server, vLLM), or compare a GGUF file."
        )
    return usable


def text_of(verdict: Verdict, engine: Engine) -> str:
    """Return the lines that describe a verdict."""
    results = verdict.results
    chats = sum(result.prompt.is_chat for result in results)
    stops = sum(result.expected.stops for result in results)
    reported = sum(result.answer.prompt_count is not None for result in results)
    lines = [
        f"{engine.name}: {len(results)} prompts ({len(results) - chats} texts, {chats} "
        f"conversations), {stops} answers end within {NEW_TOKENS} tokens",
        f"  {verdict.equal_tokens} of {verdict.tokens} tokens equal; tokens of {reported} prompts "
        "compared",
    ]
    if not engine.continues_texts:
        lines.append("ℹ️  Texts were not compared: the server has no /v1/completions.")
    if engine.quantization and not verdict.cause:
        lines.append(
            f"ℹ️  Its weights are quantized ({engine.quantization}): other prompts may differ."
        )
    if not stops:
        lines.append("ℹ️  No answer ends within these tokens, so stop tokens were not tested.")
    if verdict.cause:
        cause = verdict.cause
        return "\n".join([*lines, f"❌ {DIFFERENT}: {cause.name}: {cause.explanation}"])
    ties = [result.difference.gap for result in results if result.difference]
    if verdict.status != EQUAL:
        where = f"{len(ties)} answers differ from a position where the two best logits differ by "
        return "\n".join([*lines, f"✅ {verdict.status}: {where}at most {max(ties):.2g}."])
    return "\n".join([*lines, f"✅ {EQUAL}"])
