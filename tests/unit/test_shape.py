"""The size of what a newcomer reads: the script, and the modules of a plain run."""

import ast
import itertools

import pytest
from syntax import imported_at_once

from support import PROJECT

SCRIPT = PROJECT / "real_model_example.py"
# Raise none of these numbers. The last two are of all modules that the script imports at once.
SCRIPT_LINES, IMPORTED_NAMES, LOOP_LINES = 600, 15, 40
MODULES, LINES = 55, 9_000


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


# Where a feature is implemented: the functions that a reader follows, each of which calls the next one.
PATHS = {
    "--save_every": [
        "real_model_example.py:save_or_stop",
        "support/report/run.py:save",
        "support/checkpoints/manager.py:save",
        "support/checkpoints/manager.py:_write",
        "support/checkpoints/saving.py:write_shards",
    ],
    "--packing": [
        "real_model_example.py:train",
        "support/data/opening.py:open_dataset",
        "support/data/opening.py:open_tokenized",
        "support/data/corpus.py:open_corpus",
        "support/data/corpus.py:split_sequences",
        "support/data/sequences.py:pack",
    ],
    "the loss": [
        "real_model_example.py:train_epoch_ddp",
        "support/report/run.py:log_step",
        "support/report/run.py:flush",
        "support/report/run.py:_log",
        "support/report/metrics_file.py:append",
    ],
    "the configuration of zero2": [
        "real_model_example.py:train",
        "support/strategies/deepspeed.py:configure",
        "support/strategies/deepspeed.py:_complete",
        "support/cli/ds_config.py:complete_ds_config",
    ],
}
MOST_FILES = {"--save_every": 4, "--packing": 5, "the loss": 3, "the configuration of zero2": 3}


@pytest.mark.parametrize("path", PATHS)
def test_a_feature_is_in_few_files(path):
    places = [place.split(":") for place in PATHS[path]]
    assert len({file for file, _ in places}) <= MOST_FILES[path]
    for (file, name), (_, following) in itertools.pairwise([*places, ("", "")]):
        tree = ast.parse((PROJECT / file).read_text())
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name]
        assert functions, f"{file} has no function {name}"
        mentioned = {
            node.id if isinstance(node, ast.Name) else node.attr
            for function in functions
            for node in ast.walk(function)
            if isinstance(node, ast.Name | ast.Attribute)
        }
        assert following in {"", *mentioned}, f"{file}:{name} does not call {following}"
