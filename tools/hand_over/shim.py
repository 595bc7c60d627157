"""Starts llama.cpp's convert_hf_to_gguf.py with facts that it cannot find in the model's folder.

    python shim.py FACTS convert_hf_to_gguf.py MODEL --outfile FILE --outtype f32

FACTS is a JSON object: "rule", the name of the pre-tokenization rule if the converter does not
recognize the tokenizer (null: its error is kept); "adds_bos", whether the tokenizer begins texts
with the BOS token (null: what the converter finds); "has_bos", whether it has one; "ends", the ids
other than the EOS token at which answers end. The file is a program of its own, and imports
nothing of this project.
"""

import functools
import importlib.util
import json
import sys
import types
from pathlib import Path

SLOTS = ("eot", "eom")  # where a GGUF file names further tokens that end an answer
NO_BOS = "{% set bos_token = '' %}"


def name_rule(module, rule: str) -> None:
    """Let the converter return `rule` for a tokenizer that it does not recognize.

    Args:
        module: convert_hf_to_gguf; newer releases have the classes in conversion.base.
    """
    for owner in filter(None, (module, sys.modules.get("conversion.base"))):
        for name in ("TextModel", "Model"):
            base = getattr(owner, name, None)
            if base is not None and "get_vocab_base_pre" in vars(base):
                base.get_vocab_base_pre = _or_rule(base.get_vocab_base_pre, rule)


def _or_rule(recognize, rule: str):
    @functools.wraps(recognize)
    def find(self, tokenizer) -> str:
        try:
            return recognize(self, tokenizer)
        except NotImplementedError:
            print(f"The rule of this tokenizer is {rule}.", file=sys.stderr)
            return rule

    return find


def complete_settings(module) -> None:
    """Let the converter read all of config.json, as rotary_pct of GPT-NeoX.

    It reads the settings through transformers, whose version 5 leaves out what it has renamed.
    """
    for owner in filter(None, (module, sys.modules.get("conversion.base"))):
        base = getattr(owner, "ModelBase", None)
        if base is not None:
            base.load_hparams = staticmethod(_with_dropped_keys(base.load_hparams))


def _with_dropped_keys(load_settings):
    @functools.wraps(load_settings)
    def load(folder: Path, *args, **options) -> dict:
        whole = json.loads((folder / "config.json").read_bytes())
        return {**whole, **load_settings(folder, *args, **options)}

    return load


def complete_special_tokens(facts: dict) -> None:
    """Let the GGUF file say how texts begin, and name all tokens that end an answer.

    llama.cpp has a BOS token for each file, and a file without one gets the token 11. A chat
    template that writes it must not do so if the tokenizer has none.
    """
    import gguf

    original = gguf.SpecialVocab.__init__

    def load(self, *args, **options) -> None:
        original(self, *args, **options)
        if facts["adds_bos"] is not None:
            self.add_special_token["bos"] = facts["adds_bos"]
        template = self.chat_template
        if not facts["has_bos"] and isinstance(template, str) and "bos_token" in template:
            self.chat_template = NO_BOS + template
        free = [slot for slot in SLOTS if slot not in self.special_token_ids]
        known = {*self.special_token_ids.values()}
        ends = [end for end in facts["ends"] if end not in known]
        for slot, number in zip(free, ends, strict=False):
            self.special_token_ids[slot] = number

    gguf.SpecialVocab.__init__ = load


def do_without_sentencepiece(model: Path) -> None:
    """Let the converter import sentencepiece, which it needs for models with tokenizer.model only.

    It imports the library before it looks for this file, and then reads tokenizer.json.
    """
    if not (model / "tokenizer.model").exists() and not importlib.util.find_spec("sentencepiece"):
        stub = types.ModuleType("sentencepiece")
        stub.SentencePieceProcessor = None  # type: ignore[attr-defined]
        sys.modules["sentencepiece"] = stub


def main() -> None:
    """Load the converter, change it, and run it."""
    facts, script = json.loads(sys.argv[1]), Path(sys.argv[2]).resolve()
    sys.argv = [str(script), *sys.argv[3:]]
    sys.path[0] = str(script.parent)  # this folder has modules of other names
    spec = importlib.util.spec_from_file_location("convert_hf_to_gguf", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    do_without_sentencepiece(Path(sys.argv[1]))
    if facts["rule"]:
        name_rule(module, facts["rule"])
    complete_settings(module)
    complete_special_tokens(facts)
    module.main()


if __name__ == "__main__":
    main()
