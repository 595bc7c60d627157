"""Rows that have the keys of a format and are refused: answers that are not to be imitated, and
tools under another key. And the remedies for tables as other programs write them.

A `label` is also the class of a text, so it marks an answer only as false (KTO's form), and not if
the answer is the same word.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping

from distributed_training.files.user_files import shown

# Keys whose value false says that the answer of the row is a bad one, and those whose value true
# does. A number may measure anything, so a score is no mark.
GOOD: tuple[str, ...] = (
    "kto_tag",
    "desirable",
    "is_desirable",
    "preferred",
    "is_preferred",
    "chosen",
    "is_chosen",
)
GOOD += ("accepted", "is_accepted", "good", "is_good", "correct", "is_correct")
BAD = ("rejected", "is_rejected", "undesirable", "is_undesirable", "bad", "is_bad")
LEFT_OUT = ("train", "weight")  # a row that is not to be trained, as messages have them
LABEL = "label"
MARKS = (LABEL, *GOOD, *BAD, *LEFT_OUT)
# A key with an answer that is not to be imitated, and its counterpart.
PAIRS = {
    "rejected": "chosen",
    "rejected_response": "chosen_response",
    "response_rejected": "response_chosen",
    "rejected_output": "chosen_output",
    "rejected_answer": "chosen_answer",
    "rejected_completion": "chosen_completion",
    "rejected_messages": "chosen_messages",
    "rejected_conversations": "chosen_conversations",
    "non_preferred_output": "preferred_output",
    "dispreferred": "preferred",
}
# Keys with the tools of a conversation in other programs' files.
TOOL_KEYS: tuple[str, ...] = (
    "functions",
    "available_tools",
    "available_functions",
    "tool_list",
    "tools_list",
)
TOOL_KEYS += tuple(
    f"{one}_{what}"
    for one in ("tool", "function")
    for what in ("defs", "definitions", "schemas", "specs", "descriptions")
)


def is_checked(column: str) -> bool:
    """Return whether the column of a table is read for the checks of this module."""
    is_pair = column in PAIRS or column in PAIRS.values()
    return is_pair or column in MARKS or bool(re.search("tool|function", column.lower()))


# ------------------------------------------------------------- answers that are not to be imitated


def check_is_good(row: Mapping[str, object], used: Collection[str], answers: Iterable[str]) -> None:
    """Check that nothing marks the answer of a row as one that is not to be imitated.

    Args:
        used: the columns of the row's format.
        answers: those of them that contain the answer.
    Raises:
        ValueError: something does.
    """
    answer = next((row[key] for key in answers if row.get(key) is not None), None)
    for key in MARKS:
        if key in row and key not in used and _is_bad(key, row[key], answer):
            what = "the row" if key in LEFT_OUT else "its answer"
            trainer = "" if key in LEFT_OUT else ", as in data for TRL's KTOTrainer"
            value = shown(json.dumps(row[key]))
            raise ValueError(
                f"{key!r} is {value}, so {what} is not to be imitated{trainer}: leave such rows "
                f"out, or remove {key!r} if it means something else"
            )
    check_is_no_pair(row, used, answer)


def _is_bad(key: str, value: object, answer: object) -> bool:
    if isinstance(value, bool):
        is_class = key == LABEL and isinstance(answer, str) and answer.strip().lower() == "false"
        return value is (key in BAD) and not is_class
    return key == "weight" and isinstance(value, int | float) and value == 0


def check_is_no_pair(
    row: Mapping[str, object], used: Collection[str] = (), answer: object = None
) -> None:
    """Check that a row has no answer that was rejected.

    Args:
        row: its values; of a table without rows, any texts.
        answer: what would be trained. If it is the chosen one, the rejected one is no use.
    Raises:
        ValueError: it has one.
    """
    for rejected, chosen in PAIRS.items():
        is_answer = isinstance(value := row.get(rejected), str | list | dict) and value
        if not is_answer or rejected in used or chosen in used:
            continue
        if answer is None or row.get(chosen) != answer:
            raise ValueError(
                f"{rejected!r} is an answer that is not to be imitated, as in data for TRL's "
                "DPOTrainer: to imitate the chosen answers, write them as 'completion' next to "
                f"'prompt', or as 'messages', without {rejected!r}"
            )
    if "completion" not in row and {"completions", "labels"} <= row.keys():
        raise ValueError(
            "'completions' and 'labels' are steps of which some are wrong, as in data for TRL's "
            "PRMTrainer: write right ones as 'completion'"
        )


def typed(cells: Mapping[str, str], used: Collection[str]) -> dict[str, object]:
    """Return the cells of a CSV file, with marks as the booleans or numbers that they stand for."""
    found: dict[str, object] = {**cells}
    for key in MARKS:
        if key in cells and key not in used:
            word = cells[key].strip().lower()
            if word in ("true", "false"):
                found[key] = word == "true"
            elif re.fullmatch(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?", word):
                found[key] = float(word)
    return found


# ------------------------------------------------------------------------- tools under another key


def check_tools(row: Mapping[str, object], used: Collection[str]) -> None:
    """Check that a row has no tools under a key that is not read.

    Raises:
        ValueError: it has; a model would be trained on calls without their cause.
    """
    for key, value in row.items():
        is_read = key in used or key == "tools"
        if value and not is_read and (key in TOOL_KEYS or are_schemas(value)):
            raise ValueError(
                f"{key!r} has tools, which are read from 'tools' only: rename it, or remove it if "
                "it is something else"
            )


def are_schemas(value: object) -> bool:
    """Return whether a value is a list of functions with their parameters, or JSON text of one."""
    if isinstance(value, str):
        if not value.lstrip().startswith("[") or '"name"' not in value:
            return False
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_schema(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    function = value.get("function", value)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("parameters", function.get("input_schema")), dict)


# ------------------------------------------------------------------------- tables of other programs


def advice_for(row: dict[str, object]) -> str:
    """Return how to convert a table that was read as one row, as a clause; "" if it is none."""
    form = _form_of_pandas(row)
    if form is None:
        return ""
    return (
        f". It is a table as pandas writes it (orient={form!r}): write one row in each line "
        f"(python -c \"import json, pandas; d = json.load(open('FILE')); {TABLES[form]}"
        ".to_json('NEW.jsonl', orient='records', lines=True)\")"
    )


def advice_without_format(row: dict[str, object]) -> str:
    """Do what `advice_for` does, also for an object that has its rows in a list."""
    path = next(lists_in(row), None)
    if (advice := advice_for(row)) or path is None:
        return advice
    return (
        f". It has a list under {path}: if that is the data, write its entries alone, one in each "
        f"line (jq -c {shlex.quote(path + '[]')} FILE > NEW.jsonl)"
    )


# The table of the object d. Not by read_json, which makes dates of texts that look like dates.
TABLES = {
    "list": "pandas.DataFrame(d)",
    "columns": "pandas.DataFrame(d)",
    "index": "pandas.DataFrame(d).T",
    "split": "pandas.DataFrame(d['data'], columns=d['columns'])",
    "table": "pandas.DataFrame(d['data'])",
}


def _form_of_pandas(row: dict[str, object]) -> str | None:
    """Return the `orient` with which pandas writes a table as this object; None: no such one."""
    names, rows, values = row.get("columns"), row.get("data"), list(row.values())
    if isinstance(rows, list) and rows:
        if isinstance(names, list) and all(isinstance(one, list) for one in rows):
            return "split"
        if "schema" in row and all(isinstance(one, dict) for one in rows):
            return "table"
    if values and all(isinstance(value, dict) and value for value in values):
        if all(name.isdigit() for name in row):
            return "index"
        inner = [value.keys() for value in values if isinstance(value, dict)]
        is_table = all(keys == inner[0] and all(map(str.isdigit, keys)) for keys in inner)
        return "columns" if is_table else None
    # Objects would be the messages of one row.
    columns = [one for one in values if isinstance(one, list) and one and type(one[0]) is not dict]
    is_table = len(columns) == len(values) and len(set(map(len, columns))) == 1
    named = len(columns) > 1 or {"text", "messages", "conversations"} & row.keys()
    return "list" if is_table and named else None


def lists_in(value: object, path: str = "") -> Iterator[str]:
    """Yield where an object of a JSON file has lists of objects or texts, as paths for jq."""
    if isinstance(value, dict):
        for key, inner in value.items():
            is_name = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key)
            yield from lists_in(inner, f"{path}.{key if is_name else json.dumps(key)}")
    elif path and isinstance(value, list) and value and isinstance(value[0], (dict, str)):
        yield path
