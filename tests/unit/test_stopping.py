"""A trained model stops at every token that ends a trained turn, whoever generates with it."""

import json
from pathlib import Path

import pytest
from small_models import CONFIGS
from tool_templates import MISTRAL, QWEN, QWEN_BLOCKS, with_template
from transformers import AutoTokenizer, GenerationConfig

from distributed_training.data.chat_template import use_plain_template
from distributed_training.data.special_tokens import tokenizer_fingerprint
from distributed_training.model.description import write_description
from distributed_training.model.older_keys import write_tokenizer
from distributed_training.model.spec import ModelSpec, WeightSource
from distributed_training.model.stopping import end_ids, generation_after_training

EOS = "<|end|>"
# As GLM-4's: nothing ends a turn but the role of the next message.
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}"
    "{{ m.content or '' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As gpt-oss's and Llama 3.1's: calls and the last answer end differently from an earlier answer.
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}<|call|>"
    "{% else %}{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|eot|>{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
)
ADDED = "<|user|> <|assistant|> <|tool|> <|start|> <|message|> <|call|> <|return|>".split()


def tokenizer_with(template):
    tokenizer = with_template(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ADDED}, False)
    return tokenizer


@pytest.mark.parametrize(
    "template, ends",
    [
        (QWEN, "<|im_end|>"),
        (QWEN_BLOCKS, "<|im_end|>"),
        (GLM, "<|user|> <|tool|>"),
        (HARMONY, "<|return|> <|eot|> <|call|>"),
        (MISTRAL, ""),  # the end-of-text token
        (QWEN.replace("<|im_end|>", "<|not in the vocabulary|>"), ""),
    ],
)
def test_every_token_that_ends_a_turn_in_the_template(template, ends):
    tokenizer = tokenizer_with(template)
    found = end_ids(tokenizer, GenerationConfig(eos_token_id=[7, 8]), is_chat=True)
    expected = tokenizer.convert_tokens_to_ids([EOS, *ends.split()])
    assert found == {7, 8, *expected}


@pytest.mark.parametrize("own", [None, 7, [7, 8]])
@pytest.mark.parametrize("kind", ["chat", "mixed", "pair", "text", None])
def test_the_exported_configuration_names_the_ends_of_what_was_trained(own, kind):
    tokenizer = tokenizer_with(QWEN)
    eos, im_end = tokenizer.convert_tokens_to_ids([EOS, "<|im_end|>"])
    before = GenerationConfig(eos_token_id=own, max_new_tokens=9)
    after = generation_after_training(tokenizer, before, kind)
    trained = [eos, *[im_end] * (kind in ("chat", "mixed"))]
    found = after.eos_token_id if isinstance(after.eos_token_id, list) else [after.eos_token_id]
    kept = own if isinstance(own, list) else [own] * (own is not None)
    assert found == sorted([*kept, *trained]) and after.max_new_tokens == 9
    assert before.eos_token_id == own


def test_a_single_end_is_no_list():
    tokenizer = with_template(None)
    before = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    assert generation_after_training(tokenizer, before, "text").to_dict() == before.to_dict()
    tokenizer.eos_token = None
    assert generation_after_training(tokenizer, GenerationConfig(), "text").eos_token_id is None
    tokenizer.eos_token = EOS
    use_plain_template(tokenizer)
    assert generation_after_training(tokenizer, before, "chat").to_dict() == before.to_dict()


def test_the_written_file_of_a_base_model_that_was_trained_on_conversations(tmp_path):
    tokenizer = tokenizer_with(QWEN)
    before = GenerationConfig(bos_token_id=0, eos_token_id=tokenizer.eos_token_id)
    source = WeightSource(str(Path()), 0)
    spec = ModelSpec(CONFIGS["llama"], tokenizer, before, source, 16)
    write_description(spec, tmp_path / "hf", "chat")
    written = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    ends = tokenizer.convert_tokens_to_ids([EOS, "<|im_end|>"])
    assert written["eos_token_id"] == sorted(ends) and written["bos_token_id"] == 0


def test_gpt2_has_the_key_that_other_programs_read(tmp_path):
    """llama.cpp's converter ends with KeyError: 'n_ctx' without it; transformers 5 has no default."""
    tokenizer = tokenizer_with(QWEN)
    source = WeightSource(str(Path()), 0)
    spec = ModelSpec(CONFIGS["gpt2"], tokenizer, GenerationConfig(), source, 16)
    write_description(spec, tmp_path / "hf", "text")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["n_ctx"] == written["n_positions"] == CONFIGS["gpt2"].n_positions
    assert not hasattr(CONFIGS["gpt2"], "n_ctx")


def test_the_tokenizer_has_the_names_of_transformers_4(tmp_path):
    """It ends with an error at those of version 5."""
    tokenizer = tokenizer_with(QWEN)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|more|>"]})
    tokenizer.save_pretrained(tmp_path / "plain")
    write_tokenizer(tokenizer, tmp_path / "older")
    written = json.loads((tmp_path / "older" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"].removesuffix("Fast") == "PreTrainedTokenizer"
    assert "<|more|>" in written["additional_special_tokens"]
    plain, older = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("plain", "older"))
    assert type(older) is type(plain)
    assert older.all_special_tokens == plain.all_special_tokens
    assert tokenizer_fingerprint(older) == tokenizer_fingerprint(plain)
