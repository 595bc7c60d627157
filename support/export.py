"""The trained model as a folder that `AutoModelForCausalLM.from_pretrained` reads.

    config.json, generation_config.json, tokenizer files     what `describe` writes; a checkpoint holds them, too
    model.safetensors                                        or several files and model.safetensors.index.json
    README.md                                                the model card

Weights are written one by one, each straight to its place in its file, so that exporting needs the memory of the largest
weight on one rank and not of a second model, on any rank.
"""

from __future__ import annotations

import copy
import itertools
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

from support import lora, memory, models
from support.config import EMBEDDED_MODEL
from support.files import sync_folder, sync_tree, write_text
from support.preflight import is_local_model
from support.safetensors_files import WeightFiles


def export_model(model, state, blueprint, output_dir: Path, args, run, card: str) -> dict:
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
        What results.json says of it. An older export in the same place was replaced.
    Raises:
        OSError: the disk is full, or not writable.
    """
    named, dtype = Path(args.export_hf or output_dir / "hf"), models.DTYPES[args.export_dtype]
    folder = named.absolute()
    begun = time.monotonic()
    beside = None
    if run.is_main:
        beside = start_folder(folder)
        run.temporary.append(str(beside))
        describe(blueprint, beside, dtype, whole=args.merge_lora)
    if blueprint.lora and args.merge_lora:
        _write_merged(state, blueprint, beside, dtype, run)
    else:
        _write_trained(state, models.persistent_buffers(getattr(model, "module", model)), blueprint, beside, dtype)
    if run.is_main:
        write_text(beside / "README.md", card)
        finish_folder(beside, folder)
        run.temporary.remove(str(beside))
    run.say(f"🤗 {named}")
    peaks = run.gather(memory.host_bytes()[1])
    return {"folder": str(named), "seconds": time.monotonic() - begun, "host_peak_bytes": peaks}


def _write_trained(state, buffers: dict, blueprint, folder: Path | None, dtype: torch.dtype) -> None:
    """What was trained: the model, or its adapters. Every rank calls it; one without a folder only gives its share."""
    rename, buffers = (lora.peft_name, {}) if blueprint.lora else (str, buffers)
    files = None
    if folder:
        announced = {rename(name): torch.empty(shape, dtype=dtype, device="meta") for name, shape in state.shapes.items()}
        announced |= {name: buffer.to("meta") for name, buffer in buffers.items()}
        files = WeightFiles(folder, announced, stem="adapter_model" if blueprint.lora else "model")
    for name, weight in state.whole_weights():
        if files:
            files.write(rename(name), weight)
    if files:
        for name, buffer in buffers.items():
            files.write(name, buffer)
        files.check_complete()


def _write_merged(state, blueprint, folder: Path | None, dtype: torch.dtype, run) -> None:
    """The whole model, its weights read again from where it came from, with the adapters added."""
    adapters = {name: weight.clone() if folder else None for name, weight in state.whole_weights()}
    if not folder:
        return
    model = blueprint.load(run, dtype="auto")  # only mapped
    whole = {lora.base_name(name): weight for name, weight in model.named_parameters() if name not in adapters}
    buffers = models.persistent_buffers(model)
    announced = {name: torch.empty(weight.shape, dtype=dtype, device="meta") for name, weight in whole.items()}
    files = WeightFiles(folder, announced | {name: buffer.to("meta") for name, buffer in buffers.items()})
    for name, weight in itertools.chain(lora.merged(model, adapters), buffers.items()):
        files.write(name, weight)
    files.check_complete()


def start_folder(folder: Path) -> Path:
    """An empty folder beside `folder`, to be given its name when all is written."""
    beside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def finish_folder(beside: Path, folder: Path) -> None:
    """Flush a finished folder to disk and give it its name; what had the name before is removed."""
    sync_tree(beside)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(beside, folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def describe(blueprint, folder: Path, dtype: torch.dtype | None = None, whole: bool = False) -> None:
    """Write all of a model but its weights: configuration, generation configuration and tokenizer; of adapters, theirs.

    Args:
        dtype: the weights' type, noted in the configuration; None leaves it as it is.
        whole: describe the model itself although it has adapters, which have been added to its weights.
    """
    folder.mkdir(exist_ok=True)
    blueprint.tokenizer.save_pretrained(folder)
    if blueprint.lora and not whole:
        blueprint.lora.describe(folder)
        return
    config = copy.deepcopy(blueprint.config)
    config.use_cache = True  # off for training only
    config.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    if dtype is not None:
        for name, value in models.as_dtype(dtype).items():
            setattr(config, name, value)
    config.save_pretrained(folder)
    try:
        blueprint.generation.save_pretrained(folder)
    except ValueError:  # older versions of transformers refuse to write what some models were published with
        write_text(folder / "generation_config.json", blueprint.generation.to_json_string())


def model_card(facts: dict, identity: dict) -> str:
    """README.md of an exported model, with the hub's metadata on top.

    Args:
        facts: results.json's keys, as far as they are known.
        identity: what the run was, see `checkpoint.identify`.
    """
    base, dataset = facts["model"], (facts.get("dataset") or {}).get("name")
    scratch = identity["told"].get("from_scratch") or base == EMBEDDED_MODEL
    hyperparameters = {**identity["soft"], **identity["told"], "from_scratch": scratch}
    adapters = identity["hard"] if "lora_r" in identity["hard"] and not facts.get("merged") else None
    metadata = ["---", f"library_name: {'peft' if adapters else 'transformers'}", "pipeline_tag: text-generation"]
    metadata += [f"base_model: {base}"] if not scratch and not is_local_model(base) else []
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
        f"# {Path(base).name}, {'trained' if scratch else 'fine-tuned'}" + (f" on {dataset}" if dataset else "")
        + (f": LoRA adapters, r {adapters['lora_r']}, alpha {adapters['lora_alpha']:g}" if adapters else ""),
        f"{facts['parameters']:,} parameters; {'random weights of the architecture of' if scratch else 'base model'} `{base}`. "
        f"Trained with `real_model_example.py --strategy {facts['strategy']}` on {facts['world_size']} {_devices(facts)}.",
        "## Results\n\n" + _table(results.items(), "Measured"),
        "## Training\n\n" + _table(hyperparameters.items(), "Hyperparameter"),
    ]
    if facts.get("dataset"):
        streamed = facts["dataset"].get("streaming")
        of = "its files' names, sizes, beginnings and ends, or of its commit," if streamed else "the corpus"
        parts.append(f"Data: {dataset}, SHA-256 of {of} `{facts['dataset'].get('sha256')}`.")
    if versions:
        parts.append(f"Versions: {versions}.")
    if facts.get("command"):
        parts.append(f"```bash\n{facts['command']}\n```")
    return "\n\n".join(parts) + "\n"


def _devices(facts: dict) -> str:
    if "hardware" not in facts:
        return "ranks"
    return f"× {facts['hardware']['gpu']}" if facts["hardware"]["gpu"] else "CPU processes"


def _table(rows: Iterable[tuple[str, object]], title: str) -> str:
    lines = [f"| {title} | Value |", "|---|---|"]
    for name, value in rows:
        if isinstance(value, float):
            value = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
        if value is not None:
            lines.append(f"| {name} | {value} |")
    return "\n".join(lines)
