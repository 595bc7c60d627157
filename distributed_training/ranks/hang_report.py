"""What a hang report says about the ranks, from the states that they have published."""

import socket

import psutil

from distributed_training.text_tables import text_table
from distributed_training.units import rank_names

HEADERS = ("rank", "host", "pid", "process", "step", "doing", "last collective", "started")
RUNNING = psutil.STATUS_RUNNING


def table_of(states: dict[int, dict]) -> str:
    """Return a table with one row for each rank."""
    rows = [
        [
            str(rank),
            state["host"],
            str(state["pid"]),
            process_status(state),
            str(state["step"] or ""),
            state["doing"],
            f"{state['number']} {state['collective']}",
            f"{state['seconds']} s ago",
        ]
        for rank, state in states.items()
    ]
    return text_table(rows, HEADERS)


def diagnosis(states: dict[int, dict]) -> str:
    """Say which ranks the others wait for; "" if a rank does not train.

    Every rank starts the same collectives in the same order: "number" counts them.
    """
    latest = max(state["number"] for state in states.values())
    waiting = {rank: s["collective"] for rank, s in states.items() if s["number"] == latest}
    if behind := states.keys() - waiting:
        collective = f"collective {latest} ({waiting[min(waiting)]})"
        late = rank_names(behind).capitalize()
        return f"{late} did not start {collective}, in which the others wait"
    if any(state["step"] is None for state in states.values()):
        return ""
    names = ", ".join(f"rank {rank} in {name}" for rank, name in waiting.items())
    verb = "differ" if len({*waiting.values()}) > 1 else "wait"
    return f"The ranks {verb} in collective {latest}: {names}"


def process_status(state: dict) -> str:
    """Return the status of a rank's process, such as "stopped"; "" on another host."""
    try:
        here = state.get("host") == socket.gethostname()
        return psutil.Process(state["pid"]).status() if here else ""
    except psutil.Error:
        return "ended"
