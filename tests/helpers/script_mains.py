"""The programs behind scripts/: a script only imports main() of its tool and calls it."""

import importlib
import re
from collections.abc import Callable

from project_copy import PROJECT


def main_of(program: str) -> Callable:
    """Return main() of a program, such as scripts/report.py or tools/benchmarks/peers.py."""
    text = (PROJECT / program).read_text(encoding="utf-8")
    imported = re.search(r"^ *from (tools\.[\w.]+) import main$", text, re.MULTILINE)
    own = program.removesuffix(".py").replace("/", ".")
    return importlib.import_module(imported[1] if imported else own).main
