"""Export the trained model as a folder that `AutoModelForCausalLM.from_pretrained` loads.

    config.json, generation_config.json, tokenizer files    by `ModelSpec.describe`
    model.safetensors                                       or several files and an index
    README.md                                               the model card

An export needs memory for one file of weights on rank 0, and none on the other ranks.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

import torch
from huggingface_hub import ModelCard, ModelCardData

from support.cli.arguments import Arguments
from support.cli.checks import is_local_model
from support.cluster.context import DTYPES, DistContext
from support.errors import FirstError, TrainingError, UserError
from support.files.atomic import finish_folder, start_folder, write_text
from support.files.safetensors_writer import FILE_BYTES, WeightFiles
from support.memory.system import host_bytes
from support.model import lora
from support.model.weights import persistent_buffers
from support.tables import EMBEDDED_MODEL, OPTIMIZERS
from support.train_state import unwrapped
from support.units import GB, perplexity_of

if TYPE_CHECKING:
    from support.checkpoints.manager import CheckpointManager


class Target:
    """Destination folder of an export, with its state at the start of the run.

    Args:
        named: the folder as the user wrote it.
        overwrite: replace whatever the folder contains at the end of the run.
        own: the folder contains an earlier export of the same run.
    """

    # The repository on the hub to which the export is pushed (rank 0), or None.
    repository: str | None = None

    def __init__(self, named: Path, overwrite: bool, own: bool):
        self.named, self.folder, self._overwrite = named, named.absolute(), overwrite
        self._seen = _identity(self.folder) if own else None

    @property
    def may_be_replaced(self) -> bool:
        """True with --overwrite, or if the folder is this run's earlier export, unchanged."""
        return self._overwrite or (self._seen is not None and _identity(self.folder) == self._seen)


def _identity(folder: Path) -> tuple | None:
    if not folder.is_dir():
        return None
    status = folder.lstat()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def target_of(args: Arguments, output_dir: Path, earlier: dict | None) -> Target:
    """Return the destination: --export_hf, or `hf` in the run's folder.

    Args:
        earlier: results.json of the run that --resume continues.
    """
    exported = (earlier or {}).get("export") or {}
    own = not args.export_hf or exported.get("folder") == args.export_hf
    return Target(Path(args.export_hf or output_dir / "hf"), args.overwrite, own)


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
    failed, folder = export_model(trained, target, args, model_card(facts, trained.identity))
    if failed:
        if checkpoint := trained.weights_kept(state):
            advice = (
                f"The trained weights are in {checkpoint}: `python scripts/convert_checkpoint.py "
                f"{checkpoint} --to hf FOLDER` exports them; so does the same run with --resume."
            )
        else:  # often because the same disk is full
            elsewhere = Path(gettempdir()) / f"distributed_training_export_{int(time.time())}"
            elsewhere = trained.ctx.broadcast_from_rank0(elsewhere)
            card, saved = model_card(facts, trained.identity), Target(elsewhere, False, False)
            lost, folder = export_model(trained, saved, args, card)
            advice = f"The trained weights are lost: {lost}" if lost else f"They are in {folder}."
        raise TrainingError(f"The export to {target.named} failed: {failed} {advice}")
    results.update(
        export={
            "folder": str(folder),
            "seconds": time.monotonic() - start,
            "host_peak_bytes": trained.ctx.all_gather(host_bytes()[1]),
        }
    )
    return folder


def export_model(
    trained: CheckpointManager, target: Target, args: Arguments, card: str
) -> tuple[str, Path]:
    """Write the model that a run has trained. Every rank calls this function.

    Returns:
        Why it could not be written, or ""; and the folder as the user wrote it, or a new one next
        to it if another run has written to that folder.
    """
    ctx, spec, dtype = trained.ctx, trained.spec, DTYPES[args.export_dtype]
    errors, final = FirstError(), target.folder
    temporary = errors.attempt(start_folder, target.folder) if ctx.is_main else None
    folder = temporary.path / "new" if temporary else None
    if temporary and folder:
        ctx.temporary.extend(temporary.paths)
        errors.attempt(spec.describe, folder, dtype, args.merge_lora)
    write = _write_merged if spec.lora and args.merge_lora else _write_trained
    write(trained, folder, dtype, errors)
    if temporary and folder:
        errors.attempt(write_text, folder / "README.md", card)
        final = errors.attempt(finish_folder, temporary, target.folder, target.may_be_replaced)
        temporary.remove()
    failed, final = ctx.broadcast_from_rank0((str(errors), final))
    if failed:
        return failed, target.named
    export_path = target.named
    if final != target.folder:
        export_path = export_path.with_name(final.name)
        ctx.console.warn(
            f"{target.named} holds another run's export, which is kept: "
            "use --overwrite to replace it."
        )
    ctx.console.print0(f"🤗 {export_path}")
    return "", export_path


def _write_trained(
    trained: CheckpointManager, folder: Path | None, dtype: torch.dtype, errors: FirstError
) -> None:
    """Write the trained weights, of the model or its adapters, on the rank that has a `folder`."""
    adapters = trained.spec.lora is not None
    buffers = {} if adapters else persistent_buffers(unwrapped(trained.model))
    stem = "adapter_model" if adapters else "model"
    names = {name: lora.peft_name(name) if adapters else name for name in trained.state.shapes}
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
    adapters = {
        name: weight.clone() if folder else None for name, weight in trained.state.whole_weights()
    }

    def write(folder: Path) -> None:
        # The frozen weights are read again from their files: memory-mapped, not copied.
        model = trained.spec.load(trained.ctx, dtype="auto")
        shapes = {
            lora.base_name(name): weight.shape
            for name, weight in model.named_parameters()
            if name not in adapters
        }
        files = WeightFiles(folder, shapes, dtype, persistent_buffers(model))
        for name, weight in lora.merged(model, adapters):
            files.write(name, weight)
        files.finish()

    if folder:
        errors.attempt(write, folder)


def check_room(
    args: Arguments, ctx: DistContext, target: Target, output_dir: Path, spec, saves: int
) -> None:
    """Check before training that the disks have room for the files that the run will write.

    Raises:
        UserError: the export, or one checkpoint together with the export, does not fit on its disk.
    """
    if not ctx.is_main or ctx.simulated:
        return
    weights = spec.trainable if spec.lora and not args.merge_lora else spec.parameters
    export = 0 if args.no_export or args.eval_only else weights * DTYPES[args.export_dtype].itemsize
    moments = 2 if OPTIMIZERS[args.optim].family == "adamw" else 0
    checkpoint = 4 * (1 + moments) * spec.trainable if saves else 0
    kept = min(saves, args.keep_last + 1) if args.keep_last else saves
    export_disk, run_disk = _disk(target.folder), _disk(output_dir)
    for disk in {export_disk, run_disk}:
        export_here = export if disk == export_disk else 0
        checkpoint_here = checkpoint if disk == run_disk else 0
        free = shutil.disk_usage(disk).free
        if (needed := export_here + checkpoint_here) > free:
            raise UserError(
                f"{disk} has {free / GB:.2f} GB free, and the export and a checkpoint of this run "
                f"need {needed / GB:.2f} GB there: free some space, or name another folder with "
                "--output_dir or --export_hf (--no_export skips the export)."
            )
        if (total := export_here + kept * checkpoint_here) > free:
            ctx.console.warn(
                f"{disk} has {free / GB:.2f} GB free, and all files that this run keeps there need "
                f"{total / GB:.2f} GB: --keep_last 2 keeps only the newest checkpoints."
            )


def _disk(folder: Path) -> Path:
    """Return the mount point of the disk that contains `folder`, or will contain it."""
    parents = (folder.absolute(), *folder.absolute().parents)
    return next(parent for parent in parents if parent.is_mount())


# ------------------------------------------------------------------------------------- model card

# Titles of the results, and their keys in results.json.
RESULTS = {
    "Training loss, first step": "train_loss_first",
    "Training loss, last step": "train_loss_last",
    "Evaluation loss": "eval_loss",
    "Perplexity": "perplexity",
    "Tokens seen": "tokens",
    "Optimizer steps": "steps",
    "Tokens per second": "tokens_per_second",
}
TEMPLATE = """---
{{ card_data }}
---

# {{ name }}, {{ "trained" if scratch else "fine-tuned" }}
{%- if dataset %} on {{ dataset.name }}{% endif %}
{%- if adapters %}: LoRA adapters, r {{ adapters.lora_r }}, alpha {{ "%g" % adapters.lora_alpha }}
{%- endif %}

{{ "{:,}".format(facts.parameters) }} parameters; {{ "random weights of the architecture of"
if scratch else "base model" }} `{{ facts.model }}`. Trained with
`real_model_example.py --strategy {{ facts.strategy }}` on {{ facts.world_size }} {{ devices }}.

## Results

{{ results }}

Benchmarks, in the folder with these files: `pip install lm-eval`, then

```bash
{{ lm_eval }}
```

## Training

{{ hyperparameters }}
{%- if dataset %}

Data: {{ dataset.name }}, SHA-256 `{{ dataset.sha256 }}`.
{%- endif %}
{%- if facts.versions %}

Versions: {% for name, number in facts.versions.items() %}{{ name }} {{ number }}
{{- "" if loop.last else ", " }}{% endfor %}.
{%- endif %}
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
        identity: the run signature, see compatibility.run_signature.
    """
    base, dataset = facts["model"], facts.get("dataset") or {}
    scratch = bool(identity["told"].get("from_scratch") or base == EMBEDDED_MODEL)
    hyperparameters = {**identity["soft"], **identity["told"], "from_scratch": scratch}
    has_adapters = "lora_r" in identity["hard"] and not facts.get("merged")
    gpu = (facts.get("hardware") or {}).get("gpu")
    model = f"pretrained={base},peft=." if has_adapters else "pretrained=."
    # The tasks of a model that was trained on conversations get its chat template.
    chat = " --apply_chat_template" if dataset.get("kind") == "chat" else ""
    card = ModelCard.from_template(
        ModelCardData(
            library_name="peft" if has_adapters else "transformers",
            pipeline_tag="text-generation",
            base_model=None if scratch or is_local_model(base) else base,
        ),
        template_str=TEMPLATE,
        name=Path(base).name,
        facts=facts,
        dataset=dataset,
        scratch=scratch,
        adapters=identity["hard"] if has_adapters else None,
        devices=f"× {gpu}" if gpu else "CPU processes" if "hardware" in facts else "ranks",
        results=_table(((title, facts.get(key)) for title, key in RESULTS.items()), "Measured"),
        hyperparameters=_table(hyperparameters.items(), "Hyperparameter"),
        lm_eval=f"lm_eval --model hf --model_args {shlex.quote(model)} "
        f"--tasks hellaswag,arc_easy,winogrande --batch_size auto{chat}",
    )
    return str(card)


def _table(rows: Iterable[tuple[str, object]], title: str) -> str:
    lines = [f"| {title} | Value |", "|---|---|"]
    for name, value in rows:
        if isinstance(value, float):
            value = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
        if value is not None:
            lines.append(f"| {name} | {value} |")
    return "\n".join(lines)
