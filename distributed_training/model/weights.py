"""Weights of a model: checked and read from a folder, drawn from the seed, saved for the ranks."""

import copy
import pickle
import re
import tempfile
from pathlib import Path

import torch
import transformers
from packaging.version import Version
from safetensors import SafetensorError
from torch import nn
from torch._subclasses import fake_tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from distributed_training import console
from distributed_training.errors import OutOfMemory, UserError, first_line, look_up, refused_as
from distributed_training.files import weight_files
from distributed_training.files.atomic import TemporaryFolder
from distributed_training.files.safetensors_writer import save_file
from distributed_training.ranks.context import DistContext
from distributed_training.strategies.strategy import Strategy

# Errors of a forward pass with fake tensors that do not show an error of the model.
NOT_WITH_FAKE_TENSORS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
# Of transformers and the libraries that it reads weights with.
LOADING_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    EOFError,
    ImportError,
    SafetensorError,
    pickle.UnpicklingError,
)
TIE = "tie_word_embeddings"  # the key of a configuration
NOT_BUILT = "{}: no model can be built from the values in its config.json"
FLOATS = re.compile(r"(F|float)(16|32|64)$")  # types of weights that are not quantized
# Without this, transformers asks on the terminal whether to run remote code.
NO_REMOTE_CODE = {"trust_remote_code": False}


def weights_dtype(strategy: Strategy, adapters: bool, ctx: DistContext) -> torch.dtype:
    """Return the dtype of a model's weights in memory, before an engine converts them.

    Weights that are updated need fp32. Frozen weights under adapters have the computations' dtype.

    Args:
        adapters: only adapters are trained.
    """
    return ctx.dtype if adapters and strategy.mixes_dtypes() else torch.float32


def check_folder(folder: str, config: PretrainedConfig, what: str) -> bool:
    """Check the weight files of a folder before they are read, once for all ranks of a node.

    Args:
        what: what the user has given, for messages (--model NAME).
    Returns:
        Whether the output layer differs from the embedding, although the configuration ties them.
    Raises:
        UserError: a file is missing, damaged or outside the folder, or no model can be built.
    """
    if Path(folder, "adapter_config.json").is_file():  # transformers would load them as well
        raise UserError(
            f"{what}: the folder has adapters (adapter_config.json) and a whole model. "
            "Remove the files of the adapters, or merge them into the model."
        )
    named = getattr(config, "transformers_weights", None)
    tensors = weight_files.tensors_in(weight_files.weight_files(Path(folder), named))
    packed = [n for n in tensors if n.endswith("weight") and not FLOATS.search(tensors[n].dtype)]
    if packed and not getattr(config, "quantization_config", None):
        from distributed_training.model import quantized

        raise quantized.refusal(what, f"{packed[0]} has the type {tensors[packed[0]].dtype}")
    if not any(getattr(part, TIE, False) for part in (config, config.get_text_config())):
        return False
    with torch.device("meta"), refused_as(NOT_BUILT.format(what)):
        model = from_config(config)
    head = model.get_output_embeddings()
    names = []  # of the weight that is shared
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if head is not None and parameter is head.weight:
            # Files of a model without its output layer lack the first part of the names.
            names += [path, path.removeprefix(f"{model.base_model_prefix}.")]
    return weight_files.has_own_head(tensors, names)


def untie(config: PretrainedConfig) -> None:
    """Give the output layer its own weight, in the whole configuration and in its language part."""
    for part in (config, config.get_text_config()):
        setattr(part, TIE, False)


def from_folder(
    folder: str,
    config: PretrainedConfig,
    dtype: torch.dtype | str = torch.float32,
    in_4bit: torch.device | None = None,
) -> tuple[PreTrainedModel, dict]:
    """Load a model and its loading info from a local folder.

    Args:
        in_4bit: a device on which the weights of linear layers are kept in 4 bits; None: they are
            loaded on the CPU in `dtype`.
    Raises:
        UserError: the files cannot be loaded, or a weight has another shape in the configuration.
    """
    options = {**as_dtype(dtype), **NO_REMOTE_CODE}
    if in_4bit:
        from distributed_training.model.four_bit import quantization  # only with the flag

        config = copy.deepcopy(config)  # transformers writes the quantization into it
        options["device_map"] = {"": in_4bit}
        options["quantization_config"] = quantization(dtype)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            output_loading_info=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are in the info, and refused below by their names
            **options,
        )
    except LOADING_ERRORS as error:
        if isinstance(look_up(error), OutOfMemory):
            raise
        raise UserError(
            f"The weights in {folder} cannot be loaded (--model): {first_line(error)}"
        ) from error
    for mismatch in sorted(info["mismatched_keys"]):
        # transformers 4 returns names only, and version 5 names and shapes.
        name, saved, *_ = (mismatch, "another") if isinstance(mismatch, str) else mismatch
        raise UserError(
            f"The weights in {folder} do not fit its config.json: the shape of {name} is "
            f"{saved if isinstance(saved, str) else list(saved)} in the file, and "
            f"{list(model.get_parameter(name).shape)} by the configuration. Take both from the "
            "same model."
        )
    return model, info


def report_differences(folder: str, model: nn.Module, info: dict) -> None:
    """Report weights that the files lack, and tensors that the model does not have.

    Args:
        model: as loaded from the folder, without adapters.
        info: what `from_folder` returns about the loading.
    Raises:
        UserError: the files lack more than half of the weights.
    """
    missing, ignored = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if 2 * len(missing) > (count := len(list(model.parameters()))):
        others = f", but {', '.join(ignored[:3])}" if ignored else ""
        raise UserError(
            f"{folder} lacks {len(missing)} of the {count} model weights, {missing[0]} among "
            f"them{others}: take config.json and weights from the same model, or use "
            "--from_scratch."
        )
    if missing:
        console.warn(
            f"{folder} lacks {len(missing)} weight(s) of the model, {missing[0]} among them: they "
            "are random. If config.json does not fit the files, correct it (tie_word_embeddings, "
            "the number of layers)."
        )
    if ignored:
        console.warn(
            f"{folder} has {len(ignored)} tensor(s) that are not part of the model, {ignored[0]} "
            "among them: they are ignored."
        )


def from_config(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a newly initialized model."""
    # A copy, because transformers writes the dtype into the configuration that it gets.
    return AutoModelForCausalLM.from_config(
        copy.deepcopy(config), **as_dtype(dtype), **NO_REMOTE_CODE
    )


def as_dtype(dtype: torch.dtype | str) -> dict:
    """Return the keyword argument for the dtype of the weights; transformers 4.56 renamed it."""
    renamed = Version(transformers.__version__) >= Version("4.56")
    return {"dtype" if renamed else "torch_dtype": dtype}


def save_temporarily(config: PretrainedConfig, model: nn.Module | None) -> str:
    """Save a configuration and weights to a folder that the run removes; return the folder."""
    temporary = TemporaryFolder(
        Path(tempfile.gettempdir()), "distributed_training_weights_", mode=0o700
    )
    # model.save_pretrained writes nothing on ranks other than 0, but every node needs the folder.
    config = copy.deepcopy(config)
    config.update(as_dtype(torch.float32))
    config.save_pretrained(temporary.path)
    if model:
        tensors = {**dict(model.named_parameters()), **persistent_buffers(model)}
        save_file(tensors, temporary.path / "model.safetensors")
    return str(temporary.path)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are saved with the weights; most models have none."""
    # Under FSDP, model.state_dict() would reshard the gathered parameters on the calling rank only.
    return {
        f"{path}.{name}".removeprefix("."): buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
