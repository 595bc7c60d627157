"""The model card of an exported model: the README.md that the hub shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from support.cli.paths import is_local_model
from support.known_models import EMBEDDED_MODEL

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


def model_card(facts: dict, identity: dict) -> str:
    """Return the text of an exported model's README.md, which starts with the hub's metadata.

    Args:
        facts: the available keys of results.json; "merged", whether adapters were added to the
            model.
        identity: the run signature, see compatibility.run_signature.
    """
    base, dataset = facts["model"], (facts.get("dataset") or {}).get("name")
    scratch = identity["told"].get("from_scratch") or base == EMBEDDED_MODEL
    hyperparameters = {**identity["soft"], **identity["told"], "from_scratch": scratch}
    adapters = (
        identity["hard"] if "lora_r" in identity["hard"] and not facts.get("merged") else None
    )
    metadata = [
        "---",
        f"library_name: {'peft' if adapters else 'transformers'}",
        "pipeline_tag: text-generation",
    ]
    metadata += [f"base_model: {base}"] if not scratch and not is_local_model(base) else []
    metadata += ["---"]
    results = {title: facts.get(key) for title, key in RESULTS.items()}
    versions = ", ".join(
        f"{name} {number}" for name, number in (facts.get("versions") or {}).items()
    )
    parts = [
        "\n".join(metadata),
        f"# {Path(base).name}, {'trained' if scratch else 'fine-tuned'}"
        + (f" on {dataset}" if dataset else "")
        + (
            f": LoRA adapters, r {adapters['lora_r']}, alpha {adapters['lora_alpha']:g}"
            if adapters
            else ""
        ),
        f"{facts['parameters']:,} parameters; "
        f"{'random weights of the architecture of' if scratch else 'base model'} `{base}`. "
        f"Trained with `real_model_example.py --strategy {facts['strategy']}` "
        f"on {facts['world_size']} {_devices(facts)}.",
        "## Results\n\n" + _table(results.items(), "Measured"),
        "Benchmarks of [lm-evaluation-harness](https://github.com/EleutherAI/lm-evaluation-harness):"
        f"\n\n```bash\npip install lm-eval\n{_lm_eval(facts, bool(adapters))}\n```",
        "## Training\n\n" + _table(hyperparameters.items(), "Hyperparameter"),
    ]
    if facts.get("dataset"):
        streamed = facts["dataset"].get("streaming")
        hashed = (
            "its files' names, sizes, beginnings and ends, or of its commit,"
            if streamed
            else "the corpus"
        )
        parts.append(f"Data: {dataset}, SHA-256 of {hashed} `{facts['dataset'].get('sha256')}`.")
    if versions:
        parts.append(f"Versions: {versions}.")
    if facts.get("command"):
        parts.append(f"```bash\n{facts['command']}\n```")
    return "\n\n".join(parts) + "\n"


def card_of_repository(card: str, repository: str) -> str:
    """Return a model card whose `lm_eval` command names the repository instead of the folder."""
    return re.sub(r"\b(pretrained|peft)=\.(?='? --tasks )", rf"\1={repository}", card)


def _lm_eval(facts: dict, adapters: bool) -> str:
    """Return the command that evaluates the model in the current folder.

    The tasks of a model that was trained on conversations get its chat template.
    """
    model = f"{facts['model']},peft=." if adapters else "."
    is_chat = (facts.get("dataset") or {}).get("kind") == "chat"
    return (
        f"lm_eval --model hf --model_args {shlex.quote(f'pretrained={model}')} "
        "--tasks hellaswag,arc_easy,winogrande --batch_size auto"
        + (" --apply_chat_template" if is_chat else "")
    )


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
