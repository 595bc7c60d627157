"""Packages of support/ import each other in one direction, also inside functions.

Imports under `if TYPE_CHECKING:` never run, and do not count.
"""

import ast
import functools
import graphlib
from pathlib import Path

from syntax import nodes_of

from support import PROJECT

# From the top to the bottom: a package or module imports only from lower lines.
ORDER = [
    ["startup"],
    ["commands"],
    ["report"],
    ["checkpoints"],
    ["strategies"],
    ["data", "model"],
    ["cluster", "memory"],
    ["cli"],
    ["files", "process"],
    ["console", "errors"],
    [
        "chunks",
        "entry_points",
        "known_models",
        "labels",
        "patches",
        "progress",
        "redaction",
        "strategy",
        "optimizers",
        "text_tables",
        "train_state",
        "units",
        "unwrap",
        "versions",
    ],
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
# Imports against the order, as (from, to). Remove a pair as soon as its import is gone.
KNOWN: set[tuple[str, str]] = set()


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


def test_every_package_has_a_place_in_the_order():
    assert {name.partition(".")[0] for name in modules()} == set(LEVEL)


def test_packages_import_from_lower_levels_only():
    packages = {
        (name.partition(".")[0], imported.partition(".")[0])
        for name, imports in modules().items()
        for imported in imports
    }
    upward = {(a, b) for a, b in packages if a != b and LEVEL[a] >= LEVEL[b]}
    assert upward == KNOWN


def test_no_cycle_of_modules():
    graphlib.TopologicalSorter(modules()).prepare()


def test_nothing_in_support_imports_the_script_or_scripts():
    above = {file.stem for file in [*PROJECT.glob("*.py"), *(PROJECT / "scripts").glob("*.py")]}
    for file in (PROJECT / "support").rglob("*.py"):
        for node in nodes_of(file):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in above, file


# Libraries that only some runs need, and those that take long to import.
ON_DEMAND = (
    *("accelerate", "datasets", "deepspeed", "peft", "wandb", "yaml"),
    *("http", "urllib.request", "email"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.checkpoint"),
    *("torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.tensorboard"),
)


def imported_at_once(file: Path) -> set[str]:
    """The modules that importing a file imports, outside functions and `if TYPE_CHECKING:`."""
    nodes, names = list(ast.iter_child_nodes(nodes_of(file)[0])), set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif not isinstance(node, ast.FunctionDef):
            nodes += ast.iter_child_nodes(node)
    return names


def test_libraries_for_some_runs_are_imported_where_they_are_used():
    files = [PROJECT / "real_model_example.py", *(PROJECT / "support").rglob("*.py")]
    at_once = {(file.name, name) for file in files for name in imported_at_once(file)}
    assert {
        (file, name)
        for file, name in at_once
        if f"{name}.".startswith(tuple(f"{library}." for library in ON_DEMAND))
    } == set()
