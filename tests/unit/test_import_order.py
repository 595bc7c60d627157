"""The packages of distributed_training import each other in one direction, also inside functions.
The tools import the package, which does not import them, and no tool imports another.

Imports under `if TYPE_CHECKING:` never run, and count only where a folder may be missing.
"""

import ast
import functools
import graphlib
import importlib
import re
from pathlib import Path

import pytest
from syntax import nodes_of

from distributed_training import PACKAGE, PROJECT

# From the top to the bottom: a package or module imports only from lower lines.
ORDER = [
    ["run", "trained", "planning"],
    ["records"],
    ["checkpoints", "entry"],
    ["model"],
    ["data", "print_flags"],
    ["memory", "ranks"],
    ["cli"],
    ["settings"],
    ["strategies"],
    ["arguments", "programs", "workload"],
    ["files", "optimizers", "process", "train_state"],
    [
        *("console", "entry_points", "errors", "hardware", "hooks", "known_models"),
        *("loss_chunks", "model_parts", "patches", "pending_copy", "rank_shares", "text_tables"),
        "units",
    ],
    ["about"],
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
TOOLS = sorted(path.parent.name for path in PROJECT.glob("tools/*/__init__.py"))
# Modules in tools/ that every tool may import. tools/hooks.py imports the tools.
SHARED = {"tools.plotting"}


def imports_of(nodes) -> set[str]:
    """Return what is imported, as "package.module" and "package.module.name".

    A text counts if it is the argument of import_module and the like.
    """
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {f"{module}.{alias.name}" for alias in node.names} | {module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__", "run_module", "find_spec"):
                names.add(str(node.args[0].value))
    return names


def all_imports(file: Path) -> set[str]:
    """Return what a file imports, also for types only."""
    return imports_of(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


@functools.cache
def modules() -> dict[str, set[str]]:
    """The imports between the modules of distributed_training and tools."""
    files = {
        ".".join(file.relative_to(PROJECT).with_suffix("").parts): file
        for folder in (PACKAGE, PROJECT / "tools")
        for file in folder.rglob("*.py")
        if file.name != "__init__.py"
    }
    return {name: imports_of(nodes_of(file)) & set(files) for name, file in files.items()}


def test_packages_import_from_lower_levels_only():
    own = {
        (name.split(".")[1], imported.split(".")[1])
        for name, imports in modules().items()
        for imported in [name, *imports]
        if name.startswith("distributed_training.")
    }
    assert {name for name, _ in own} == set(LEVEL)
    assert not {(a, b) for a, b in own if a != b and LEVEL[a] >= LEVEL[b]}


def test_no_cycle_of_modules():
    graphlib.TopologicalSorter(modules()).prepare()


def test_the_package_imports_no_tool_and_no_program():
    programs = {file.stem for file in [*PROJECT.glob("*.py"), *PROJECT.glob("scripts/*.py")]}
    above = {"tools", "scripts", "tests", *programs}
    for file in PACKAGE.rglob("*.py"):
        assert not {name.partition(".")[0] for name in all_imports(file)} & above, file


def of_other_tools(file: Path, tool: str | None) -> set[str]:
    """Return the modules of tools/ that a file imports, except those of `tool` and SHARED."""
    own = {f"tools.{tool}"} if tool else set()
    allowed = tuple(f"{name}." for name in own | SHARED)
    return {
        name
        for name in all_imports(file)
        # "tools" alone comes from `from tools import name`, which is also listed as tools.name.
        if name.startswith(("tools.", "..")) and not f"{name}.".startswith(allowed)
    }


@pytest.mark.parametrize("tool", TOOLS)
def test_no_tool_and_no_unit_test_of_it_imports_another_tool(tool):
    tests = PROJECT / "tests" / "unit" / "tools" / tool
    for file in [*(PROJECT / "tools" / tool).rglob("*.py"), *tests.rglob("*.py")]:
        assert not of_other_tools(file, tool), file


def test_what_tools_share_and_the_unit_tests_of_the_package_import_no_tool():
    shared = [PROJECT / f"{name.replace('.', '/')}.py" for name in SHARED]
    for file in [*shared, *PROJECT.glob("tests/unit/test_*.py")]:
        assert not of_other_tools(file, None), file
    assert {path.stem for path in PROJECT.glob("tools/*.py")} == {
        *("__init__", "hooks"),
        *(name.removeprefix("tools.") for name in SHARED),
    }


def test_an_import_of_another_tool_is_found(tmp_path):
    file = tmp_path / "module.py"
    for line in (
        "from tools import plan",
        "from tools.plan import cost",
        "import tools.plan.cost",
        "import_module('tools.plan.cost')",
        "def f():\n    from tools.plan.cost import rate",
        "if TYPE_CHECKING:\n    from tools.plan.cost import Rate",
    ):
        file.write_text(line)
        assert of_other_tools(file, "runs") and not of_other_tools(file, "plan"), line
    for line in ("from tools.planner import x", "from .. import runs"):
        file.write_text(line)
        assert of_other_tools(file, "plan"), line


def test_each_tool_is_listed_and_has_a_page():
    index = (PROJECT / "tools" / "__init__.py").read_text()
    table = (PROJECT / "tools" / "README.md").read_text()
    for tool in TOOLS:
        assert re.search(rf"^{tool} ", index, re.MULTILINE) and f"({tool}/README.md)" in table
        page = (PROJECT / "tools" / tool / "README.md").read_text().splitlines()
        assert page[0].startswith("# ") and len(page) <= 50, tool


def test_shell_scripts_and_job_scripts_import_what_exists():
    """No linter reads the Python in them."""
    files = [*PROJECT.glob("*.sh"), PROJECT / "Makefile", *PROJECT.glob("tools/**/*.jinja")]
    found = 0
    for file in files:
        pattern = r"from ((?:distributed_training|tools)[\w.]*) import ([\w, ]+)"
        for module, names in re.findall(pattern, file.read_text()):
            imported = importlib.import_module(module)
            for name in names.split(", "):
                found += 1
                assert hasattr(imported, name) or importlib.import_module(f"{module}.{name}"), file
    assert found > 5
