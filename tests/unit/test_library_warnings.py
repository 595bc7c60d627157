"""Warnings of transformers and peft that become notices, although a run hides their messages."""

import json
import logging
import warnings

import pytest
import transformers
from tokenizer_zoo import tokenizer_of
from transformers import PreTrainedTokenizerFast

from distributed_training import console
from distributed_training.model import library_warnings
from distributed_training.model.library_warnings import shown_as_notices
from distributed_training.model.tokenizer import read_tokenizer

log = transformers.utils.logging
ADAPTERS = "Found missing adapter keys while loading the checkpoint: ['a.lora_A']."


class Printed(logging.Handler):
    """What the handlers of transformers print."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@pytest.fixture(autouse=True)
def printed(monkeypatch):
    """The state of a run: transformers and Python's warnings are quiet."""
    monkeypatch.setattr(library_warnings, "_told", set())
    level = log.get_verbosity()
    log.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("transformers").addHandler(handler := Printed())
        yield handler.texts
    logging.getLogger("transformers").removeHandler(handler)
    log.set_verbosity(level)


def say(logger):
    logger.warning("The tokenizer you are loading from 'a' with an incorrect regex pattern: b.")
    logger.warning("`torch_dtype` is deprecated")
    logger.error("An error")
    warnings.warn(f"This is no bug.\n{ADAPTERS}", stacklevel=1)
    warnings.warn("Something else", stacklevel=1)


def test_a_warning_about_tokens_or_weights_is_a_notice_once(capsys, printed):
    logger = log.get_logger("transformers.a")
    for _ in range(2):
        with shown_as_notices():
            say(logger)
    said = capsys.readouterr()
    assert said.out.count('incorrect regex pattern: b. What to do: set "fix_mistral_regex"') == 1
    assert said.out.count("['a.lora_A']. What to do: these adapters are random") == 1
    assert said.out.count("ℹ️") == 2 and "\n['a" not in said.out
    assert "deprecated" not in said.out and said.err == "" and printed == ["An error"] * 2


def test_all_is_as_before_afterwards(capsys, monkeypatch, printed):
    logger = log.get_logger("transformers.a")
    with pytest.raises(ValueError, match="x"), shown_as_notices():
        raise ValueError("x")
    say(logger)
    assert capsys.readouterr().out == "" and printed == ["An error"]
    assert log.get_verbosity() == logging.ERROR
    # On other ranks there are no notices; with --verbose the library prints its own message.
    with monkeypatch.context() as patch, shown_as_notices():
        patch.setattr(console, "is_main", False)
        say(logger)
    assert "regex" not in capsys.readouterr().out
    log.set_verbosity_warning()
    with shown_as_notices():
        say(logger)
    assert "ℹ️" not in capsys.readouterr().out and "incorrect regex" in printed[-3]


@pytest.mark.skipif(
    not hasattr(PreTrainedTokenizerFast, "_patch_mistral_regex"), reason="an older transformers"
)
def test_a_tokenizer_with_a_wrong_pattern(tmp_path, capsys):
    """transformers recognizes it by the model's type, its version, and the size of the vocabulary."""
    tokenizer_of("gpt2").save_pretrained(tmp_path)
    file, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first = max(vocabulary.values()) + 1
    vocabulary |= {f"§{n}": first + n for n in range(100_000)}
    file.write_text(json.dumps(content))
    version = {"model_type": "mistral", "transformers_version": "4.50.0"}
    (tmp_path / "config.json").write_text(json.dumps(version))
    read_tokenizer(str(tmp_path), "--model a")
    said = capsys.readouterr()
    assert "This will lead to incorrect tokenization" in said.out and said.out.count("\n") == 1
    remedied = {**json.loads(config.read_text()), "fix_mistral_regex": True}
    config.write_text(json.dumps(remedied))
    read_tokenizer(str(tmp_path), "--model a")
    assert capsys.readouterr().out == ""
