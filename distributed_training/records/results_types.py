"""The types of the keys of results.json that comparisons and pages read."""

from distributed_training.files.json_types import (
    Check,
    JsonObject,
    anything,
    dict_of,
    either,
    is_count,
    is_number,
    is_switch,
    is_text,
    list_of,
    optional,
    record,
)

PHASES = ("data", "forward", "backward", "update")  # of an optimizer step
SIMPLE = either(is_switch, is_number, is_text)
COLLECTIVE = record({"calls": is_number, "sent_bytes": is_number}, message_bytes=is_number)
HARDWARE = record(
    {"cpu": is_text, "cores": is_number, "gpu": optional(is_text), "ram_bytes": is_number}
)
BYTES = optional(dict_of(optional(is_number)))
MEMORY = record(
    {},
    predicted_bytes=BYTES,
    nvme_bytes=optional(is_number),
    **dict.fromkeys(
        ("categories_bytes_by_rank", "device_categories_bytes_by_rank"), list_of(BYTES)
    ),
    **dict.fromkeys(("peak_bytes", "host_peak_bytes"), list_of(optional(is_number))),
)
TEXTS = "status reason error_kind strategy model device precision started_at command sample".split()
COUNTS = "parameters world_size global_batch_size seq_length steps tokens".split()
NUMBERS = """
    train_loss_first train_loss_last eval_loss perplexity bits_per_byte tokens_per_second mfu
    training_seconds samples_per_second tokens_per_second_per_gpu simulated_world_size seed
    """.split()
TYPES: dict[str, Check] = {
    **dict.fromkeys(TEXTS, is_text),
    **dict.fromkeys(COUNTS, is_count),
    **dict.fromkeys(NUMBERS, is_number),
    "communication_per_step": dict_of(COLLECTIVE),
    "step_phases_seconds": dict_of(is_number),
    "skipped_steps": list_of(is_count),
    "memory": MEMORY,
    "tf32": is_switch,
    "versions": dict_of(is_text),
    "flags": dict_of(either(optional(SIMPLE), list_of(SIMPLE))),
    "run_signature": dict_of(dict_of(optional(SIMPLE))),
    "generated": list_of(record({"prompt": is_text, "text": is_text})),
    "hardware": HARDWARE,
    **dict.fromkeys(("dataset", "export", "push"), dict_of(anything)),
}


def wrong_key(results: JsonObject) -> str:
    """Return a key of results.json whose value has another type; "" if there is none."""
    for key, check in TYPES.items():
        if results.get(key) is not None and not check(results[key]):
            return key
    return ""
