"""The version of the project, and where its files are."""

from pathlib import Path

VERSION = "0.8.0"  # the only place; pyproject.toml reads it
PACKAGE = Path(__file__).resolve().parent
# The folder of real_model_example.py, tools/, scripts/ and ds_config_*.json: of the clone, or
# what pip has installed of it (pyproject.toml).
INSTALLED = (PACKAGE / "project").is_dir()
PROJECT = PACKAGE / "project" if INSTALLED else PACKAGE.parent
# The commands that pip installs for the programs of the project (pyproject.toml, entry_points.py).
COMMANDS = {
    "real_model_example.py": "distributed-training",
    "compare_strategies.sh": "compare-strategies",
    "scripts/chat.py": "chat-run",
    "scripts/build_ops.py": "build-ops",
    "scripts/compare_runs.py": "compare-runs",
    "scripts/convert_checkpoint.py": "convert-checkpoint",
    "scripts/distributed_setup.py": "distributed-setup",
    "scripts/hand_over.py": "hand-over",
    "scripts/plan_memory.py": "plan-memory",
    "scripts/report.py": "report-run",
}


def command_of(program: str) -> str:
    """Return what the user types to start a Python program: in a clone its path, else a command.

    Args:
        program: its path in the project.
    """
    return COMMANDS.get(program, program) if INSTALLED else f"python {program}"


def name_of(program: str) -> str:
    """Return the name of a program for its --help: in a clone that of its file."""
    return (INSTALLED and COMMANDS.get(program)) or Path(program).name
