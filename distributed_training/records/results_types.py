"""The types of the keys of results.json that comparisons and pages read."""

from typing import TypedDict

from distributed_training.files.checked_types import Count, Number, Simple, wrong_place
from distributed_training.files.json_types import JsonObject

Bytes = dict[str, Number | None] | None  # by kind


class _Calls(TypedDict):
    calls: Number
    sent_bytes: Number


class Collective(_Calls, total=False):
    """The calls of a collective in one step."""

    message_bytes: Number


class Hardware(TypedDict):
    """The machine of a run."""

    cpu: str
    cores: Number
    gpu: str | None
    ram_bytes: Number


class Memory(TypedDict, total=False):
    """Measured and planned memory."""

    predicted_bytes: Bytes
    nvme_bytes: Number | None
    categories_bytes_by_rank: list[Bytes]
    device_categories_bytes_by_rank: list[Bytes]
    peak_bytes: list[Number | None]
    host_peak_bytes: list[Number | None]


class Generated(TypedDict):
    """A text that the model has generated."""

    prompt: str
    text: str


class Results(TypedDict, total=False):
    """The content of results.json; docs/OUTPUTS.md describes the keys. Each may be null."""

    status: str | None
    reason: str | None
    error_kind: str | None
    strategy: str | None
    model: str | None
    device: str | None
    precision: str | None
    started_at: str | None
    command: str | None
    sample: str | None
    parameters: Count | None
    world_size: Count | None
    global_batch_size: Count | None
    seq_length: Count | None
    steps: Count | None
    tokens: Count | None
    train_loss_first: Number | None
    train_loss_last: Number | None
    eval_loss: Number | None
    perplexity: Number | None
    bits_per_byte: Number | None
    tokens_per_second: Number | None
    mfu: Number | None
    training_seconds: Number | None
    samples_per_second: Number | None
    tokens_per_second_per_gpu: Number | None
    simulated_world_size: Number | None
    seed: Number | None
    communication_per_step: dict[str, Collective] | None
    step_phases_seconds: dict[str, Number] | None
    skipped_steps: list[Count] | None
    memory: Memory | None
    tf32: bool | None
    versions: dict[str, str] | None
    flags: dict[str, Simple | list[Simple] | None] | None
    run_signature: dict[str, dict[str, Simple | list[Simple] | None]] | None
    generated: list[Generated] | None
    hardware: Hardware | None
    dataset: dict[str, object] | None
    export: dict[str, object] | None
    push: dict[str, object] | None


def wrong_key(results: JsonObject) -> str:
    """Return a key of results.json whose value has another type; "" if there is none."""
    return wrong_place(results, Results)
