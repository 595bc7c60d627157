"""What differs between two runs besides their losses, and what each difference can change."""

from __future__ import annotations

from typing import NamedTuple

from support.cli.flags import COMMANDS, GROUPS
from support.files.user_files import shown

# Entries of the run signature that have another name here, because a flag has theirs.
SIGNATURE_NAMES = {
    "dataset": "data digest",
    "blocks": "sequences",
    "validation": "validation digest",
}
# Keys of results.json that are compared under their own name, in addition to the flags.
FACTS = (
    "strategy model device backend launcher precision seed batch_size gradient_accumulation_steps "
    "seq_length parameters simulated_world_size code_digest"
).split()


class Effect(NamedTuple):
    """What a difference between two runs can change."""

    on: str  # "losses"; "rounding": the losses, up to rounding; "evaluations" only; or "nothing"
    text: str  # the same for the user
    first_step: int = 1  # the first step whose loss it can change


RATE = Effect("losses", "changes the learning rate", 2)
NOTHING = Effect("nothing", "no effect on losses")
UNKNOWN = Effect("losses", "effect not known")

# Names in the order in which the causes of a difference are named: the entries of the run signature
# (support/checkpoints/find.py), then the other flags and facts of a run.
_NAMES = {
    Effect("losses", "another model"): """
        parameters, shapes, lora_r, lora_alpha, lora_targets, load_in_4bit""",
    Effect("losses", "other initial weights"): """
        frozen weights, model, model_revision, from_scratch""",
    Effect("losses", "other tokens"): "tokenizer, template, chat_template",
    Effect("losses", "other data"): "data digest",
    Effect("losses", "changes the order of the data"): """
        seed, sequences, num_samples, validation_split, validation_split_percentage, streaming,
        shuffle_buffer""",
    Effect("losses", "other sequences"): "seq_length, packing, isolate_documents",
    Effect("losses", "drops other elements"): "dropout, lora_dropout",
    RATE: "lr, lr_scheduler, warmup_steps, warmup_ratio, epochs, max_steps",
    Effect("losses", "changes the updates", 2): """
        optim, adam_beta1, adam_beta2, adam_epsilon, weight_decay, max_grad_norm""",
    Effect("losses", "other sequences in each step"): "global batch, train_batch_size",
    Effect("losses", "the file's content is not recorded: compare the files", 2): """
        ds_config, fsdp_config""",
    Effect("rounding", "same result expected"): """
        strategy, precision, fused_gelu, compile, deterministic, gradient_checkpointing, backend,
        gpu, cpu, cores, torch version, deepspeed version, transformers version, numpy version,
        peft version, cuda version, rocm version""",
    Effect("rounding", "same result expected (with dropout, other masks)"): """
        ranks, batch_size, gradient_accumulation_steps, device""",
    Effect("rounding", "same result expected, unless the computation was changed"): "code_digest",
    Effect("rounding", "same result expected, on a CPU bit for bit"): "resume, resume_force",
    Effect("evaluations", "changes evaluations only"): """
        validation digest, eval, eval_first, eval_only, eval_every, eval_samples, eval_batch_size,
        eval_split, validation_file, early_stopping_patience, load_best_at_end""",
    Effect("nothing", "no effect but that on the data, see its digest"): """
        dataset, dataset_config, dataset_revision, train_split, include, text_column,
        prompt_column, completion_column, max_bad_rows, python version, datasets version,
        tokenizers version""",
    NOTHING: """
        host, ram_bytes, gpu_memory_bytes, launcher, simulated_world_size, cache_dir, merge_lora,
        nvme_path, auto_micro_batch""",
}
EFFECTS = {name.strip(): effect for effect, names in _NAMES.items() for name in names.split(",")}
for _group in (COMMANDS, "Run file", "Cluster", "Output", "Debugging"):
    EFFECTS = dict.fromkeys(GROUPS[_group], NOTHING) | EFFECTS


class Difference(NamedTuple):
    """A fact that differs between two runs; None: not set, or not known."""

    name: str
    a: object
    b: object
    effect: Effect

    @property
    def values(self) -> list[str]:
        """Both values, shortened."""
        return ["—" if value is None else shown(value, 16) for value in (self.a, self.b)]

    def __str__(self) -> str:
        return f"{self.name} ({' and '.join(self.values)})"


def facts_of(results: dict) -> dict[str, object]:
    """Return what results.json says about a run besides its losses, by the names of EFFECTS."""
    dataset = results.get("dataset") or {}
    facts = {name: results[name] for name in FACTS if name in results}
    facts |= {"ranks": results.get("world_size"), "global batch": results.get("global_batch_size")}
    facts |= {"data digest": dataset.get("sha256"), "sequences": dataset.get("blocks")}
    facts |= results.get("flags") or {}
    for entries in (results.get("run_signature") or {}).values():
        facts |= {SIGNATURE_NAMES.get(key, key): value for key, value in entries.items()}
    facts |= results.get("hardware") or {}
    versions = results.get("versions") or {}
    return facts | {f"{name} version": value for name, value in versions.items()}


def differences_of(
    a: dict[str, object], b: dict[str, object], only_common: bool, first_other_rate: int | None
) -> list[Difference]:
    """Return the facts that differ, those first that are most likely to change the losses.

    Args:
        a, b: see `facts_of`.
        only_common: compare only facts that both runs recorded, because one of them is a run of
            Trainer or of an earlier version.
        first_other_rate: the first step with another learning rate; 0 if all compared learning
            rates are equal, None if they were not compared.
    """
    found = []
    for name in a.keys() & b.keys() if only_common else a.keys() | b.keys():
        # What is off or unset is not among the flags that a run recorded.
        of_a, of_b = (None if facts.get(name) is False else facts.get(name) for facts in (a, b))
        effect = EFFECTS.get(name, UNKNOWN)
        if effect is RATE and first_other_rate == 0:
            effect = Effect("nothing", "the learning rates of the compared steps are equal")
        elif effect is RATE and first_other_rate:
            text = f"changes the learning rate, first that of step {first_other_rate:,}"
            effect = Effect("losses", text, first_other_rate + 1)
        if of_a != of_b:
            found.append(Difference(name, of_a, of_b, effect))
    order = {name: place for place, name in enumerate(EFFECTS)}
    return sorted(found, key=lambda entry: (order.get(entry.name, len(order)), entry.name))
