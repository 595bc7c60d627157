"""From the value of --model to its architecture, without PyTorch and without weights."""

from dataclasses import replace
from pathlib import Path

from distributed_training.cli.hub import download_config
from distributed_training.cli.model_folders import advice_without_config
from distributed_training.errors import UserError
from distributed_training.files import weight_files
from distributed_training.files.user_files import read_user_json
from distributed_training.known_models import CONFIGS
from distributed_training.workload.architectures import (
    EMBEDDINGS,
    KNOWN_MODELS,
    Architecture,
    name_on_hub,
    read_architecture,
)


def find_architecture(model: str) -> Architecture:
    """Return the architecture of a known model, a config.json, a folder with one, or a hub's name.

    Weights in the same folder show whether the output layer is tied, as a run finds it out.

    Raises:
        UserError: the file does not exist or is invalid, or the planner does not support its
            family.
    """
    known = {**CONFIGS, **{name: config for name, (_, config) in KNOWN_MODELS.items()}}
    if config := known.get(name_on_hub(model)):
        return read_architecture(config, model)
    file = str(Path(model, "config.json")) if Path(model).is_dir() else model
    if not Path(file).exists():
        if Path(model).is_dir():
            advice = advice_without_config(model)
            raise UserError(f"--model {model}: this folder has no config.json: {advice}")
        shorts = (short for short, _ in KNOWN_MODELS.values())
        file = download_config(model, [*CONFIGS, *shorts])
    architecture = read_architecture(read_user_json("--model", file), file)
    if not architecture.embedding.tied:
        return architecture
    architecture = _with_head(architecture, tied=True, unconfirmed=not Path(model).exists())
    return _as_in_weights(architecture, Path(file).parent)


def _as_in_weights(architecture: Architecture, folder: Path) -> Architecture:
    """Return a tied architecture as the weights in a folder have it, if they can be read."""
    embedding = EMBEDDINGS[architecture.family]
    try:
        tensors = weight_files.tensors_in(weight_files.weight_files(folder))
    except UserError:  # not here, or damaged, which a run reports
        return architecture
    except ImportError:  # pickled weights, and no PyTorch
        return _with_head(architecture, tied=True, unconfirmed=True)
    # A file of the model without its output layer leaves out the first part of the name.
    names = (embedding, embedding.partition(".")[2])
    tied = not weight_files.has_own_head(tensors, names)
    return _with_head(architecture, tied, unconfirmed=False)


def _with_head(architecture: Architecture, tied: bool, unconfirmed: bool) -> Architecture:
    """Return an architecture with this output layer, see `Embedding`."""
    embedding = replace(architecture.embedding, tied=tied, unconfirmed=unconfirmed)
    return replace(architecture, embedding=embedding)
