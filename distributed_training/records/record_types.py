"""The types of the values in a record of metrics.jsonl, or of Trainer's log_history."""

from distributed_training.files.json_types import (
    either,
    is_count,
    is_number,
    is_text,
    list_of,
    optional,
    record,
)

# A number may be null, and of Trainer NaN or infinite.
NUMBER = optional(either(is_number, lambda value: isinstance(value, float)))
NUMBERS = """
    loss lr learning_rate grad_norm tokens_per_second seconds epoch eval_loss perplexity
    bits_per_byte
    """.split()
is_record = record(
    {"step": is_count},
    generated=list_of(record({"prompt": is_text, "text": is_text})),
    rank_sequences=list_of(is_count),
    **dict.fromkeys(NUMBERS, NUMBER),
)
