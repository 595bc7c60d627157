"""The run signatures of a run that was resumed: a resume may change settings (results.json)."""

from typing import TypedDict

from distributed_training.files.checked_types import Count, has_type
from distributed_training.files.json_types import JsonObject

KEY = "signatures"


class Signature(TypedDict):
    """A run signature, and the first step that had it."""

    from_step: Count
    hard: dict[str, object]
    soft: dict[str, object]
    told: dict[str, object]


def signatures_of(results: JsonObject) -> list[JsonObject]:
    """Return the run signatures of a run, each with the first step that had it ("from_step").

    Args:
        results: the content of results.json.
    """
    recorded = results.get(KEY)
    if has_type(recorded, list[Signature]) and recorded:
        return recorded
    only = {"from_step": 1, **(results.get("run_signature") or {})}
    return [only] if has_type(only, Signature) else []


def after_resume(results: JsonObject, identity: JsonObject, step: int) -> list[JsonObject]:
    """Return the run signatures of a run that is resumed after a step.

    Args:
        results: the content of results.json before the resume.
        identity: the run signature of the later steps.
    """
    earlier = [one for one in signatures_of(results) if one["from_step"] <= step]
    return [*earlier, {"from_step": step + 1, **identity}]


def signature_at(results: JsonObject, step: int) -> JsonObject:
    """Return the run signature that a run had at a step; that of its end if it is not recorded."""
    earlier = [one for one in signatures_of(results) if one["from_step"] <= step]
    return earlier[-1] if earlier else results.get("run_signature") or {}
