"""An exported config.json has the rotary settings in the forms of transformers 4 and 5."""

import json

import pytest
import transformers
from conftest import skip
from small_models import SIZES
from transformers import AutoConfig, LlamaConfig

from distributed_training.model.older_keys import add_older_keys, with_older_keys

if not hasattr(LlamaConfig(), "rope_parameters"):
    pytest.skip("transformers 4 writes its own form only", allow_module_level=True)

BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **SIZES}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 3.5]}
LIMIT = {"original_max_position_embeddings": 64}
THETA = {"rope_theta": 500.0}
BY_LAYER = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, **THETA},
}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}


def without_type(settings):
    """A copy without `type`, an older name of `rope_type`, which is there as well."""

    def other_keys(values):
        return {key: value for key, value in values.items() if key != "type"}

    return json.loads(json.dumps(settings), object_hook=other_keys)


@pytest.mark.parametrize(
    "name, settings, others, older",
    [
        ("LlamaConfig", THETA, {}, THETA),
        ("Qwen2Config", {**YARN, **THETA}, {}, {**THETA, "rope_scaling": YARN}),
        (
            "PhiConfig",
            {"partial_rotary_factor": 0.25, **THETA},
            {},
            {**THETA, "partial_rotary_factor": 0.25},
        ),
        (
            "GPTNeoXConfig",
            {"partial_rotary_factor": 0.5, **THETA},
            {},
            {"rotary_emb_base": 500.0, "rotary_pct": 0.5},
        ),
        # transformers 4 refuses other keys than these three.
        (
            "Phi3Config",
            {"rope_type": "longrope", **LONG, **THETA},
            LIMIT,
            {**THETA, "rope_scaling": {"type": "longrope", **LONG}},
        ),
        # It reads the limit here.
        (
            "LlamaConfig",
            {"rope_type": "longrope", **LONG, **LIMIT, **THETA},
            {},
            {**THETA, **LIMIT, "rope_scaling": {"rope_type": "longrope", **LONG, **LIMIT}},
        ),
        ("Olmo2Config", {"rope_type": "linear", "factor": 8.0, **THETA}, {}, {
            **THETA, "rope_scaling": {"type": "linear", "factor": 8.0},
        }),
        ("Gemma3TextConfig", BY_LAYER, {}, {**THETA, "rope_local_base_freq": 700.0, **LINEAR}),
        (
            "Olmo3Config",
            {"full_attention": BY_LAYER["full_attention"], "sliding_attention": dict(THETA)},
            {},
            {**THETA, **LINEAR},
        ),
    ],
)  # fmt: skip
def test_both_forms_are_written_and_read(name, settings, others, older, tmp_path):
    if not hasattr(transformers, name):
        skip(f"transformers {transformers.__version__} has no {name}")
    options = {"max_position_embeddings": 256, "rope_parameters": settings, **others}
    config = getattr(transformers, name)(**BLOCKS, **json.loads(json.dumps(options)))
    config.save_pretrained(tmp_path)
    before = json.loads((tmp_path / "config.json").read_text())
    add_older_keys(tmp_path, config)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {key: written[key] for key in older} == older
    assert {key: written[key] for key in before} == before
    read = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert without_type(read) == without_type(config.rope_parameters)


def test_a_part_of_a_configuration_gets_the_keys():
    config = transformers.Gemma3Config(text_config={**BLOCKS, "rope_parameters": BY_LAYER})
    written = with_older_keys(config, config.to_dict())
    assert written["text_config"]["rope_local_base_freq"] == 700.0
    assert written["text_config"]["rope_theta"] == 500.0 and "rope_theta" not in written


def test_models_without_rotary_settings_and_new_ones_are_left_as_they_are():
    config = transformers.GPT2Config(**SIZES)
    assert with_older_keys(config, config.to_dict()) == config.to_dict()
    if hasattr(transformers, "Gemma4TextConfig"):
        new = transformers.Gemma4TextConfig(**BLOCKS)
        assert with_older_keys(new, new.to_dict()) == new.to_dict()


def test_the_number_of_experts_has_its_older_name(tmp_path):
    """transformers 4 would build the 128 experts of its default."""
    config = transformers.Qwen3MoeConfig(**BLOCKS, num_experts=4)
    config.save_pretrained(tmp_path)
    add_older_keys(tmp_path, config)
    assert json.loads((tmp_path / "config.json").read_text())["num_experts"] == 4
    assert AutoConfig.from_pretrained(tmp_path).num_experts == 4
