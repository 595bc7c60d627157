"""Packages of distributed_training/ import each other in one direction, also inside functions.

Imports under `if TYPE_CHECKING:` never run, and do not count.
"""

import ast
import functools
import graphlib
import importlib
import re
from pathlib import Path

from syntax import nodes_of

from distributed_training import PROJECT

# From the top to the bottom: a package or module imports only from lower lines.
ORDER = [
    *(
        ["startup"],
        ["chat", "commands", "planner", "replay"],
        ["choice"],
        ["report"],
        ["balance", "checkpoints"],
        ["model"],
        ["data"],
    ),
    *(["cluster", "memory", "other_optimizers"], ["cli"], ["settings"], ["strategies"]),
    ["workload"],
    *(["files", "programs"], ["process"], ["errors"]),
    ["console", "entry_points", "known_models", "optimizers", "patches", "text_tables"],
    ["gpu_generations", "loss_chunks", "train_state", "units"],
    ["rank_shares"],
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def imports_of(file: Path) -> set[str]:
    """The modules of support that a file imports, as "package.module"."""
    names = set()
    for node in nodes_of(file):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.removeprefix("support.") for name in names if name.startswith("support.")}


@functools.cache
def modules() -> dict[str, set[str]]:
    """The imports of every module of support."""
    files = {
        ".".join(file.relative_to(PROJECT / "support").with_suffix("").parts): file
        for file in (PROJECT / "support").rglob("*.py")
        if file.name != "__init__.py"
    }
    return {name: imports_of(file) & set(files) for name, file in files.items()}


def test_packages_import_from_lower_levels_only():
    assert {name.partition(".")[0] for name in modules()} == set(LEVEL)
    packages = {
        (name.partition(".")[0], imported.partition(".")[0])
        for name, imports in modules().items()
        for imported in imports
    }
    assert not {(a, b) for a, b in packages if a != b and LEVEL[a] >= LEVEL[b]}


def test_no_cycle_of_modules():
    graphlib.TopologicalSorter(modules()).prepare()


def test_nothing_in_support_imports_the_script_or_scripts():
    above = {file.stem for file in [*PROJECT.glob("*.py"), *(PROJECT / "scripts").glob("*.py")]}
    for file in (PROJECT / "support").rglob("*.py"):
        for node in nodes_of(file):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in above, file


def test_shell_scripts_and_job_scripts_import_what_exists():
    """No linter reads the Python in them."""
    files = [*PROJECT.glob("*.sh"), PROJECT / "Makefile", *(PROJECT / "support").rglob("*.jinja")]
    found = 0
    for file in files:
        for module, names in re.findall(r"from (support[\w.]*) import ([\w, ]+)", file.read_text()):
            imported = importlib.import_module(module)
            for name in names.split(", "):
                found += 1
                assert hasattr(imported, name) or importlib.import_module(f"{module}.{name}"), file
    assert found > 5
