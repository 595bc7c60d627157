"""The syntax trees of the project's files, each parsed once for all tests."""

import ast
import functools
from pathlib import Path


@functools.cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a file, without the bodies of `if TYPE_CHECKING:`, which never run."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    return tuple(ast.walk(tree))


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
