"""The run signature: whether a checkpoint belongs to the run that resumes it.

The signature is part of the manifest ("identity"), in three parts:

    hard   must match: otherwise the tensors of the checkpoint are useless
    soft   should match: what the model is trained and evaluated on; see --resume_force
    told   informational: a difference is only reported
"""

from __future__ import annotations

import hashlib
import json
import os

from support.cli.arguments import global_batch, held_out_share, isolates_documents
from support.cluster.context import DistContext
from support.data.tokenize import tokenizer_fingerprint
from support.errors import UserError
from support.files.user_files import shown
from support.unwrap import full_shape, unwrapped

INFORMATIONAL_FLAGS = """
    strategy batch_size gradient_accumulation_steps epochs max_steps lr lr_scheduler warmup_steps
    warmup_ratio adam_beta1 adam_beta2 adam_epsilon optim weight_decay max_grad_norm dropout
    from_scratch lora_dropout fused_gelu
    """.split()

# Entries that earlier versions did not write, and their value in the runs of those versions.
VALUES_BEFORE = {"isolate_documents": False, "packing": False}


def run_signature(args, ctx: DistContext, spec, dataset: dict, model) -> dict:
    """Return the run signature, {"hard": …, "soft": …, "told": …}."""
    shapes = {name: full_shape(p) for name, p in unwrapped(model).named_parameters()}
    must_match = {
        "parameters": spec.parameters,
        "shapes": digest_of(sorted(shapes.items())),
        "tokenizer": tokenizer_fingerprint(spec.tokenizer),
    }
    if spec.lora:
        must_match |= {"lora_r": spec.lora.r, "lora_alpha": spec.lora.alpha}
        # The frozen weights are not part of a checkpoint.
        must_match["frozen weights"] = (
            f"random, from seed {args.seed}" if spec.random else "as they came"
        ) + (", in 4 bits" if spec.load_in_4bit else "")
    # Whether a stream contains conversations is not known in advance.
    may_be_chat = args.streaming or dataset["kind"] in ("chat", "mixed")
    revision = f"@{args.model_revision}" if args.model_revision else ""
    should_match = {
        "model": os.path.normpath(args.model) + revision,
        "dataset": dataset["sha256"],
        "blocks": dataset["blocks"],
        "seq_length": args.seq_length,
        "seed": args.seed,
        "validation_split": held_out_share(args),
        "validation": (dataset.get("validation") or {}).get("sha256"),
        "template": digest_of(spec.tokenizer.chat_template)[:10] if may_be_chat else None,
        "shuffle_buffer": args.shuffle_buffer if args.streaming else None,
        "global batch": global_batch(args, ctx.world_size),
        "isolate_documents": isolates_documents(args),
        "packing": args.packing,
    }
    informational = {name: getattr(args, name) for name in INFORMATIONAL_FLAGS}
    informational |= {"ranks": ctx.world_size, "precision": ctx.precision}
    return {"hard": must_match, "soft": should_match, "told": informational}


def digest_of(value) -> str:
    """Return the SHA-256 hex digest of a JSON value, which may contain tuples."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def check_same_run(saved: dict, current: dict, forced: bool, ctx: DistContext) -> None:
    """Compare the run signatures of a checkpoint and of this run, and refuse another run's.

    Args:
        saved: the run signature in the checkpoint. Entries that it lacks have their value of
            VALUES_BEFORE, or else are not compared. A part is empty if it is unknown, as for an
            imported checkpoint.
        forced: --resume_force, with which "soft" differences only cause a notice.
    """
    for part in ("hard", "soft", "told"):
        before = saved[part] and VALUES_BEFORE | saved[part]
        differences = [
            f"{key} {shown(before[key])} in the checkpoint, {shown(value)} in this run"
            for key, value in current[part].items()
            if key in before and before[key] != value
        ]
        if not differences:
            continue
        if part == "told" or (part == "soft" and forced):
            ctx.console.warn(f"--resume: the settings have changed: {'; '.join(differences)}.")
            continue
        advice = " Use --resume_force to resume nevertheless." if part == "soft" else ""
        raise UserError(
            f"--resume: the checkpoint is of another run: {'; '.join(differences)}.{advice}"
        )
