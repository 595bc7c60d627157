"""The size of what a newcomer reads: the script, and the modules of a plain run."""

import ast

from syntax import imported_at_once

from support import PROJECT

SCRIPT = PROJECT / "real_model_example.py"
# Raise none of these numbers. Lower the last two when a change allows it: the aim is 9,000 lines.
SCRIPT_LINES, IMPORTED_NAMES, LOOP_LINES = 600, 15, 40
MODULES, LINES = 48, 10_960


def test_the_script_can_be_read_at_once():
    tree = ast.parse(SCRIPT.read_text())
    names = [
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("support")
        for alias in node.names
    ]
    assert len(names) <= IMPORTED_NAMES, names
    assert len(SCRIPT.read_text().splitlines()) <= SCRIPT_LINES


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
    assert {name: lines for name, lines in screens.items() if lines > 50} == {}


def test_a_plain_run_imports_few_modules():
    waiting, found = [SCRIPT], {}
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found[file] = len(file.read_text().splitlines())
        for name in imported_at_once(file):
            module = PROJECT / f"{name.replace('.', '/')}.py"
            waiting += [
                path for path in (module, module.with_suffix("") / "__init__.py") if path.is_file()
            ]
            parent = PROJECT / f"{name.rpartition('.')[0].replace('.', '/')}.py"
            waiting += [parent] if parent.is_file() else []
    del found[SCRIPT]
    assert len(found) <= MODULES and sum(found.values()) <= LINES
