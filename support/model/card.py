"""The model card of an exported model: the README.md that the hub shows."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

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

Benchmarks of [lm-evaluation-harness](https://github.com/EleutherAI/lm-evaluation-harness), in the
folder with these files:

```bash
pip install lm-eval
{{ lm_eval }}
```

## Training

{{ hyperparameters }}
{%- if dataset %}

Data: {{ dataset.name }}, SHA-256 of {{ "its files' names, sizes, beginnings and ends, or of its \
commit," if dataset.streaming else "the corpus" }} `{{ dataset.sha256 }}`.
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
        facts: the available keys of results.json; "merged", whether adapters were added to the
            model.
        identity: the run signature, see compatibility.run_signature.
    """
    base = facts["model"]
    scratch = bool(identity["told"].get("from_scratch") or base == EMBEDDED_MODEL)
    hyperparameters = {**identity["soft"], **identity["told"], "from_scratch": scratch}
    has_adapters = "lora_r" in identity["hard"] and not facts.get("merged")
    metadata = ModelCardData(
        library_name="peft" if has_adapters else "transformers",
        pipeline_tag="text-generation",
        base_model=None if scratch or is_local_model(base) else base,
    )
    gpu = (facts.get("hardware") or {}).get("gpu")
    devices = f"× {gpu}" if gpu else "CPU processes" if "hardware" in facts else "ranks"
    card = ModelCard.from_template(
        metadata,
        template_str=TEMPLATE,
        name=Path(base).name,
        facts=facts,
        dataset=facts.get("dataset"),
        scratch=scratch,
        adapters=identity["hard"] if has_adapters else None,
        devices=devices,
        results=_table(((title, facts.get(key)) for title, key in RESULTS.items()), "Measured"),
        hyperparameters=_table(hyperparameters.items(), "Hyperparameter"),
        lm_eval=_lm_eval(facts, has_adapters),
    )
    return str(card)


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


def _table(rows: Iterable[tuple[str, object]], title: str) -> str:
    lines = [f"| {title} | Value |", "|---|---|"]
    for name, value in rows:
        if isinstance(value, float):
            value = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
        if value is not None:
            lines.append(f"| {name} | {value} |")
    return "\n".join(lines)
