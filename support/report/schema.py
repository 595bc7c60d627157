"""The keys of results.json and metrics.jsonl: types, units and meanings.

docs/OUTPUTS.md has tables of them (scripts/generate_docs.py), and tests/helpers/schema_check.py
compares them with the files that the runs of the tests write.

A line of a table below is `name | type, unit | meaning`. A question mark after the name: the key
may be missing. `owner.name` is a key of the object `owner`. A type is int, number, text, bool, any,
object, "list of TYPE", "map to TYPE" (an object with any keys), or "TYPE or null".
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Key:
    """A key of an object in one of the files."""

    name: str  # this and the following: see above
    type: str
    unit: str  # "" for a value without one
    meaning: str
    optional: bool = False  # the key may be missing
    keys: tuple[Key, ...] = ()  # of the object, or of each object in a list or map


def _keys(table: str, **nested: tuple[Key, ...]) -> tuple[Key, ...]:
    """Parse a table; a line that is indented continues the one before it.

    Args:
        nested: the keys of objects that are not in the table, by the name of their key.
    """
    keys: dict[str, Key] = {}
    for line in table.replace("\n        ", " ").strip().splitlines():
        name, kind, meaning = (cell.strip() for cell in line.split("|"))
        kind, _, unit = kind.partition(", ")
        owner, _, name = name.rpartition(".")
        optional, name = name.endswith("?"), name.rstrip("?")
        key = Key(name, kind, unit, meaning, optional, nested.get(name, ()))
        if owner:
            keys[owner] = replace(keys[owner], keys=(*keys[owner].keys, key))
        else:
            keys[name] = key
    return tuple(keys.values())


def _alike(names: str, kind: str, unit: str = "") -> tuple[Key, ...]:
    """Return keys of the same type, whose names say what they mean."""
    return tuple(Key(name, kind, unit, "") for name in names.split())


_ONE_DATASET = _keys(
    """
    name | text | `--dataset`
    sha256 | text or null | of the text; of a stream, of the files' names, sizes, beginnings and
        ends, or of the commit on the hub
    tokens | int or null, tokens | of the training text; null for a stream
    blocks | int or null, sequences | sequences in an epoch; null for a stream
    kind? | text or null | of the rows: text, pair, chat or mixed
    formats? | list of text | names of the rows' formats
    rows? | int | rows of the training text; of a stream, rows read in all passes
    truncated? | int | examples that are cut to `--seq_length`
    skipped? | int | rows that are not used
    bad_rows? | list of text | a line with the reason for each row that cannot be used
    padding_share? | number | padding in the first epoch; of conversations and pairs only
    streaming? | bool | true for a stream
    weight? | text or null | of one of several datasets, as given
    blocks_per_epoch? | int, sequences | of one of several datasets
    validation? | object | the same of the validation data; only `blocks` for a share that was held
        out
    """
)
_VALIDATION = tuple(
    replace(key, optional=key.name != "blocks")
    for key in _ONE_DATASET
    if key.name not in ("name", "streaming", "weight", "blocks_per_epoch", "validation")
)
_ENTRY = (*_ONE_DATASET[:-1], replace(_ONE_DATASET[-1], keys=_VALIDATION))
DATASET = (
    *_ENTRY,
    Key("datasets", "list of object", "", "of several: one entry each", True, _ENTRY),
)
PHASES = _alike("data forward backward update", "number", "s")
CATEGORIES = _keys(
    """
    parameters | int | working copy
    gradients | int |
    optimizer | int | fp32 masters and Adam's moments
    buffers | int | of the model, and communication buckets
    other | int | staging and swap buffers, the batch
    activations | int or null | with autocast's 16-bit copies of the weights
    logits | int or null | what the loss keeps: gradients of the output layer
    """
)
OF_PHASE = _alike(
    "device_allocated device_reserved device_peak host_resident host_peak",
    "list of (int or null)",
    "bytes",
)
PLACEMENT = _alike("parameters gradients optimizer", "text")
MEMORY = _keys(
    """
    allocated_bytes | list of int, bytes | by PyTorch's allocator at the end of the run; on a CPU,
        resident memory
    reserved_bytes | list of (int or null), bytes | by the allocator; null on a CPU
    peak_bytes | list of int, bytes | peak of `allocated_bytes`
    host_peak_bytes | list of int, bytes | peak resident memory of each process, with mapped pages
        of the weights file, which the kernel may drop
    pinned_bytes | list of int, bytes | host memory that is page-locked for a GPU
    nvme_bytes | int, bytes | infinity's files on all nodes
    nvme_written_bytes_per_step | int, bytes | in the measured step
    device_used | list of (object or null), bytes | according to the GPU's driver; null on a CPU
    device_used.used | int, bytes | by all processes
    device_used.total | int, bytes | size of the GPU's memory
    device_used.unseen | int, bytes | outside of PyTorch's allocator: CUDA context, NCCL
    categories_bytes | object or null, bytes | live tensors of rank 0 at the end of backward of the
        measured step, without state on NVMe. `activations` and `logits` are what the last forward
        pass keeps for backward; null on a CPU without `--profile_memory`
    categories_bytes_by_rank | list of (object or null) | of all ranks
    device_categories_bytes_by_rank | list of (object or null), bytes | the part on the device; on a
        CPU, what the strategy would keep on a GPU
    moments_bytes | int or null, bytes | Adam's moments, a part of `optimizer`
    placement | object or null | where the states are between steps: device, host or nvme
    phases_bytes | map to object, bytes | after each phase (libraries_imported, model_loaded,
        wrapped; forward, backward and optimizer_step of the first step; trained); `device_peak` is
        since the phase before
    step_bytes_by_rank | list of (map to object or null), bytes | of the measured step, by phase:
        live tensors at its end, and their peak; null on a CPU without `--profile_memory`
    step_bytes_by_rank.live | int, bytes | at the end of the phase
    step_bytes_by_rank.peak | int, bytes | within the phase
    predicted_bytes | map to int or null, bytes | the memory estimate of this run; null if it does
        not support the architecture
    """,
    categories_bytes=CATEGORIES,
    categories_bytes_by_rank=CATEGORIES,
    device_categories_bytes_by_rank=CATEGORIES,
    placement=PLACEMENT,
    phases_bytes=OF_PHASE,
)

# Keys of results.json, by the time at which a run knows them. A run that failed has those of the
# times that it reached.
AT_START = _keys(
    """
    schema_version | int | 1
    status | text | running, completed, preempted, failed or oom
    reason | text or null | why a run was preempted, failed or ran out of memory
    error_kind | text or null | usage, missing_requirement, training or out_of_memory
    started_at | text | time of the start, UTC
    command | text | command line of the process, without its launcher
    flags | map to any | as `--print_config` prints them: without those that are off or unset
    code_digest | text | first 12 digits of the SHA-256 of this project's code
    versions | map to text | Python, CUDA and the libraries that the numbers depend on
    hardware | object | of rank 0
    hardware.host | text | name of rank 0's machine
    hardware.cpu | text | processor
    hardware.cores | int | that the process may use
    hardware.ram_bytes | int, bytes | host memory
    hardware.gpu | text or null | name of the GPU
    hardware.gpu_memory_bytes | int or null, bytes | memory of the GPU
    strategy | text | `--strategy`
    model | text | `--model`
    world_size | int | number of ranks
    simulated_world_size | int or null | number of ranks of a memory simulation
    device | text | cuda or cpu
    backend | text | nccl, gloo, or fake for a memory simulation
    launcher | text | python, torchrun (also of accelerate), deepspeed or srun
    precision | text | fp32, bf16 or fp16
    batch_size | int, sequences | of a rank in a micro-batch; as used with `--auto_micro_batch`
    gradient_accumulation_steps | int | micro-batches of an optimizer step; as used, too
    gradient_checkpointing | bool | whether backward computes the forward pass again
    global_batch_size | int, sequences | of all ranks in an optimizer step
    seed | int | `--seed`
    """
)
AFTER_LOADING = _keys(
    """
    parameters | int | number in the whole model, with adapters; tied weights count once
    trainable_parameters | int | number of those that are trained
    seq_length | int, tokens | length of a sequence
    dataset | object | see below
    """,
    dataset=DATASET,
)
BEFORE_TRAINING = _keys(
    """
    run_signature | object | what `--resume` compares
    run_signature.hard | map to any | must match
    run_signature.soft | map to any | should match, else `--resume_force` is needed
    run_signature.told | map to any | informational
    """
)
AFTER_TRAINING = _keys(
    """
    steps | int | optimizer steps, with those before a resume
    samples | int, sequences | trained on, over all ranks
    tokens | int, tokens | trained on, without padding
    training_seconds | number, s | time in steps, with those before a resume
    train_loss_first | number or null | loss of the first step
    train_loss_last | number or null | loss of the last step
    """
)
AT_END = _keys(
    """
    eval_loss | number or null | loss of the last evaluation: mean over the valid tokens
    perplexity | number or null | exp(`eval_loss`)
    best_eval_loss | number or null | loss of the best evaluation after the start of training; with
        `--load_best_at_end` that of the exported model
    best_step | int or null | step of the best evaluation
    stopped_early | int or null | `--early_stopping_patience`, if it ended the run
    seconds_to_first_step | number or null, s | from the start of the process to the end of the step
    communication_bytes_per_step | number or null, bytes | what a rank sends with ring algorithms:
        (N−1)/N of the tensor for an all-gather or a reduce-scatter, twice that for an all-reduce;
        median over the steps, mean over the ranks
    communication_per_step | map to object or null | the same of rank 0, by collective and type
        ("all_reduce float32")
    communication_per_step.calls | number | in a step
    communication_per_step.message_bytes | number, bytes | of the whole tensors
    communication_per_step.sent_bytes | number, bytes | sent by the rank
    step_seconds | object or null, s | duration of a step, from the end of an update to the next
    step_seconds.median | number, s |
    step_seconds.p10 | number, s | the tenth percentile
    step_seconds.p90 | number, s | the ninetieth percentile
    step_phases_seconds | object or null, s | mean durations; `data` includes logging and the
        progress bar. DeepSpeed and DDP communicate in `backward`, FSDP and ZeRO-3 also in `forward`
    samples_per_second | number or null, sequences/s | of all ranks, without the first steps, saves
        and evaluations
    tokens_per_second | number or null, tokens/s | the same in tokens, without padding
    tokens_per_second_per_gpu | number or null, tokens/s | divided by the number of ranks
    mfu | number or null | share of the peak FLOP/s, with 6N + 12·layers·width·length FLOP per token
        (PaLM, arXiv 2204.02311, appendix B; 4 instead of 6 for frozen parameters). In fp32 the peak
        is that of TF32 if the GPU has it. null if the peak is not known
    warmup_steps_excluded | int | first steps that speed and times exclude: a quarter, at most 5
    memory | object | see below
    checkpoint_seconds | list of number, s | that training waited for each save of this process;
        part of no step
    """,
    step_phases_seconds=PHASES,
    memory=MEMORY,
)
IF_REQUESTED = _keys(
    """
    export? | object | the trained model; missing with `--no_export`
    export.folder | text | where it is
    export.seconds | number, s | duration of the export
    export.host_peak_bytes | list of int, bytes | of each process after the export
    sample? | text | what `--generate` produced; of a chat model, the answer
    push? | object | where `--push_to_hub` put the model
    push.repository | text | on the hub
    push.commit | text | of the upload
    """
)
BEFORE_END = AFTER_LOADING + BEFORE_TRAINING + AFTER_TRAINING
RESULTS = AT_START + BEFORE_END + AT_END + IF_REQUESTED

# Keys of metrics.jsonl: of an optimizer step, and of an evaluation.
STEP = _keys(
    """
    step | int | number of the optimizer step, from 1
    epoch | int | from 1
    loss | number | mean over all valid tokens of the global batch
    lr | number | learning rate of this step
    grad_norm | number or null | of the whole gradient before clipping
    tokens_per_second | number or null, tokens/s | of all ranks
    seconds | number, s | duration of the step
    """
)
EVALUATION = _keys(
    """
    step | int | steps before the evaluation
    eval_loss | number or null | mean over the valid tokens
    perplexity | number or null | exp(`eval_loss`)
    """
)
