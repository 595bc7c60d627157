"""Export the trained model as a folder that `AutoModelForCausalLM.from_pretrained` loads.

    config.json, generation_config.json, tokenizer files    by `ModelSpec.describe`
    model.safetensors                                       or several files and an index
    README.md                                               the model card

An export needs memory for one file of weights on rank 0, and none on the other ranks.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, NamedTuple

import torch
from huggingface_hub import ModelCard, ModelCardData

from support import console
from support.cli.arguments import Arguments
from support.cli.checks import is_local_model
from support.cluster.context import DTYPES
from support.errors import FirstError, TrainingError
from support.files.atomic import finish_folder, start_folder, write_text
from support.files.safetensors_writer import FILE_BYTES, WeightFiles
from support.memory.system import host_bytes
from support.model.weights import persistent_buffers
from support.tables import EMBEDDED_MODEL
from support.train_state import unwrapped
from support.units import perplexity_of

if TYPE_CHECKING:
    from support.checkpoints.manager import CheckpointManager


class Target(NamedTuple):
    """Destination folder of an export."""

    folder: Path
    replace: bool  # what the folder contains may be replaced; else a new name is used


def target_of(args: Arguments, output_dir: Path, earlier: dict | None) -> Target:
    """Return the destination: --export_hf, or `hf` in the run's folder.

    Args:
        earlier: results.json of the run that --resume continues.
    """
    exported = (earlier or {}).get("export") or {}
    own = not args.export_hf or exported.get("folder") == args.export_hf
    return Target(Path(args.export_hf or output_dir / "hf"), args.overwrite or own)


def finish(
    trained: CheckpointManager, results, target: Target, args: Arguments, state
) -> Path | None:
    """Export the trained model, unless the flags exclude it or a complete run has exported it.

    Args:
        state: the run's TrainState; None for a run that was complete before it was resumed.
    Returns:
        The folder with the exported model; None if the flags exclude it.
    Raises:
        TrainingError: the export failed; the message names the checkpoint with the weights.
    """
    if args.no_export or args.eval_only:
        return None
    if trained.ctx.broadcast_from_rank0(
        results.was_complete and not args.export_hf and target.folder.exists()
    ):
        return target.folder
    facts = {**results.facts, "merged": args.merge_lora}
    if trained.best_is_loaded:
        loss = facts["best_eval_loss"]
        facts |= {"eval_loss": loss, "perplexity": perplexity_of(loss)}
        facts |= {"steps": facts["best_step"], "train_loss_last": None, "tokens": None}
    start = time.monotonic()
    card = model_card(facts, trained.identity)
    failed, folder = export_model(trained, target, args, card)
    if failed:
        if checkpoint := trained.weights_kept(state):
            advice = (
                f"The trained weights are in {checkpoint}: `python scripts/convert_checkpoint.py "
                f"{checkpoint} --to hf FOLDER` exports them; so does the same run with --resume."
            )
        else:  # often because the same disk is full
            elsewhere = Path(gettempdir()) / f"distributed_training_export_{int(time.time())}"
            elsewhere = trained.ctx.broadcast_from_rank0(elsewhere)
            lost, folder = export_model(trained, Target(elsewhere, False), args, card)
            advice = f"The trained weights are lost: {lost}" if lost else f"They are in {folder}."
        raise TrainingError(f"The export to {target.folder} failed: {failed} {advice}")
    results.facts["export"] = {
        "folder": str(folder),
        "seconds": time.monotonic() - start,
        "host_peak_bytes": trained.ctx.all_gather(host_bytes()[1]),
    }
    return folder


def export_model(
    trained: CheckpointManager, target: Target, args: Arguments, card: str
) -> tuple[str, Path]:
    """Write the model that a run has trained. Every rank calls this function.

    Returns:
        Why it could not be written, or ""; and its folder: the target, or a new one next to it if
        another run has written to the target.
    """
    ctx, spec, dtype = trained.ctx, trained.spec, DTYPES[args.export_dtype]
    errors, final = FirstError(), target.folder
    temporary = errors.attempt(start_folder, target.folder) if ctx.is_main else None
    folder = temporary.path / "new" if temporary else None
    if temporary and folder:
        errors.attempt(spec.describe, folder, dtype, args.merge_lora)
    if spec.lora and args.merge_lora:
        _write_merged(trained, folder, dtype, errors)
    else:
        _write_trained(trained, folder, dtype, errors)
    if temporary and folder:
        errors.attempt(write_text, folder / "README.md", card)
        final = errors.attempt(finish_folder, temporary, target.folder, target.replace)
        temporary.remove()
    failed, final = ctx.broadcast_from_rank0((str(errors), final))
    if failed:
        return failed, target.folder
    if final != target.folder:
        console.warn(f"{target.folder} exists, and is kept: --overwrite replaces it.")
    console.print0(f"🤗 {final}")
    return "", final


def _write_trained(
    trained: CheckpointManager, folder: Path | None, dtype: torch.dtype, errors: FirstError
) -> None:
    """Write the trained weights, of the model or its adapters, on the rank that has a `folder`."""
    names, buffers, stem = {name: name for name in trained.state.shapes}, {}, "model"
    if trained.spec.lora:
        from support.model.lora import peft_name

        names, stem = {name: peft_name(name) for name in names}, "adapter_model"
    else:
        buffers = persistent_buffers(unwrapped(trained.model))
    shapes = {names[name]: shape for name, shape in trained.state.shapes.items()}
    files = None
    if folder:
        files = errors.attempt(WeightFiles, folder, shapes, dtype, buffers, FILE_BYTES, stem)
    for name, weight in trained.state.whole_weights():
        if files:
            errors.attempt(files.write, names[name], weight)
    if files:
        errors.attempt(files.finish)


def _write_merged(
    trained: CheckpointManager, folder: Path | None, dtype: torch.dtype, errors: FirstError
) -> None:
    """Write the whole model with the adapters added, on the rank that has a `folder`."""
    from support.model.lora import base_name, merged

    adapters = {
        name: weight.clone() if folder else None for name, weight in trained.state.whole_weights()
    }

    def write(folder: Path) -> None:
        # The frozen weights are read again from their files: memory-mapped, not copied.
        model = trained.spec.load(trained.ctx, dtype="auto")
        frozen = {n: p.shape for n, p in model.named_parameters() if n not in adapters}
        shapes = {base_name(name): shape for name, shape in frozen.items()}
        files = WeightFiles(folder, shapes, dtype, persistent_buffers(model))
        for name, weight in merged(model, adapters):
            files.write(name, weight)
        files.finish()

    if folder:
        errors.attempt(write, folder)


# ------------------------------------------------------------------------------------- model card

# Keys of results.json in the table of results.
RESULTS = """
    train_loss_first train_loss_last eval_loss perplexity tokens steps tokens_per_second
""".split()
TEMPLATE = """---
{{ card_data }}
---

# {{ title }}

{{ "{:,}".format(facts.parameters) }} parameters; {{ kind }} `{{ facts.model }}`. Trained with
`real_model_example.py --strategy {{ facts.strategy }}` on {{ facts.world_size }} ranks.

## Results

{{ results }}

## Training

{{ settings }}
{%- if facts.command %}

```bash
{{ facts.command }}
```
{%- endif %}
"""


def model_card(facts: dict, identity: dict) -> str:
    """Return the text of an exported model's README.md, which starts with the hub's metadata.

    Args:
        facts: the available keys of results.json; "merged", whether adapters were merged.
        identity: the run signature, see find.run_signature.
    """
    base, dataset = facts["model"], facts.get("dataset") or {}
    scratch = bool(identity["told"].get("from_scratch") or base == EMBEDDED_MODEL)
    adapters = "lora_r" in identity["hard"] and not facts.get("merged")
    settings = {**identity["soft"], **identity["told"], "from_scratch": scratch}
    settings |= {key: identity["hard"][key] for key in ("lora_r", "lora_alpha") if adapters}
    settings |= {"sha256 of the data": dataset.get("sha256"), **(facts.get("versions") or {})}
    title = f"{Path(base).name}, {'trained' if scratch else 'fine-tuned'}"
    card = ModelCard.from_template(
        ModelCardData(
            library_name="peft" if adapters else "transformers",
            pipeline_tag="text-generation",
            base_model=None if scratch or is_local_model(base) else base,
        ),
        template_str=TEMPLATE,
        title=title + (f" on {dataset['name']}" if dataset else ""),
        kind="LoRA adapters of" if adapters else "random weights of" if scratch else "base model",
        facts=facts,
        results=_table({key: facts.get(key) for key in RESULTS}),
        settings=_table(settings),
    )
    return str(card)


def _table(values: dict) -> str:
    lines = ["| | |", "|---|---|"]
    for name, value in values.items():
        if isinstance(value, float):
            value = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
        if value is not None:
            lines.append(f"| {name} | {value} |")
    return "\n".join(lines)
