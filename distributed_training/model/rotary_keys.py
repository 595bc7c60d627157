"""The rotary settings of a config.json as transformers 4 reads them, next to transformers 5's.

transformers 5 writes `rope_parameters`. Version 4, like other programs, reads `rope_theta`,
`rope_scaling` and `partial_rotary_factor`, and takes its defaults if they are missing.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

from transformers import PretrainedConfig

from distributed_training.files.atomic import write_text
from distributed_training.files.json_types import JsonObject

NEW, FULL, SLIDING = "rope_parameters", "full_attention", "sliding_attention"
THETA, PARTIAL, SCALING = "rope_theta", "partial_rotary_factor", "rope_scaling"
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
    file = folder / "config.json"
    written = json.loads(file.read_text())
    complete = with_older_keys(config, written)
    if complete != written:
        write_text(file, json.dumps(complete, indent=2, sort_keys=True) + "\n")


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
