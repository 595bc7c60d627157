"""Why transformers cannot read a model's configuration or tokenizer, and what to do about it.

Imported after an error only. transformers advises to trust remote code, which this project never
runs, or to install a package that does not help.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import tokenizers
import transformers

from distributed_training.errors import MissingRequirement, UserError
from distributed_training.files.user_files import read_text, read_user_json, shown

VERSION = transformers.__version__
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/=]+ [0-9]+\s")  # a token in base64, and its rank


def explain_config(folder: str, what: str) -> None:
    """Raise a UserError if the reason why a configuration cannot be read is known."""
    config = read_user_json("The file", str(Path(folder, "config.json")))
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in transformers.CONFIG_MAPPING:
        return
    if config.get("auto_map"):
        raise UserError(
            f"{what}: the model needs code of its own (auto_map in its config.json), which this "
            "project does not run: use a model whose model_type transformers knows."
        )
    if kind is None:
        raise UserError(
            f"{what}: its config.json has no model_type: take the file of the original model."
        )
    raise UserError(
        f"{what}: transformers {VERSION} does not know the model_type {shown(kind)} of its "
        "config.json: pip install --upgrade transformers, if the model is newer."
    )


def explain_tokenizer(folder: Path, what: str, error: Exception) -> None:
    """Raise a UserError if the reason why a tokenizer cannot be read is known.

    Args:
        error: of transformers.
    """
    _name_damaged_file(folder)
    _name_missing_package(folder, what)
    file = folder / "tokenizer_config.json"
    settings = read_user_json("The file", str(file)) if file.is_file() else {}
    name = settings.get("tokenizer_class")
    is_known = name is None or any(hasattr(transformers, f"{name}{end}") for end in ("", "Fast"))
    if not is_known and settings.get("auto_map"):
        remedy = "use a copy of the model that has a tokenizer.json, without such code."
        if (folder / "tokenizer.json").is_file():
            remedy = (
                "to use its tokenizer.json alone, remove auto_map and set tokenizer_class to "
                "PreTrainedTokenizerFast."
            )
        raise UserError(
            f"{what}: the tokenizer needs code of its own (auto_map in {shown(file)}), which this "
            f"project does not run: {remedy}"
        )
    has_list = isinstance(settings.get("extra_special_tokens"), list)
    if int(VERSION.partition(".")[0]) < 5 and (name == "TokenizersBackend" or has_list):
        raise UserError(
            f"{what}: transformers 5 wrote its tokenizer files, which {VERSION} cannot read: pip "
            f"install --upgrade transformers. Or, in {shown(file)}, set tokenizer_class to "
            "PreTrainedTokenizerFast, and rename extra_special_tokens to additional_special_tokens."
        )
    if not is_known:
        raise UserError(
            f"{what}: transformers {VERSION} does not know the class {shown(name)} of its "
            "tokenizer: pip install --upgrade transformers, if the model is newer."
        )
    if "untagged enum" in str(error):  # a value of tokenizer.json that no release before had
        raise UserError(
            f"{what}: its tokenizer.json was changed, or written by a newer release of the package "
            f"tokenizers than {tokenizers.__version__}: copy it again, or pip install --upgrade "
            "tokenizers transformers."
        )


def _name_damaged_file(folder: Path) -> None:
    """Raise a UserError that names the tokenizer's file that is not JSON or text, if there is one.

    The messages of the libraries do not name the file.
    """
    for name in ("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"):
        for file in sorted(folder.glob(name)):
            read_user_json("The tokenizer's file", str(file))
    for file in (*sorted(folder.glob("*.jinja")), folder / "merges.txt"):
        if file.is_file():
            read_text("The tokenizer's file", str(file))


def _name_missing_package(folder: Path, what: str) -> None:
    """Raise a UserError if the only file of a vocabulary needs a package that is not installed."""
    files = sorted(folder.glob("*.model"))
    if (folder / "tokenizer.json").is_file() or not files:
        return
    package = "tiktoken" if TIKTOKEN_LINE.match(files[0].read_bytes()) else "sentencepiece"
    if not find_spec(package):
        raise MissingRequirement(f"{what}: {files[0].name} needs {package}: pip install {package}.")
