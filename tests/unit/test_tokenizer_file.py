"""A tokenizer whose class does not do what its tokenizer.json says."""

import json
from importlib.metadata import version

import pytest
from tokenizer_zoo import tokenizer_of
from tokenizers import Tokenizer, normalizers

from distributed_training.model.tokenizer import read_tokenizer
from distributed_training.model.tokenizer_file import disagreements


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "llama2", "unigram"])
def test_a_tokenizer_that_is_its_file(tmp_path, kind):
    tokenizer_of(kind).save_pretrained(tmp_path)
    assert disagreements(str(tmp_path), read_tokenizer(str(tmp_path), "")) == []


@pytest.mark.skipif(version("transformers") < "5", reason="transformers 4 reads the file")
def test_a_class_without_the_normalizer_of_the_file(tmp_path):
    tokenizer_of("gpt2").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(str(file))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    kinds = {}
    for name in ("PreTrainedTokenizerFast", "GPT2Tokenizer"):
        config["tokenizer_class"] = name
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        kinds[name] = disagreements(str(tmp_path), read_tokenizer(str(tmp_path), ""))
    assert kinds["PreTrainedTokenizerFast"] == []
    [notice] = kinds["GPT2Tokenizer"]
    assert "'ABC Hello'" in notice and "tokenizer_class" in notice
