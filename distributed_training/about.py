"""The version of the project, and where its files are."""

from pathlib import Path

VERSION = "0.8.0"  # the only place; pyproject.toml reads it
PACKAGE = Path(__file__).resolve().parent
# The folder of real_model_example.py, tools/, scripts/ and ds_config_*.json: of the clone, or
# what pip has installed of it (pyproject.toml).
PROJECT = PACKAGE / "project" if (PACKAGE / "project").is_dir() else PACKAGE.parent
