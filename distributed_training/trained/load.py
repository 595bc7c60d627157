"""A trained model and its tokenizer in memory, for generation."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distributed_training import arguments, console
from distributed_training.data.special_tokens import number_of_ids
from distributed_training.errors import UserError, explained, first_line
from distributed_training.model import weights
from distributed_training.model.config import read_config
from distributed_training.model.frozen import digest_of_files
from distributed_training.model.library_warnings import shown_as_notices
from distributed_training.model.resolve import be_quiet
from distributed_training.model.stopping import end_ids
from distributed_training.model.tokenizer import read_tokenizer
from distributed_training.ranks import gpus, tuning
from distributed_training.ranks.context import DTYPES
from distributed_training.trained.source import Source, find_source


def open_model(folder: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a trained model with its tokenizer, ready for `model.generate`.

    The model is on the GPU in bf16 (fp16 on older ones); without a GPU it is on the CPU, in bf16 if
    the CPU has instructions for it, else in fp32. Its `generate` takes ids of shape (batch, tokens)
    on `model.device`, and returns ids of shape (batch, tokens + new tokens).

    Args:
        folder: the output folder of a run, whose exported model is loaded; a folder with a model,
            or with LoRA adapters that name their base model; or a name on the Hugging Face hub.
    Returns:
        The model in evaluation mode, and the tokenizer.
    Raises:
        UserError: there is no such model, a file is missing or damaged, or the GPU cannot be used.
    """
    source = find_source(arguments.path("folder", folder))
    device = usable_device()
    with explained():  # out of memory, for example
        model, tokenizer = load(source, device, tuning.choose_precision("auto", device))
    generation = model.generation_config
    ends = sorted(end_ids(tokenizer, generation, is_chat(source, tokenizer)))
    generation.eos_token_id = ends or None
    if generation.pad_token_id is None and ends:  # transformers warns in each call
        generation.pad_token_id = ends[0]
    return model, tokenizer


def is_chat(source: Source, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the model answers in conversations, and does not only continue text.

    Base models have a chat template as well, so a run that trained on text decides.
    """
    return bool(tokenizer.chat_template) and source.is_chat is not False


def usable_device() -> torch.device:
    """Return the GPU, or without one the CPU.

    Raises:
        UserError: this machine has a GPU, and PyTorch cannot use it.
    """
    gpus.require_usable()
    return torch.device("cuda" if gpus.usable_gpus() else "cpu")


def load(
    source: Source, device: torch.device, precision: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model onto a device in evaluation mode, and its tokenizer.

    Args:
        precision: of the weights: "fp32", "bf16" or "fp16".
    Raises:
        UserError: a file is missing or damaged.
    """
    be_quiet(False)
    tokenizer = load_tokenizer(source)
    model = _load_model(source, number_of_ids(tokenizer), DTYPES[precision])
    return model.to(device).eval(), tokenizer


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; adapters may have one with more tokens.

    Raises:
        UserError: a file is missing or damaged.
    """
    own = source.adapters and any(source.adapters.glob("tokenizer*"))
    return read_tokenizer(str(source.adapters if own else source.folder), source.name)


def _load_model(source: Source, ids: int, dtype: torch.dtype) -> PreTrainedModel:
    """Load the weights on the CPU, with those of adapters.

    Args:
        ids: of the tokenizer; the embedding is enlarged to them, as in training.
    """
    folder, what = str(source.folder), source.name
    config = read_config(folder, what)
    if weights.check_folder(folder, config, what):
        weights.untie(config)
    model, info = weights.from_folder(folder, config, dtype)
    weights.report_differences(folder, model, info)
    if added := max(0, ids - model.get_input_embeddings().weight.shape[0]):
        torch.manual_seed(0)
        model.resize_token_embeddings(ids)
        console.warn(f"The model has no weights for {added} ids of its tokenizer: random ones.")
    if source.adapters is None:
        return model
    if source.base_digest not in (None, digest_of_files(source.folder, config)):
        console.warn(
            f"The weights in {folder} are not those that the adapters were trained with: restore "
            "them, or the answers are those of another model."
        )
    return _with_adapters(model, source.adapters)


def _with_adapters(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Attach the adapters in a folder.

    Raises:
        UserError: the files are damaged, or do not fit the model.
    """
    import peft

    try:
        with shown_as_notices():
            return peft.PeftModel.from_pretrained(model, str(folder), torch_device="cpu")
    except weights.LOADING_ERRORS as error:
        raise UserError(
            f"The adapters in {folder} cannot be loaded: {first_line(error, 200)}"
        ) from error
