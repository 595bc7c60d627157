"""What else differs between two runs, and what each difference can change."""

from typing import NamedTuple

from distributed_training.files.user_files import shown
from distributed_training.settings.fields import (
    DROPPED,
    EVALUATIONS,
    MODEL,
    ORDER,
    RATE,
    ROUNDING,
    SEQUENCES,
    TOKENS,
    UPDATES,
)
from distributed_training.settings.settings import FACTS

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
RECORDED_LATER = (
    "token digest",
    "validation token digest",
    "rendered template",
    "frozen weights digest",
    "commit of the frozen weights",
    "evaluated sequences",
)
# What other facts of a run can change: entries of the run signature, and keys of results.json.
OTHER_FACTS = {
    MODEL: """parameters, shapes, frozen weights, frozen weights digest,
        commit of the frozen weights""",
    TOKENS: """tokenizer, template, data digest, token digest, rendered template,
        tokens that begin a document""",
    ORDER: "sequences",
    SEQUENCES: "global batch",
    DROPPED: "",
    RATE: "",
    UPDATES: "",
    ROUNDING: """ranks, backend, tf32, gpu, cpu, cores, torch version, deepspeed version,
        transformers version, numpy version, peft version, cuda version, rocm version,
        code_digest""",
    EVALUATIONS: "validation digest, validation token digest, evaluated sequences",
}
# Of several causes the first one here is named first.
EFFECT_OF = {
    name: effect
    for effect, others in OTHER_FACTS.items()
    for name in (
        *filter(None, (other.strip() for other in others.split(","))),
        *(flag for flag, facts in FACTS.items() if facts.effect == effect),
    )
}


class Difference(NamedTuple):
    """A fact that differs between two runs; None: not set, or not known."""

    name: str
    a: object
    b: object
    changes: str  # a key of OTHER_FACTS
    first_step: int  # the first step whose loss it can change

    @property
    def values(self) -> list[str]:
        return ["—" if value is None else shown(value, 16) for value in (self.a, self.b)]

    def __str__(self) -> str:
        return f"{self.name} ({' and '.join(self.values)})"


def facts_of(results: dict) -> dict[str, object]:
    """Return what results.json says about a run besides its losses, by the names of EFFECT_OF."""
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
            first_step = 1 + {UPDATES: 1, RATE: rate_step}.get(changes, 0)
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
    possible = {EVALUATIONS} if of == "eval_loss" else {*OTHER_FACTS} - {ROUNDING, EVALUATIONS}
    found = [d for d in differences if d.changes in possible and d.first_step <= latest]
    return sorted(found, key=lambda difference: -difference.first_step)
