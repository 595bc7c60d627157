"""What transformers 4 reads of a model's folder: the older keys of its config.json and tokenizer.

transformers 5 writes `rope_parameters`. Version 4, like other programs, reads `rope_theta`,
`rope_scaling` and `partial_rotary_factor`, and takes its defaults if they are missing. The same
holds for the number of experts. Of the tokenizer version 5 reads the names of version 4 as well.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from distributed_training.files.atomic import write_text
from distributed_training.files.json_types import JsonObject

NEW, FULL, SLIDING = "rope_parameters", "full_attention", "sliding_attention"
THETA, PARTIAL, SCALING = "rope_theta", "partial_rotary_factor", "rope_scaling"
EXPERTS = "num_experts"  # num_local_experts in transformers 5, also of Qwen's mixtures of experts
ORIGINAL = "original_max_position_embeddings"
# Architectures with other names: of theta and of the rotary part of a head; or, where layers of
# sliding attention have settings of their own, of theta in both kinds of layers. The scaling is
# then that of full attention.
NEOX, GEMMA = ("rotary_emb_base", "rotary_pct"), (THETA, "rope_local_base_freq")
NAMES = {"gpt_neox": NEOX, "gpt_neox_japanese": NEOX}
NAMES_BY_LAYER = {"gemma3_text": GEMMA, "gemma3n_text": GEMMA, "olmo3": (THETA, THETA)}
NAMES_BY_LAYER["modernbert-decoder"] = ("global_rope_theta", "local_rope_theta")
# Architectures of which transformers 4 reads `type`, and accepts these keys of a scaling only.
PHI = frozenset(("short_factor", "long_factor"))
ONLY_KEYS = {"phi3": PHI, "phi4_multimodal": PHI, "olmo": {"factor"}, "olmo2": {"factor"}}


def add_older_keys(folder: Path, config: PretrainedConfig) -> None:
    """Add the keys of transformers 4 to the config.json in a folder.

    Args:
        config: what was written to it. In transformers 4 it has no other form.
    """

    def complete(written: JsonObject) -> JsonObject:
        found = with_older_keys(config, written)
        renamed = config.attribute_map.get(EXPERTS)
        return {**found, EXPERTS: found[renamed]} if renamed in found else found

    _rewrite(folder / "config.json", complete)


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer's files, with the names of transformers 4, which version 5 reads as well.

    Version 4 ends with an error at the new name of the class, and at a list of extra tokens.
    """

    def renamed(written: JsonObject) -> JsonObject:
        older = dict(written)
        if older.get("tokenizer_class") == "TokenizersBackend":
            older["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(older.get("extra_special_tokens"), list):
            older["additional_special_tokens"] = older.pop("extra_special_tokens")
        return older

    tokenizer.save_pretrained(folder)
    _rewrite(folder / "tokenizer_config.json", renamed, ensure_ascii=False)


def _rewrite(
    file: Path, change: Callable[[JsonObject], JsonObject], ensure_ascii: bool = True
) -> None:
    """Write what `change` makes of the content of a JSON file, if it is another one."""
    written = json.loads(file.read_text(encoding="utf-8"))
    if (changed := change(written)) != written:
        text = json.dumps(changed, indent=2, sort_keys=True, ensure_ascii=ensure_ascii)
        write_text(file, text + "\n")


def with_older_keys(config: PretrainedConfig, written: JsonObject) -> JsonObject:
    """Return the content of a config.json, or of a part of one, with the keys of transformers 4."""
    parts = {
        name: with_older_keys(getattr(config, name), written[name])
        for name in config.sub_configs
        if isinstance(written.get(name), dict)
    }
    settings = getattr(config, NEW, None)
    complete = {
        **written,
        **parts,
        **(_older_keys(config.model_type, settings) if settings else {}),
    }
    if not settings or _plain(_read(config, complete)) == _plain(settings):
        return complete
    return {**written, **parts}  # a new architecture, which reads the same keys differently


def _older_keys(model_type: str, settings: JsonObject) -> JsonObject:
    """Return the rotary settings as transformers 4 names them; none of a new architecture."""
    if model_type in NAMES_BY_LAYER and {FULL, SLIDING} <= settings.keys():
        (of_full, of_sliding), full = NAMES_BY_LAYER[model_type], settings[FULL]
        thetas = {of_sliding: settings[SLIDING][THETA], of_full: full[THETA]}
        return {**thetas, **_scaling(model_type, full)}
    if THETA not in settings:
        return {}
    of_theta, of_part = NAMES.get(model_type, (THETA, PARTIAL))
    part = {of_part: settings[PARTIAL]} if PARTIAL in settings else {}
    return {of_theta: settings[THETA], **part, **_scaling(model_type, settings)}


def _scaling(model_type: str, settings: JsonObject) -> JsonObject:
    """Return `rope_scaling`, and what belongs to it; nothing if the frequencies are not scaled."""
    kind = settings.get("rope_type", "default")
    scaling = {key: value for key, value in settings.items() if key not in (THETA, PARTIAL, "type")}
    if kind == "default":
        return {}
    # LongRoPE's limit is a key of its own.
    limit = {ORIGINAL: scaling[ORIGINAL]} if kind == "longrope" and ORIGINAL in scaling else {}
    values = {key: scaling[key] for key in scaling.keys() - {"rope_type", *limit}}
    if ONLY_KEYS.get(model_type) == values.keys():
        scaling = {"type": kind, **values}
    return {SCALING: scaling, **limit}


def _read(config: PretrainedConfig, content: JsonObject) -> JsonObject:
    """Return the rotary settings that this transformers reads from the content of a config.json."""
    return getattr(type(config).from_dict(copy.deepcopy(content)), NEW, {})


def _plain(settings: JsonObject) -> JsonObject:
    """Return settings without `type`, an older name of `rope_type`."""
    plain = {key: value for key, value in settings.items() if key != "type"}
    return {
        key: _plain(value) if isinstance(value, dict) else value for key, value in plain.items()
    }
