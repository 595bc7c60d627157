"""Damaged values for files of JSON: each key in turn is missing, or has another type or size."""

import copy
from collections.abc import Iterator

from distributed_training.errors import UserError

MISSING = object()
VALUES = [
    *(MISSING, None, True, 0, -1, 3.5, 10**30, 10**400, float("nan"), float("inf")),
    *("", "x", "9" * 5000, "../x", [], [None], [1], ["x"], [[1]], {}, {"a": 1}),
]


def places(value: object, parents: tuple = ()) -> Iterator[tuple]:
    """The path of each key, and of the first item of each list."""
    if isinstance(value, dict):
        inner = list(value.items())
    else:
        inner = list(enumerate(value[:1])) if isinstance(value, list) else []
    for key, item in inner:
        yield (*parents, key)
        yield from places(item, (*parents, key))


def damaged(content: dict) -> Iterator[tuple[str, dict]]:
    """Yield what is damaged, and the content with this damage."""
    for path in places(content):
        for value in VALUES:
            changed = copy.deepcopy(content)
            parent = changed
            for key in path[:-1]:
                parent = parent[key]
            if value is MISSING:
                del parent[path[-1]]
            else:
                parent[path[-1]] = value
            yield f"{path}: {'missing' if value is MISSING else repr(value)[:40]}", changed


def errors_of(content: dict, read) -> list[str]:
    """The errors of read(content with a damage) that are none for a user."""
    found = []
    for damage, changed in damaged(content):
        try:
            read(changed)
        except UserError:
            continue
        except Exception as error:
            found.append(f"{damage}: {type(error).__name__}: {str(error)[:80]}")
    return found
