"""What a newcomer reads first: the script, its functions and its training loops."""

import ast

from support import PROJECT

SCRIPT = PROJECT / "real_model_example.py"
IMPORTED_NAMES, LOOP_LINES, SCREEN_LINES = 16, 40, 50


def test_the_script_imports_few_names():
    tree = ast.parse(SCRIPT.read_text())
    names = [
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("support")
        for alias in node.names
    ]
    assert len(names) <= IMPORTED_NAMES, names


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
