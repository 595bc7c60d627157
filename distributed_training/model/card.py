"""The model card of an exported model, its README.md."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from distributed_training.cli.checks import is_local_model
from distributed_training.errors import redact
from distributed_training.known_models import EMBEDDED_MODEL

# Keys of results.json in the table of results.
RESULTS = """
    train_loss_first train_loss_last eval_loss perplexity bits_per_byte tokens steps
    tokens_per_second
""".split()
OF_ADAPTERS = ("lora_r", "lora_alpha", "lora_rslora", "lora_dora")  # entries of the run signature
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
        identity: the run signature, see signature.run_signature.
    """
    base, dataset = facts["model"], facts.get("dataset") or {}
    scratch = bool(identity["told"].get("from_scratch") or base == EMBEDDED_MODEL)
    adapters = "lora_r" in identity["hard"] and not facts.get("merged")
    settings = {**identity["soft"], **identity["told"], "from_scratch": scratch}
    settings |= {key: identity["hard"].get(key) or None for key in OF_ADAPTERS if adapters}
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
    return redact(str(card))


def _table(values: dict) -> str:
    lines = ["| | |", "|---|---|"]
    for name, value in values.items():
        if isinstance(value, float):
            value = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
        if value is not None:
            lines.append(f"| {name} | {value} |")
    return "\n".join(lines)
