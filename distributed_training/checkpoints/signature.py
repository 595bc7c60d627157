"""The signature of a run, a part of each checkpoint's manifest ("identity").

hard   must match: otherwise the tensors of the checkpoint are useless
soft   should match: what the model is trained and evaluated on; see --resume_force
told   informational: a difference is only reported
"""

import hashlib
import json
import os

from torch import nn

from distributed_training.checkpoints.format import COMMIT, EVALUATED, FROZEN
from distributed_training.data.opening import Datasets
from distributed_training.data.special_tokens import start_of, tokenizer_fingerprint
from distributed_training.files.json_types import JsonObject
from distributed_training.model.spec import ModelSpec
from distributed_training.model_parts import full_shape
from distributed_training.rank_shares import shown_shares
from distributed_training.ranks.context import DistContext
from distributed_training.settings.data import DataSettings
from distributed_training.settings.fields import MUST_MATCH, REPORTED
from distributed_training.settings.settings import FACTS, Settings
from distributed_training.settings.training import TrainingSettings
from distributed_training.strategies.strategy import FlagValues

MATCHING_FLAGS, INFORMATIONAL_FLAGS = (
    [name for name, facts in FACTS.items() if facts.at_resume == rule]
    for rule in (MUST_MATCH, REPORTED)
)


def flags_signature(data: DataSettings, training: TrainingSettings, world_size: int) -> JsonObject:
    """Return the part of the run signature that is known before model and data are read."""
    flags = {**vars(data), **vars(training)}
    should_match = {name: flags[name] for name in MATCHING_FLAGS} | {
        "validation_split": data.held_out_share,
        "shuffle_buffer": data.shuffle_buffer if data.streaming else None,
        "isolate_documents": data.isolates_documents,  # also with --packing
        "global batch": training.global_batch(world_size),
    }
    if data.seq_length is None:  # the default depends on the model
        del should_match["seq_length"]
    return {"hard": {}, "soft": should_match}


def run_signature(
    settings: Settings, ctx: DistContext, spec: ModelSpec, datasets: Datasets, module: nn.Module
) -> JsonObject:
    """Return the run signature.

    Args:
        module: the model without its wrapper.
    """
    data, training, dataset = settings.data, settings.training, datasets.facts
    shapes = {name: full_shape(p) for name, p in module.named_parameters()}
    must_match = {
        "parameters": spec.counts.total,
        "shapes": digest_of(sorted(shapes.items())),
        "tokenizer": tokenizer_fingerprint(spec.tokenizer),
    }
    if spec.lora:
        must_match |= spec.lora.identity
        # The frozen weights are not part of a checkpoint.
        frozen = f"random, from seed {training.seed}" if spec.weights.random else "as they came"
        must_match["frozen weights"] = frozen + (", in 4 bits" if spec.weights.in_4bit else "")
        must_match[FROZEN] = spec.weights.frozen["digest"]
    # Whether a stream contains conversations or documents is not known in advance.
    may_be_chat, may_be_text = (
        data.streaming or dataset["kind"] in (kind, "mixed") for kind in ("chat", "text")
    )
    validation = dataset.get("validation") or {}
    revision = f"@{settings.model.model_revision}" if settings.model.model_revision else ""
    should_match = flags_signature(data, training, ctx.world_size)["soft"] | {
        "seq_length": spec.seq_length,
        "model": os.path.normpath(settings.model.model) + revision,
        "dataset": dataset["sha256"],
        "blocks": dataset["blocks"],
        "validation": validation.get("sha256"),
        # A chat template may write the date, so the digest of the text is not enough.
        "tokens_sha256": dataset.get("tokens_sha256"),
        "validation_tokens_sha256": validation.get("tokens_sha256"),
        "document_start": (may_be_text and start_of(spec.tokenizer)) or None,
        "template": digest_of(spec.tokenizer.chat_template)[:10] if may_be_chat else None,
    }
    informational = _informational(settings.flags(), data.streaming, ctx, spec)
    informational |= {
        "rank_shares": shown_shares(training.rank_shares),
        "reduce_dtype": settings.strategy.reduce_dtype,
        EVALUATED: datasets.validation.num_sequences,
        COMMIT: spec.weights.frozen.get("commit"),
    }
    return {"hard": must_match, "soft": should_match, "told": informational}


def _informational(
    flags: FlagValues, streaming: bool, ctx: DistContext, spec: ModelSpec
) -> JsonObject:
    """Return the entries whose changes a resumed run only reports."""
    informational = {name: flags[name] for name in INFORMATIONAL_FLAGS}
    # The tokens of a stream are not known in advance; those of its template change with the date.
    rendering = None
    if streaming:
        from distributed_training.data.chat import rendering_of  # most runs have no template

        rendering = rendering_of(spec.tokenizer)
    return informational | {
        "rendered_template": rendering and digest_of(rendering)[:10],
        "ranks": ctx.world_size,
        "precision": ctx.precision,
    }


def digest_of(value: object) -> str:
    """Return the SHA-256 hex digest of a JSON value, which may contain tuples."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
