"""The trained model as a folder that `AutoModelForCausalLM.from_pretrained` reads.

    config.json, generation_config.json, tokenizer files     what `describe` writes; a checkpoint holds them, too
    model.safetensors                                        or several files and model.safetensors.index.json
    README.md                                                the model card

Weights are written one by one, each straight to its place in its file, so that exporting needs the memory of the largest
weight on one rank and not of a second model, on any rank.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards

from support import models
from support.config import EMBEDDED_MODEL
from support.files import sync_folder, write_text
from support.preflight import is_local_model

FILE_BYTES = "5GB"  # of one weights file at most, as transformers has it
# The format's own names: https://huggingface.co/docs/safetensors
SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
                     torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}  # fmt: skip


class WeightFiles:
    """Safetensors files whose tensors arrive one after the other, in any order.

    The library's own `save_file` wants all tensors of a file in memory at once.

    Args:
        folder: an existing, empty folder.
        tensors: tensors of the right shapes and types by name; only looked at, so that they may be on the meta device.
        file_bytes: the most that one file holds, such as "5GB".
    """

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor], file_bytes: str = FILE_BYTES):
        plan = split_torch_state_dict_into_shards(tensors, max_shard_size=file_bytes)
        self._places: dict[str, tuple[Path, int]] = {}
        self._missing = {name: tensors[name] for names in plan.filename_to_tensors.values() for name in names}
        for file, names in plan.filename_to_tensors.items():
            self._start_file(folder / file, {name: tensors[name] for name in names})
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")

    def _start_file(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        """Write the header (its length in 8 bytes, then JSON), and note where each tensor's bytes belong."""
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {"dtype": SAFETENSORS_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        for name in tensors:
            self._places[name] = (path, 8 + len(text) + header[name]["data_offsets"][0])
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor into its place; it is converted to the type that was announced."""
        announced = self._missing.pop(name)
        path, offset = self._places[name]
        data = tensor.detach().to("cpu", announced.dtype).contiguous().flatten().view(torch.uint8)
        with open(path, "rb+") as file:
            file.seek(offset)
            file.write(memoryview(data.numpy()))

    def finish(self) -> None:
        """Flush all to disk.

        Raises:
            ValueError: a tensor that was announced has not come.
        """
        if self._missing:
            raise ValueError(f"{len(self._missing)} weights are missing, {next(iter(self._missing))} among them.")
        for path in {path for path, _ in self._places.values()}:
            with open(path, "rb+") as file:
                os.fsync(file.fileno())


def export_model(model, state, blueprint, output_dir: Path, args, run, card: str) -> Path:
    """Write the model that a run has trained; every rank calls it.

    Args:
        model: as wrapped by the strategy.
        state: the run's ShardedState.
        blueprint: the model's description.
        output_dir: the run's folder.
        args: --export_hf, --export_dtype.
        run: the ranks.
        card: the model card's text.
    Returns:
        The new folder; an older export there was replaced.
    Raises:
        OSError: the disk is full, or not writable.
    """
    folder, dtype = Path(args.export_hf) if args.export_hf else output_dir / "hf", models.DTYPES[args.export_dtype]
    buffers = persistent_buffers(getattr(model, "module", model))
    files = None
    if run.is_main:
        beside = start_folder(folder)
        run.temporary.append(str(beside))
        announced = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in state.shapes.items()}
        files = WeightFiles(beside, announced | {name: buffer.to("meta") for name, buffer in buffers.items()})
    for name, weight in state.whole_weights():
        if files:
            files.write(name, weight)
    if files:
        for name, buffer in buffers.items():
            files.write(name, buffer)
        files.finish()
        describe(blueprint.config, blueprint.generation, blueprint.tokenizer, beside, dtype)
        write_text(beside / "README.md", card)
        finish_folder(beside, folder)
        run.temporary.remove(str(beside))
    run.say(f"🤗 {folder}")
    return folder


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to the weights; most models have none."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def start_folder(folder: Path) -> Path:
    """An empty folder beside `folder`, to be given its name when all is written."""
    beside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def finish_folder(beside: Path, folder: Path) -> None:
    """Give a finished folder its name; what had the name before is removed."""
    sync_folder(beside)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(beside, folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def describe(config, generation, tokenizer, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write all of a model but its weights: configuration, generation configuration and tokenizer.

    Args:
        dtype: the weights' type, noted in the configuration; None leaves it as it is.
    """
    config = copy.deepcopy(config)
    config.use_cache = True  # off for training only
    config.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    if dtype is not None:
        config.dtype = dtype
    config.save_pretrained(folder)
    generation.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def model_card(facts: dict, identity: dict) -> str:
    """README.md of an exported model, with the hub's metadata on top.

    Args:
        facts: results.json's keys, as far as they are known.
        identity: what the run was, see `checkpoint.identify`.
    """
    hyperparameters = identity["soft"] | identity["told"]
    base, dataset = facts["model"], (facts.get("dataset") or {}).get("name")
    metadata = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    metadata += [f"base_model: {base}"] if base != EMBEDDED_MODEL and not is_local_model(base) else []
    metadata += ["---"]
    results = {
        "Training loss, first step": facts.get("train_loss_first"),
        "Training loss, last step": facts.get("train_loss_last"),
        "Evaluation loss": facts.get("eval_loss"),
        "Perplexity": facts.get("perplexity"),
        "Tokens seen": facts.get("tokens"),
        "Optimizer steps": facts.get("steps"),
        "Tokens per second": facts.get("tokens_per_second"),
    }
    versions = ", ".join(f"{name} {number}" for name, number in (facts.get("versions") or {}).items())
    parts = [
        "\n".join(metadata),
        f"# {Path(base).name}, fine-tuned" + (f" on {dataset}" if dataset else ""),
        f"Base model: `{base}`, {facts['parameters']:,} parameters. Trained with `real_model_example.py` under "
        f"`--strategy {facts['strategy']}` on {facts['world_size']} × {_device(facts)}.",
        "## Results\n\n" + _table(results.items(), "Measured"),
        "## Training\n\n" + _table(hyperparameters.items(), "Hyperparameter"),
    ]
    if facts.get("dataset"):
        parts.append(f"Data: {dataset}, SHA-256 of the corpus `{facts['dataset'].get('sha256')}`.")
    if versions:
        parts.append(f"Versions: {versions}.")
    if facts.get("command"):
        parts.append(f"```bash\n{facts['command']}\n```")
    return "\n\n".join(parts) + "\n"


def _device(facts: dict) -> str:
    hardware = facts.get("hardware") or {}
    return hardware.get("gpu") or "CPU process"


def _table(rows: Iterable[tuple[str, object]], title: str) -> str:
    lines = [f"| {title} | Value |", "|---|---|"]
    for name, value in rows:
        if isinstance(value, float):
            value = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
        if value is not None:
            lines.append(f"| {name} | {value} |")
    return "\n".join(lines)
