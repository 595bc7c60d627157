"""What else differs between two runs, and what each difference can change."""

from typing import NamedTuple

from distributed_training.files.user_files import shown

# Entries of the run signature that have another name here, because a flag has theirs.
SIGNATURE_NAMES = {
    "dataset": "data digest",
    "blocks": "sequences",
    "validation": "validation digest",
    "tokens_sha256": "token digest",
    "validation_tokens_sha256": "validation token digest",
    "document_start": "tokens that begin a document",
    "rendered_template": "rendered template",
    "fsdp_reduce_dtype": "reduce_dtype",  # of earlier versions
}
# Not recorded by earlier versions: a difference counts only if both runs have them.
RECORDED_LATER = ("token digest", "validation token digest", "rendered template")
RATE, ROUNDING, EVALUATIONS = "the learning rate", "rounding", "evaluations"
# What a difference can change, and the facts that change it: flags, entries of the run signature,
# and keys of results.json. Of several causes the first in this table are named first.
EFFECTS = {
    "the model": """parameters, shapes, lora_r, lora_alpha, lora_targets, lora_rslora,
        lora_dora, load_in_4bit, model, model_revision, from_scratch, frozen weights""",
    "the tokens": """tokenizer, template, chat_template, train_on, data digest, token digest,
        rendered template, tokens that begin a document""",
    "the order of the data": """seed, sequences, num_samples, validation_split,
        validation_split_percentage, streaming, shuffle_buffer""",
    "the sequences": "seq_length, packing, isolate_documents, global batch",
    "the dropped elements": "dropout, lora_dropout",
    RATE: """lr, lr_scheduler, warmup_steps, warmup_ratio, decay_ratio, decay_type, min_lr_ratio,
        epochs, max_steps""",
    "the updates": """skip_steps, optim, adam_beta1, adam_beta2, adam_epsilon, weight_decay,
        max_grad_norm, ds_config, fsdp_config""",
    ROUNDING: """strategy, precision, reduce_dtype, ranks, batch_size,
        gradient_accumulation_steps, rank_shares, device, fused_gelu, compile, deterministic,
        gradient_checkpointing, backend, tf32, gpu, cpu, cores, torch version,
        deepspeed version, transformers version, numpy version, peft version, cuda version,
        rocm version, code_digest, resume, resume_force""",
    EVALUATIONS: """validation digest, validation token digest, eval, eval_first, eval_only,
        eval_every, eval_samples, eval_batch_size, eval_split, validation_file,
        early_stopping_patience, load_best_at_end""",
}
EFFECT_OF = {name.strip(): key for key, names in EFFECTS.items() for name in names.split(",")}


class Difference(NamedTuple):
    """A fact that differs between two runs; None: not set, or not known."""

    name: str
    a: object
    b: object
    changes: str  # a key of EFFECTS
    first_step: int  # the first step whose loss it can change

    @property
    def values(self) -> list[str]:
        return ["—" if value is None else shown(value, 16) for value in (self.a, self.b)]

    def __str__(self) -> str:
        return f"{self.name} ({' and '.join(self.values)})"


def facts_of(results: dict) -> dict[str, object]:
    """Return what results.json says about a run besides its losses, by the names of EFFECTS."""
    dataset = results.get("dataset") or {}
    facts = results | {"ranks": results.get("world_size")}
    facts |= {"data digest": dataset.get("sha256"), **(results.get("flags") or {})}
    for entries in (results.get("run_signature") or {}).values():
        facts |= {SIGNATURE_NAMES.get(key, key): value for key, value in entries.items()}
    facts |= results.get("hardware") or {}
    facts |= {f"{name} version": value for name, value in (results.get("versions") or {}).items()}
    # What is off or unset is not among the flags that a run recorded.
    known = {name: facts.get(name) for name in EFFECT_OF}
    return {name: v for name, v in known.items() if v is not None and v is not False}


def differences_of(results: dict, others: dict, rate_step: int) -> list[Difference]:
    """Return the facts that differ between two runs and can change a loss or an evaluation.

    Args:
        results, others: results.json of the runs.
        rate_step: the first step with another learning rate; 0 if there is none.
    """
    a, b = facts_of(results), facts_of(others)
    # A run that failed early recorded no flags or no run signature.
    complete = all(run.get("flags") and run.get("run_signature") for run in (results, others))
    found = []
    for name in EFFECT_OF if complete else a.keys() & b.keys():
        changes = EFFECT_OF[name]
        if name in RECORDED_LATER and not (name in a and name in b):
            continue
        if a.get(name) != b.get(name) and (rate_step or changes != RATE):
            # The update of a step changes the loss of the next one.
            first_step = 1 + {"the updates": 1, RATE: rate_step}.get(changes, 0)
            found.append(Difference(name, a.get(name), b.get(name), changes, first_step))
    if rate_step and not any(difference.changes == RATE for difference in found):
        # The flags are equal: a run was resumed after another schedule, or the code has a fault.
        found.append(
            Difference("a schedule that no flag explains", None, None, RATE, 1 + rate_step)
        )
    return found


def causes_of(differences: list[Difference], of: str, latest: int) -> list[Difference]:
    """Return the differences that explain another loss at a step, the most likely first.

    What can change step 1 would have been seen there: so those come first whose effect begins last.

    Args:
        of: "loss" or "eval_loss".
        latest: the step.
    """
    possible = {EVALUATIONS} if of == "eval_loss" else EFFECTS.keys() - {ROUNDING, EVALUATIONS}
    found = [d for d in differences if d.changes in possible and d.first_step <= latest]
    return sorted(found, key=lambda difference: -difference.first_step)
