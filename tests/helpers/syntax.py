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
