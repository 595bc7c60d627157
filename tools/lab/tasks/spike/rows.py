"""Task 6: rows of which one is damaged."""

from random import Random

from tools.lab.pairs import as_lines
from tools.lab.task import Place

ROWS, BATCH, SEED = 160, 4, 42  # SEED: of the run, which decides the order of the rows
FIRST, LAST = 26, 37  # the steps at which it may come: the losses before it have fallen
FILE = "rows.jsonl"
COLORS, SHAPES = ("red", "blue", "green", "black"), ("square", "circle", "line", "star")


def bad_line(seed: int) -> int:
    """Return the line of the damaged row, from 1, which a run uses in one of its later steps."""
    import numpy as np

    # As Sequences.epoch_order does in the first epoch, which has the number 1.
    order = np.random.default_rng([SEED, 1]).permutation(ROWS)
    place = Random(f"spike {seed}").randrange(BATCH * (FIRST - 1), BATCH * LAST)
    return int(order[place]) + 1


def step_of(line: int) -> int:
    """Return the step in which a run uses a line."""
    import numpy as np

    order = list(np.random.default_rng([SEED, 1]).permutation(ROWS))
    return order.index(line - 1) // BATCH + 1


def make_rows(seed: int) -> list[dict[str, str]]:
    """Return the rows: few words, so that their losses fall in some steps; one is damaged."""
    rows, random = [], Random(1)
    for _ in range(ROWS):
        one, other = (f"{random.choice(COLORS)} {random.choice(SHAPES)}" for _ in range(2))
        place = random.choice(("left", "right"))
        prompt = f"The {one} is to the {place} of the {other}."
        answer = f" So the {other} is not to the {place} of the {one}."
        rows.append({"prompt": prompt, "completion": answer})
    random = Random(f"characters {seed}")
    # Of a script that no other row has: the model has learned that these bytes do not occur.
    characters = "".join(chr(random.randrange(0x4E00, 0x9FA5)) for _ in range(8))
    rows[bad_line(seed) - 1]["completion"] = f" {characters}"
    return rows


def prepare(place: Place) -> None:
    """Write the rows."""
    (place.folder / FILE).write_text(as_lines(make_rows(place.seed)), encoding="utf-8")
