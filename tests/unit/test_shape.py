"""What a newcomer reads: the script, its functions and its loops; what a strategy is stands in its
folder.
"""

import ast
import re

import pytest

from distributed_training import PROJECT
from distributed_training.strategies.table import STRATEGIES
from real_model_example import ENGINES, Engine

SCRIPT = PROJECT / "real_model_example.py"
LOOP_LINES, SCREEN_LINES, BUILD_LINES = 40, 50, 45
# Code that knows an engine or a strategy: by its name, its row, or an attribute of its library.
ASKS = re.compile(
    r"""STRATEGIES\[ | \bengine\b\s*[!=]= | (args|parallelism)\.strategy\s*([!=]=|in\b)
    | (has|get)attr\([^)]*"(ds_|fp32_partitioned|ipg_|set_requires_gradient_sync)""",
    re.VERBOSE,
)
ASKED = 4  # at most, in all files outside of distributed_training/strategies and the script
WITH_ALL_SETTINGS = 30


def test_each_training_loop_fits_on_a_screen():
    functions = {
        node.name: node
        for node in ast.parse(SCRIPT.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    for name in ("train_epoch_ddp", "train_epoch_deepspeed"):
        [loop] = [node for node in functions[name].body if isinstance(node, ast.For)]
        assert loop.end_lineno - loop.lineno < LOOP_LINES, name
    screens = {name: node.end_lineno - node.lineno + 1 for name, node in functions.items()}
    assert {name: lines for name, lines in screens.items() if lines > SCREEN_LINES} == {}


def test_each_build_function_can_be_read_alone():
    functions = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.parse(SCRIPT.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("build_")
    }
    assert {f"build_{row.engine}" for row in STRATEGIES.values()} < {*functions}
    assert max(functions.values()) <= BUILD_LINES, functions


def test_each_engine_has_a_build_function_and_a_training_loop():
    """An engine without one is an error, and not trained by the loop of another."""
    assert {row.engine for row in STRATEGIES.values()} == {*ENGINES}
    with pytest.raises(TypeError, match="train_epoch"):
        Engine(build=ENGINES["ddp"].build)


def test_only_the_strategies_know_an_engine():
    files = [*(PROJECT / "distributed_training").rglob("*.py")]
    files += [file for file in (PROJECT / "tools").rglob("*.py") if "benchmarks" not in file.parts]
    found = [
        f"{file.relative_to(PROJECT)}:{number}: {line.strip()}"
        for file in files
        if "strategies" not in file.parts
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if ASKS.search(line)
    ]
    assert len(found) <= ASKED, "\n".join(found)


def test_few_functions_take_all_settings():
    """The others take the section or the values that they use, which their signature shows."""
    files = [SCRIPT, *(PROJECT / "distributed_training").rglob("*.py")]
    takes_all = [
        f"{file.name}: {node.name}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(
            argument.annotation and re.search(r"\bSettings\b", ast.unparse(argument.annotation))
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        )
    ]
    assert 0 < len(takes_all) <= WITH_ALL_SETTINGS, takes_all


def test_each_module_is_in_the_index_of_its_package():
    # The engines' folders have the same parts, which distributed_training/strategies lists.
    for index in (
        PROJECT / "distributed_training" / "__init__.py",
        *PROJECT.glob("distributed_training/*/__init__.py"),
    ):
        text = ast.get_docstring(ast.parse(index.read_text())) or ""
        listed = set(re.findall(r"\w+", text))
        modules = {path.stem for path in index.parent.glob("*.py")} - {"__init__"}
        modules |= {path.parent.name for path in index.parent.glob("*/__init__.py")}
        assert modules <= listed, f"{index.parent.name}: {modules - listed}"
