"""The message about a model whose weights are quantized. Only a run that is refused imports it."""

from distributed_training.errors import UserError


def refusal(what: str, found: object) -> UserError:
    """Return the error for quantized weights, for which a layer has other tensors than a weight.

    Args:
        what: what the user has given, for messages (--model NAME).
        found: `quantization_config` of a config.json, or a text that says how they are quantized.
    """
    if isinstance(found, dict):
        found = found.get("quant_method") or "quantization_config in config.json"
    return UserError(
        f"{what}: its weights are quantized ({found}), and cannot be trained, sharded or exported: "
        "name the model that they were made from, in bf16 or fp32. --lora_r 16 --load_in_4bit "
        "trains adapters on it with its weights in 4 bits (QLoRA)."
    )
