"""Find the checkpoint that --resume selects, and check that it belongs to the run that resumes it.

Checkpoints are compared with a run by its signature, a part of the manifest ("identity"):

    hard   must match: otherwise the tensors of the checkpoint are useless
    soft   should match: what the model is trained and evaluated on; see --resume_force
    told   informational: a difference is only reported
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from support import console
from support.checkpoints.format import candidates_in, find_damage, list_checkpoints, read_manifest
from support.cli.arguments import Arguments, global_batch, held_out_share, isolates_documents
from support.cluster.context import DistContext
from support.data.tokenize import tokenizer_fingerprint
from support.errors import UserError
from support.files.user_files import shown
from support.tables import OPTIMIZERS
from support.train_state import full_shape, unwrapped

Found = tuple[Path, dict]  # a checkpoint's folder and its manifest
INFORMATIONAL_FLAGS = """
    strategy batch_size gradient_accumulation_steps epochs max_steps lr lr_scheduler warmup_steps
    warmup_ratio adam_beta1 adam_beta2 adam_epsilon optim weight_decay max_grad_norm dropout
    from_scratch lora_dropout fused_gelu
    """.split()

# Entries that earlier versions did not write, and their value in the runs of those versions.
VALUES_BEFORE = {"isolate_documents": False, "packing": False}


def flags_signature(args: Arguments, world_size: int) -> dict:
    """Return the part of the run signature that is known before model and data are read."""
    should_match = {
        "seed": args.seed,
        "validation_split": held_out_share(args),
        "shuffle_buffer": args.shuffle_buffer if args.streaming else None,
        "global batch": global_batch(args, world_size),
        "isolate_documents": isolates_documents(args),
        "packing": args.packing,
    }
    if args.seq_length is not None:  # the default depends on the model
        should_match["seq_length"] = args.seq_length
    return {"hard": {}, "soft": should_match}


def run_signature(args: Arguments, ctx: DistContext, spec, dataset: dict, model) -> dict:
    """Return the run signature; `dataset` is the dataset's entry in results.json."""
    shapes = {name: full_shape(p) for name, p in unwrapped(model).named_parameters()}
    must_match = {
        "parameters": spec.parameters,
        "shapes": digest_of(sorted(shapes.items())),
        "tokenizer": tokenizer_fingerprint(spec.tokenizer),
    }
    if spec.lora:
        must_match |= {"lora_r": spec.lora.r, "lora_alpha": spec.lora.alpha}
        # The frozen weights are not part of a checkpoint.
        frozen = f"random, from seed {args.seed}" if spec.random else "as they came"
        must_match["frozen weights"] = frozen + (", in 4 bits" if spec.load_in_4bit else "")
    # Whether a stream contains conversations is not known in advance.
    may_be_chat = args.streaming or dataset["kind"] in ("chat", "mixed")
    revision = f"@{args.model_revision}" if args.model_revision else ""
    should_match = flags_signature(args, ctx.world_size)["soft"] | {
        "model": os.path.normpath(args.model) + revision,
        "dataset": dataset["sha256"],
        "blocks": dataset["blocks"],
        "validation": (dataset.get("validation") or {}).get("sha256"),
        "template": digest_of(spec.tokenizer.chat_template)[:10] if may_be_chat else None,
    }
    informational = {name: getattr(args, name) for name in INFORMATIONAL_FLAGS}
    informational |= {"ranks": ctx.world_size, "precision": ctx.precision}
    return {"hard": must_match, "soft": should_match, "told": informational}


def digest_of(value) -> str:
    """Return the SHA-256 hex digest of a JSON value, which may contain tuples."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def refuse_other_run(saved: dict, current: dict, forced: bool) -> None:
    """Raise a UserError if a checkpoint is another run's; with `forced` only "hard" parts count."""
    for part in ("hard",) if forced else ("hard", "soft"):
        if found := _differences(saved[part], current[part]):
            advice = " Use --resume_force to resume nevertheless." if part == "soft" else ""
            raise UserError(
                f"--resume: the checkpoint is of another run: {'; '.join(found)}.{advice}"
            )


def report_changes(saved: dict, current: dict) -> None:
    """Warn of the differences between two run signatures that are not refused."""
    for part in ("soft", "told"):
        if found := _differences(saved[part], current[part]):
            console.warn(f"--resume: the settings have changed: {'; '.join(found)}.")


def _differences(saved: dict, current: dict) -> list[str]:
    before = saved and VALUES_BEFORE | saved
    return [
        f"{key} {shown(before[key])} in the checkpoint, {shown(value)} in this run"
        for key, value in current.items()
        if key in before and before[key] != value
    ]


def find_checkpoint(args: Arguments, ctx: DistContext, folder: Path) -> Found | None:
    """Find the checkpoint to resume from: the newest complete and undamaged one, on all ranks.

    Only the flags are compared with it here; model and data in `CheckpointManager.resume`.

    Args:
        folder: the run's output folder.
    Returns:
        The checkpoint; None without --resume, or if --resume names no path and `folder` has none.
    Raises:
        UserError: no checkpoint is complete and undamaged, or it is of a run with other flags.
    """
    if args.resume is None:
        return None
    found = _newest(args.resume, folder / "checkpoints", ctx)
    if found is None:
        console.warn(
            f"--resume: {folder} has no checkpoint yet: this run starts from the beginning."
        )
        return None
    path, manifest = found
    current = flags_signature(args, ctx.world_size)
    refuse_other_run(manifest["identity"], current, args.resume_force)
    saved_by, family = manifest["optimizer"], OPTIMIZERS[args.optim].family
    if saved_by not in ("", family):
        raise UserError(
            f"--resume {path}: the checkpoint has the states of {shown(saved_by)}, and this run's "
            f"optimizer is {family}: use the same --optim."
        )
    return found


def _newest(wanted: str, folder: Path, ctx: DistContext) -> Found | None:
    """Return the newest checkpoint in `wanted`, or if it is "" in `folder`, that can be used."""
    # Rank 0 decides: other nodes may see new names in a shared folder later.
    candidates = ctx.broadcast_from_rank0(
        candidates_in(Path(wanted)) if wanted else list_checkpoints(folder)
    )
    for candidate in candidates:
        manifest, problem = verify(candidate, ctx)
        if not problem:
            return candidate, manifest
        if wanted and candidate == Path(wanted):
            raise UserError(f"--resume {wanted}: {problem}.")
        console.warn(f"Skipped the checkpoint {candidate}: {problem}.")
    if wanted or candidates:
        advice = "Remove the folder to start from the beginning."
        if wanted:
            advice = "To convert one of Trainer, DeepSpeed or FSDP: python scripts/"
            advice += f"convert_checkpoint.py {wanted} --to checkpoint NEW_FOLDER"
        raise UserError(
            f"--resume: no checkpoint in {wanted or folder} is complete and undamaged. {advice}"
        )
    return None


def verify(checkpoint: Path, ctx: DistContext) -> tuple[dict, str]:
    """Read a checkpoint's manifest and verify its files, of which each rank takes a part.

    Returns:
        (manifest, ""), or a clause that says why it cannot be used as the second item.
    """
    manifest, problem = ctx.broadcast_from_rank0(read_manifest(checkpoint) if ctx.is_main else None)
    problem = problem or find_damage(checkpoint, manifest, ctx.rank, ctx.world_size)
    return manifest, next(filter(None, ctx.all_gather(problem)), "")
