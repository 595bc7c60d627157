"""The first checks of a run, before it imports torch."""

import importlib.util
import os
from pathlib import Path

from distributed_training.cli import checks
from distributed_training.errors import MissingRequirement, UserError
from distributed_training.files.user_files import check_readable, read_user_json
from distributed_training.known_models import EMBEDDED_MODEL
from distributed_training.optimizers import OPTIMIZERS
from distributed_training.settings.model import ModelSettings
from distributed_training.settings.settings import Settings

# Files of a model folder that a run reads; a Trainer's checkpoint also has others.
MODEL_FILES = """
    config.json generation_config.json model*.safetensors* pytorch_model*.bin* tokenizer* vocab*
    merges.txt special_tokens_map.json added_tokens.json *.jinja *.model *.tiktoken
    """.split()


def check_run(settings: Settings, is_restart: bool) -> None:
    """Check what the run needs: model, data, writable folders, a checkpoint, packages.

    Args:
        is_restart: whether --auto_micro_batch has started this program again.
    """
    check_model_path(settings.model)
    checks.check_data_paths(settings.data)
    # These two write no results, and may run where the run's disks and packages are missing.
    if settings.command.prefetch or settings.command.show_sample:
        return
    # --check may be given with the folders of an existing run. A restarted program has its own.
    if settings.command.replay:
        checks.check_replay(str(settings.output.output_dir))
    elif not settings.command.check and not is_restart:
        eval_only = settings.training.eval_only
        checks.check_output_dir(settings.output, eval_only)
        checks.check_export_folder(settings.output, eval_only, settings.model.model, settings.data)
    if settings.output.resume and not os.path.exists(settings.output.resume):
        raise UserError(f"--resume {settings.output.resume}: there is no such checkpoint.")
    checks.check_nvme_path(settings.parallelism.nvme_path)
    packages = {
        **{f"--report_to {name}": name for name in settings.output.report_to},
        "--lora_r": "peft" if settings.model.lora_r else None,
        f"--optim {settings.training.optim}": OPTIMIZERS[settings.training.optim].package,
        "--load_in_4bit": "bitsandbytes" if settings.model.load_in_4bit else None,
    }
    for flag, package in packages.items():
        if package and importlib.util.find_spec(package) is None:
            raise MissingRequirement(f"{flag} needs {package}: pip install {package}.")


def check_model_path(model_settings: ModelSettings) -> None:
    """Check that a model given as a folder exists and is a Hugging Face model.

    Raises:
        UserError: there is no such folder, or it holds no config.json or an invalid one; or
            --model_revision is given for a model that is not on the hub.
    """
    model = model_settings.model
    is_local = checks.is_local_model(model)
    if model_settings.model_revision and (is_local or model == EMBEDDED_MODEL):
        raise UserError(
            f"--model_revision is for models on the hub, and --model {model} is not one: "
            "leave it out."
        )
    if is_local and not os.path.isdir(model):
        raise UserError(f"--model {model}: no such folder.")
    if is_local and not Path(model, "config.json").is_file():
        from distributed_training.cli.model_folders import advice_without_config  # after an error

        advice = advice_without_config(model)
        raise UserError(
            f"--model {model}: the folder has no config.json, so it is no model: {advice}"
        )
    if is_local:
        read_user_json("--model", f"{model}/config.json")
        check_readable("--model", model, MODEL_FILES)
